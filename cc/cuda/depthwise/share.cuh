// A CTA's share of a wgrad.
#ifndef JAXCONV_CUDA_DEPTHWISE_SHARE_CUH_
#define JAXCONV_CUDA_DEPTHWISE_SHARE_CUH_

#include <cstdint>

#include "cuda/common/halo_box.h"

namespace jaxconv::depthwise {

// Its slice, the taps that it sums, its filter of a batch, its channels.
struct Share {
  int32_t slice, part, filter, first_channel;
  __device__ __forceinline__ Share(const HaloParams& params, int32_t tap_parts, int tile_channels) {
    int32_t rest = blockIdx.x, channel_tile;
    slice = rest % params.slices;
    rest /= params.slices;
    part = rest % tap_parts;
    rest /= tap_parts;
    params.channel_tiles.Divmod(rest, &filter, &channel_tile);
    first_channel = channel_tile * tile_channels;
  }
};

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_SHARE_CUH_
