#ifndef JAXCONV_CUDA_DEPTHWISE_WALK_PLAN_H_
#define JAXCONV_CUDA_DEPTHWISE_WALK_PLAN_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/halo_box.h"
#include "cuda/common/kernel.h"

namespace jaxconv::depthwise {

// A line of kernels.def for walk_sm90.cuh: the filter and its stride; a thread's channels, columns
// of outputs and stages; threads of a CTA and CTAs of an SM.
struct WalkInstance {
  int64_t filter_rows, filter_columns, stride, vec, strip, stages, threads, ctas_per_sm;
};

// The parameter block of walk_sm90.cuh, which has a thread for each item.
struct WalkParams : HaloParams {
  int32_t tap_stride = 1, channel_stride = 1;  // of the filter, in elements
  // Chunks of a pixel's channels (one a thread), strips of a row, parts of a map's rows.
  FastDivmod chunks, strips, parts;
  int32_t steps = 1;  // of a part
};

Status PlanWalk(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan);

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_WALK_PLAN_H_
