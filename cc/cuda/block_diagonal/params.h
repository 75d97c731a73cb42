// The parameter block of block_diagonal. Plain data, created on the host without CUDA headers.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/common/halo_box.h"

namespace jaxconv::block_diagonal {

inline constexpr int kThreads = kHaloThreads, kWarps = kThreads / 32;
// Bytes of a pixel in a tile: 64 16-bit or 32 float32 channels.
inline constexpr int kTileBytes = 128;
constexpr int TileChannels(int element_bytes) { return kTileBytes / element_bytes; }
// The distance between pixels of a stage. With 16 bytes of padding, the same chunk of eight
// neighbouring pixels (a matrix of ldmatrix) lies in different banks, and the address is linear in
// the pixel. A tap then is a constant offset; a swizzle would have to be computed for each tap.
inline constexpr int kPixelBytes = kTileBytes + 16;
// The most positions of a tile, and the bytes of an entry in the tables of tile.cuh.
inline constexpr int kPositions = kThreads, kPlaceBytes = 8;

// runs_sm90.cuh, wgrad_runs_sm90.cuh: bytes of a pixel, runs of a tile, pixels of zeros after a
// box; for wgrad stages and threads.
inline constexpr int kRunPixelBytes = kTileBytes, kTileRuns = 32, kRunGuardPixels = 8;
inline constexpr int kRunStages = 3, kRunThreads = kThreads + 128;

// rows_sm90.cuh: pairs of warpgroups; bytes of a warpgroup's channels in a pixel; threads of the
// pairs and of one producer for each; pixels of a product; bytes of a row of pixels, and of a
// warpgroup's two rows of results; copies of filter rows.
inline constexpr int kRowPairs = 2, kRowBytes = kTileBytes / 2,
                     kRowThreads = kRowPairs * (256 + 32);
inline constexpr int kRowPixels = 64;
inline constexpr int kRowStageBytes = (kRowPixels + 8) * kRunPixelBytes;
inline constexpr int kRowStagingBytes = 2 * kRowPixels * kRowBytes, kRowTaps = 5;

struct Params : HaloParams {
  int32_t group = 1;  // channels of a group, of x and of y: a power of 2
  int32_t group_log2 = 0;
  // Strides of the filter in elements: between taps, between gathered channels of a group, between
  // channels of the result, between groups.
  int64_t tap_stride = 1, reduction_stride = 1, channel_stride = 1, group_stride = 1;
  int32_t tile_pixels = 1, box_pixels = 1;  // of all images of the tile
  // The distance between rows of a box. In chunks it is congruent modulo 8 to the positions in a
  // row of the tile, so that the last position of a row and the first of the next have no bank
  // conflict.
  int32_t box_row_bytes = 0;
  // walked_columns: in wgrad_runs_sm90.cuh the pixels in a row of dy's tile; in rows_sm90.cuh the
  // stored columns of an image. run_filters: the filters of a batch, which `images` does not
  // include.
  int32_t walked_columns = 0, run_filters = 1;
  FastDivmod run_groups;     // groups of rows of a tile
  int32_t result_bytes = 0;  // phases_sm90.cuh: of a tile's results
  // rows_sm90.cuh: the images and rows of a tile for one pair of warpgroups.
  int32_t pair_images = 1, pair_rows = 1;
};

using LaunchParams = HaloLaunch<Params>;

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_
