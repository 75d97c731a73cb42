// The parameters of fused_row_sm90.cuh. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_WINOGRAD_FUSED_ROW_PARAMS_H_
#define JAXCONV_CUDA_WINOGRAD_FUSED_ROW_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/winograd/params.h"

namespace jaxconv::winograd {

// Positions (tiles of m outputs) of a CTA's tile, CTAs of a cluster, channels of a load.
inline constexpr int kRowTilePositions = 64;
inline constexpr int kRowClusterCtas = 2;
inline constexpr int kRowLoadChannels = 64;
// A load has one position more than a tile, because the inputs of the last position reach into it.
inline constexpr int kRowBoxPixels = kRowTilePositions + 1;

// Bytes of a row of the filter (row_filter.h) in a TMA box: the widest that a box can have.
inline constexpr int kFilterRowBytes = 512;

struct RowParams {
  void* out = nullptr;
  ScaleSource x_scale, w_scale;
  int32_t out_is_f32 = 0;  // else the operand type
  // Positions of an output row: its tiles, and one that is computed but not stored.
  FastDivmod row_positions, rows;
  int32_t images = 0;
  int32_t width = 0;                   // of the output
  int32_t lower_w = 0, lower_h = 0;    // the first base pixel
  int32_t offset_w = 0, offset_h = 0;  // from it to a tile's first input under filter row 0
  // Channels of a group of the input and of the output; of all groups of the output.
  int32_t reduction = 0, columns = 0, out_channels = 0;
  // Digits of a cluster tile's index, fastest first: ranges of 128 channels, pairs of 64 positions,
  // groups.
  FastDivmod n_tiles, m_tiles;
  int32_t tiles = 0;
  // Blocks of 32 channels of the reduction; filter rows (kFilterRowBytes) from one group to the
  // next, and from 128 output channels to the next.
  int32_t reduction_blocks = 0;
  int32_t filter_group = 0, filter_columns = 0;
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FUSED_ROW_PARAMS_H_
