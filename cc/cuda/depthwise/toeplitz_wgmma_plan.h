// Host and device: the parameters of toeplitz_wgmma_sm90.cuh, and its plan. Plain C++.
#ifndef JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_WGMMA_PLAN_H_
#define JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_WGMMA_PLAN_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/fast_divmod.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/halo_box.h"
#include "cuda/common/kernel.h"

namespace jaxconv::depthwise {

// Channels of a tile; rows of the map in a product (256 columns, one for each block of 8 pixels);
// filter rows between steps s.
inline constexpr int kBandChannels = 8, kBandRows = 32, kBandStep = 8;
// Consumer warpgroups, and the bytes of the sums that one of them exchanges at a time: 8 rows of 64
// columns from each warp, twice.
inline constexpr int kBandWarpgroups = 2;
inline constexpr int kBandSumBytes = 8 * 64 * 4, kBandPassBytes = 4 * kBandSumBytes;

// Blocks of 8 zero columns to the left of a map, for a band of `chunks` blocks.
JAXCONV_HOST_DEVICE constexpr int BandHalo(int chunks) { return (chunks - 1) / 2; }
JAXCONV_HOST_DEVICE constexpr int BandFilterColumns(int chunks) { return 8 * chunks - 7; }
// Elements of a filter row of the band: 8 zeros, then tap t of a lane's row g at 8 + t + g.
JAXCONV_HOST_DEVICE constexpr int BandRowTaps(int chunks) { return 8 * chunks + 8; }

struct ToeplitzWgmmaParams : HaloParams {
  // Strides of the filter in elements: from a tap to the next, from a channel to the next.
  int32_t tap_stride = 1, channel_stride = 1;
  int32_t products = 1;                    // of kBandRows rows, of a channel
  FastDivmod blocks;                       // of 8 columns of a row of the map
  int32_t plane_rows = 0;                  // of a channel's plane
  int32_t row_bytes = 0, plane_bytes = 0;  // from one row of a plane to the next, from one plane to
                                           // the next
  int32_t box_offset = 0, band_offset = 0, sums_offset = 0;
};

// A line of kernels.def for toeplitz_wgmma_sm90.cuh: blocks of 8 columns that the band spans, pairs
// of steps of 8 filter rows.
struct ToeplitzWgmmaInstance {
  int32_t chunks, step_pairs;
};

Status PlanToeplitzWgmma(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                         int64_t slices, Plan* plan);

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_WGMMA_PLAN_H_
