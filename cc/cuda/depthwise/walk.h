// What the plans of depthwise share: the convolution as the kernels walk it, and what no kernel of the
// family takes.
#ifndef JAXCONV_CUDA_DEPTHWISE_WALK_H_
#define JAXCONV_CUDA_DEPTHWISE_WALK_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"
#include "cuda/depthwise/params.h"

namespace jaxconv::depthwise {

// The share of the DRAM's rate that predictions count with. An assumption: no GPU has run these
// kernels yet, which are therefore chosen on request only.
inline constexpr double kDramShare = 0.75;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The gathered and the walked tensor (params.h).
struct Walk {
  Axis axis[3];  // without tiles
  int64_t channels = 1, gathered_channels = 1, repeat = 1, reduce = 1;
};
Walk MakeWalk(const ConvProblem& problem);

// Refuses what no kernel of the family takes.
Status CheckOperands(const KernelDesc& kernel, const ConvProblem& problem);
// Refuses other strides than `stride`, and dilation, of rows and columns.
Status CheckStride(const Walk& walk, int64_t stride);

// The fields that follow from the problem alone.
void DescribeOperands(const ConvProblem& problem, const Walk& walk, DType dtype, Params* params);

// The items of tiles of so many channels: images and channel_tiles of `params`, whose tiles are shaped.
// *of_channels: the items of one channel tile.
Status CountItems(const ConvProblem& problem, int64_t tile_channels, Params* params,
                  int64_t* of_channels);

// CTAs that share an SM, at most `most`.
int64_t CtasOfSm(int64_t most, int64_t shared_bytes, const Gpu& gpu);

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_WALK_H_
