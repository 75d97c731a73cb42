// Plans of runs_sm90.cuh. Plain C++.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_RUNS_PLAN_H_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_RUNS_PLAN_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/block_diagonal/instance.h"
#include "cuda/block_diagonal/params.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"

namespace jaxconv::block_diagonal {

// Refuses problems that the kernels of 3x3 filters on sm_90 do not accept.
Status CheckRuns(const Instance& instance, const ConvProblem& problem, const Params& params);

Status MakeRunsPlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                    int64_t slices, Plan* plan);

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_RUNS_PLAN_H_
