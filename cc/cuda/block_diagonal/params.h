// The parameter block of block_diagonal. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/common/halo_box.h"

namespace jaxconv::block_diagonal {

inline constexpr int kThreads = kHaloThreads, kWarps = kThreads / 32;
// Channels of a tile: 128 bytes of a pixel.
inline constexpr int kChannels = 64;

struct Params : HaloParams {
  int32_t group = 1;  // channels of a group, of x and of y
  // Of the filter, in elements: from a tap to the next, from a gathered channel of a group to the next,
  // from a channel of the result to the next, from a group to the next.
  int64_t tap_stride = 1, reduction_stride = 1, channel_stride = 1, group_stride = 1;
  FastDivmod tile_columns;
  int32_t tile_pixels = 1;
};

using LaunchParams = HaloLaunch<Params>;

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_
