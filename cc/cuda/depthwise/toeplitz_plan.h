#ifndef JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_PLAN_H_
#define JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_PLAN_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"

namespace jaxconv::depthwise {

// A line of kernels.def for toeplitz.cuh.
struct ToeplitzInstance {
  int32_t channels, blocks, products, ctas_per_sm;
};

Status PlanToeplitz(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                    int64_t slices, Plan* plan);

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_PLAN_H_
