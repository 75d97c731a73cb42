// Plans of rows_sm90.cuh. Plain C++.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_ROWS_PLAN_H_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_ROWS_PLAN_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"

namespace jaxconv::block_diagonal {

Status MakeRowsPlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                    int64_t slices, Plan* plan);

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_ROWS_PLAN_H_
