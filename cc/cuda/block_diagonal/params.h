// The parameter block of block_diagonal. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/common/halo_box.h"

namespace jaxconv::block_diagonal {

inline constexpr int kThreads = kHaloThreads, kWarps = kThreads / 32;
// Of a pixel in a tile: 64 channels of 16 bits, 32 of float32.
inline constexpr int kTileBytes = 128;
constexpr int TileChannels(int element_bytes) { return kTileBytes / element_bytes; }
// From a pixel of a stage to the next. The 16 bytes between them keep the same chunk of eight
// neighbouring pixels, a matrix of ldmatrix, in different banks, and leave an address linear in the
// pixel: a tap is a constant distance, where a swizzle would have to be computed for each.
inline constexpr int kPixelBytes = kTileBytes + 16;
// Most positions of a tile, and the bytes of an entry of the tables of tile.cuh.
inline constexpr int kPositions = kThreads, kPlaceBytes = 8;

// runs_sm90.cuh, wgrad_runs_sm90.cuh: bytes of a pixel, runs of a tile, zeros behind a box, and of
// wgrad the stages and the threads.
inline constexpr int kRunPixelBytes = kTileBytes, kTileRuns = 32, kRunGuardPixels = 8;
inline constexpr int kRunStages = 3, kRunThreads = kThreads + 128;

// rows_sm90.cuh: pairs of warpgroups, bytes of a warpgroup's channels of a pixel, threads of the pairs and of a
// producer for each, pixels of a product, bytes of a row of pixels and of a warpgroup's two rows of
// results, and places of filter rows.
inline constexpr int kRowPairs = 2, kRowBytes = kTileBytes / 2,
                     kRowThreads = kRowPairs * (256 + 32);
inline constexpr int kRowPixels = 64;
inline constexpr int kRowStageBytes = (kRowPixels + 8) * kRunPixelBytes;
inline constexpr int kRowStagingBytes = 2 * kRowPixels * kRowBytes, kRowTaps = 5;

struct Params : HaloParams {
  int32_t group = 1;  // channels of a group, of x and of y: a power of 2
  int32_t group_log2 = 0;
  // Of the filter, in elements: from a tap to the next, from a gathered channel of a group to the
  // next, from a channel of the result to the next, from a group to the next.
  int64_t tap_stride = 1, reduction_stride = 1, channel_stride = 1, group_stride = 1;
  int32_t tile_pixels = 1, box_pixels = 1;  // of all the tile's images
  // From a row of a box to the next, in chunks as many, modulo 8, as a row of the tile has
  // positions: the last position of a row and the first of the next are neighbours for the banks as
  // well.
  int32_t box_row_bytes = 0;
  // wgrad_runs_sm90.cuh: pixels of a row of dy's tile; rows_sm90.cuh: columns of an image that are
  // stored. Filters of a batch that `images` does not count.
  int32_t walked_columns = 0, run_filters = 1;
  FastDivmod run_groups;     // groups of rows of a tile
  int32_t result_bytes = 0;  // phases_sm90.cuh: of a tile of results
  // rows_sm90.cuh: images and rows of a tile that a pair of warpgroups has.
  int32_t pair_images = 1, pair_rows = 1;
};

using LaunchParams = HaloLaunch<Params>;

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_
