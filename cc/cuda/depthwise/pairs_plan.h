#ifndef JAXCONV_CUDA_DEPTHWISE_PAIRS_PLAN_H_
#define JAXCONV_CUDA_DEPTHWISE_PAIRS_PLAN_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"

namespace jaxconv::depthwise {

// Rows of a box that arrive together, a multiple of the filter rows, so that all chunks have the
// same places.
constexpr int PairsRows(int filter_rows) { return filter_rows < 5 ? 2 * filter_rows : filter_rows; }

// CTAs of an SM; fewer with an epilogue, which takes registers.
constexpr int PairsCtas(int ctas, bool fused) { return fused && ctas > 4 ? ctas - 1 : ctas; }

// A line of kernels.def for pairs_sm90.cuh.
struct PairsInstance {
  int32_t filter_rows, filter_columns, channel_blocks, ctas_per_sm;
  int64_t channels() const { return 8 * int64_t{channel_blocks}; }
};

Status PlanPairs(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                 int64_t slices, Plan* plan);

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_PAIRS_PLAN_H_
