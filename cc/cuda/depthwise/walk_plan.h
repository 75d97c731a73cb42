#ifndef JAXCONV_CUDA_DEPTHWISE_WALK_PLAN_H_
#define JAXCONV_CUDA_DEPTHWISE_WALK_PLAN_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"

namespace jaxconv::depthwise {

inline constexpr int kWalkThreads = 128, kWalkWarps = kWalkThreads / 32;
// Rows of pixels in shared memory, and how many rows ago the row was read whose place is filled.
inline constexpr int kWalkStages = 8, kWalkLag = 2;
inline constexpr int kCopyPlaceBytes = 32;  // of a warp

// A line of kernels.def, of walk_sm90.cuh. A strip is that of a warp, or with 16 lanes of half a warp.
struct WalkInstance {
  int32_t filter_rows, filter_columns, strip, ctas_per_sm, lanes;
  int64_t channels() const { return 2 * lanes; }
  int64_t strips() const { return kWalkThreads / lanes; }  // of a tile
};

Status PlanWalk(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan);

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_WALK_PLAN_H_
