// The plan of elementwise functions of many small arrays.
#ifndef JAXCONV_CUDA_ELEMENTWISE_PLAN_H_
#define JAXCONV_CUDA_ELEMENTWISE_PLAN_H_

#include <cstdint>
#include <vector>

#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/pass.h"

namespace jaxconv {

inline constexpr int kElementwiseThreads = 256, kElementsOfThread = 8;
inline constexpr int64_t kElementsOfCta = kElementwiseThreads * kElementsOfThread;

namespace elementwise {

const std::vector<PassKernel>& Kernels();

// Plans `elementwise` with n results and, in all, b bytes of operands and results.
Status PlanOf(const PassKey& key, const Gpu& gpu, PassPlan* plan);

}  // namespace elementwise
}  // namespace jaxconv

#endif  // JAXCONV_CUDA_ELEMENTWISE_PLAN_H_
