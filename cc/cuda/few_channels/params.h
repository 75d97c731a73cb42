// The parameter block of few_channels, and constants shared by plans and kernels. Plain data,
// created on the host without CUDA headers.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_PARAMS_H_
#define JAXCONV_CUDA_FEW_CHANNELS_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/common/epilogue_params.h"

namespace jaxconv::few_channels {

inline constexpr int kThreads = 128;
// wgrad: pixels of y of a tile; fprop, wgrad: output channels.
inline constexpr int kTilePixels = 128;
inline constexpr int kTileChannels = 64;
// Pairs of elements that a thread holds in registers between global and shared memory.
inline constexpr int kPairsInFlight = 4;
// fprop: bytes of shared memory in which a warp transposes 16 pixels of a tile's channels. Plain
// float32 tiles do not use it.
inline constexpr int kStagingBytes = 16 * kTileChannels * 2;
// Bytes of a k-block (8 words) of a filter of 64 columns in shared memory.
inline constexpr int kFilterBlockBytes = 8 * kTileChannels * 4;
// dgrad: pixels of a tile, and the distance in floats between pixels of z, at which eight pixels of
// four pairs have no bank conflicts.
inline constexpr int kDgradPixels = 256;
constexpr int DgradPitch(int z_columns) { return (z_columns + 7) / 16 * 16 + 8; }

// One axis of the convolution: i = p * stride + r * dilation - pad.
struct Axis {
  int32_t in = 1, out = 1, filter = 1;  // extents of x, y and w
  int32_t stride = 1, dilation = 1, pad = 0;
};

// What the kernels get. A launch sets the pointers.
struct Params {
  const void* lhs = nullptr;  // in the order of the operation's arguments
  const void* rhs = nullptr;
  void* out = nullptr;  // wgrad: float32 sums, one filter after another for every slice
  Axis rows, columns;
  int32_t c = 1, k = 1;
  int32_t k_vector = 0;  // rows of K elements, of w and y, are aligned to 16 bytes
  int64_t lhs_batch = 0, rhs_batch = 0, out_batch = 0;  // in elements
  // wgrad: elements of all batches' filters.
  int64_t out_elements = 0;

  // The grid: x runs over tiles of pixels, and CTA b processes tiles b, b + gridDim.x, ... (wgrad:
  // one CTA for each slice). y runs over the parts of the other extent (column_parts, in wgrad
  // times row_parts) and over the batch.
  int32_t tiles = 1;  // of one batch
  FastDivmod tiles_across, tiles_down;
  FastDivmod column_parts, row_parts;
  // fprop, wgrad: a tile is 8 (or 16) blocks of 16 neighbouring pixels of a row of y,
  // 1 << log2_across of them side by side. dgrad: 16 blocks of 16 pixels of a row of dy, of which only tile_columns
  // columns of dx are complete.
  int32_t log2_across = 0;
  int32_t tile_rows = 8, tile_columns = 16;
  // float32, fprop and wgrad: pixels of neighbouring lanes are 1 << log2_spread apart
  // (SpreadPixel).
  int32_t log2_spread = 0;
  // The halo tile: the part of the gathered tensor that a tile needs, in shared memory.
  int32_t halo_rows = 1;
  // fprop, wgrad: a row of the halo tile begins halo_lead elements (pairs: 0 or 1, 16-byte chunks:
  // 0 to 7) before the tile's first element, so that pairs (chunks) are aligned in memory as in the
  // halo tile. In each pass every thread of the CTA copies one pair (chunk).
  int32_t halo_lead = 0;
  int32_t halo_words = 0;      // rows of x are whole pairs
  int32_t word_copies = 0;     // float32: rows of x are not whole chunks; words are copied
  FastDivmod halo_row_divmod;  // by the pairs (chunks) of a row
  int32_t rows_per_pass = 0, pairs_per_pass = 0;
  int32_t halo_pairs = 0;        // of all its rows
  int32_t blocks_per_fetch = 1;  // k-blocks that a warp multiplies while a part of a halo arrives
  int32_t halo_spare = 0;        // wgrad: an unused element of the halo tile
  FastDivmod c_divmod, row_stride_divmod, column_stride_divmod;
  int32_t pitch = 0;       // elements of a halo row; wgrad: of one channel and residue
  int32_t copy_bytes = 0;  // distance of the copy that is shifted by one element; 0: none
  int32_t halo_bytes = 0;
  // fprop: the reduction consists of runs of neighbouring elements of a halo row. Each run is
  // padded to words of 4 bytes, which begin run_lead (0 or 1) elements before the run.
  int32_t runs = 1, run_elements = 1, runs_of_row = 1, run_lead = 0;
  FastDivmod words_of_run;
  int32_t k_blocks = 1;  // of 8 words of the reduction, in dgrad of channels of dy
  // dgrad: the first row (column) of dy in the first tile's halo.
  int32_t first_row = 0, first_column = 0;
  int32_t row_period = 1, column_period = 1;  // distance between the taps of one residue of dx
  int32_t z_step = 0;                         // floats of z between the terms of a sum
  EpilogueParams epilogue;
};

// The parameter block of a plan: the kernel's parameters and what a launch needs in addition.
struct LaunchParams {
  Params kernel;
  int64_t shared_bytes = 0;
  int64_t grid_x = 1, grid_y = 1;
};

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_PARAMS_H_
