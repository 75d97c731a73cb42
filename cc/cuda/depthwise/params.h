// The parameter block of depthwise. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_DEPTHWISE_PARAMS_H_
#define JAXCONV_CUDA_DEPTHWISE_PARAMS_H_

#include <cstdint>

#include "cuda/common/halo_box.h"

namespace jaxconv::depthwise {

inline constexpr int kThreads = kHaloThreads, kWarps = kThreads / 32;

struct Params : HaloParams {
  // Strides of the filter in elements: from a tap to the next, from a channel to the next.
  int32_t tap_stride = 1, channel_stride = 1;
  // Blocks of outputs in each image of a tile, one for each warp (toeplitz.cuh: strips, with
  // kChannels / 8 warps each).
  int32_t blocks_across = 1, blocks_down = 1;
  FastDivmod strips_across;  // toeplitz.cuh: divides by blocks_across
  // toeplitz.cuh: box rows of a stage; bytes from a channel's plane to the next and from a row to
  // the next; offset of the band in shared memory.
  int32_t stage_rows = 0, plane_bytes = 0, plane_row_bytes = 0, band_offset = 0;
  int32_t tap_parts = 1;  // wgrad: groups of taps with separate CTAs
  // direct_tma_sm90.cuh and wgrad_tma_sm90.cuh: number of stages, offset of dy in a stage.
  int32_t stages = 2, walked_offset = 0;
};

// hankel.cuh. box_columns divides by the words of a row of x.
struct HankelParams : HaloParams {
  int32_t tap_parts = 1, parts_of_row = 1;  // groups of taps with separate CTAs
  int32_t strips = 1;                       // of a tile, side by side
  FastDivmod dy_words;                      // of a row
  // The planes of x, from byte 0, the planes of dy, and a row of zeros.
  int32_t x_plane_bytes = 0, dy_plane_bytes = 0, dy_row_bytes = 0;
  int32_t dy_offset = 0, zeros_offset = 0;
};

using LaunchParams = HaloLaunch<Params>;

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_PARAMS_H_
