// The parameter block of depthwise_int8. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_DEPTHWISE_INT8_PARAMS_H_
#define JAXCONV_CUDA_DEPTHWISE_INT8_PARAMS_H_

#include <cstdint>

#include "cuda/common/halo_box.h"
#include "cuda/common/requantize_params.h"

namespace jaxconv::depthwise_int8 {

inline constexpr int kThreads = kHaloThreads;
// Channels of a tile, and of a lane.
inline constexpr int kChannels = 64, kLaneChannels = 8;
// Neighbouring outputs of a lane. Odd, so that the lanes of two strips read different banks.
inline constexpr int kStrip = 7;
inline constexpr int kStrips = kThreads / (kChannels / kLaneChannels);  // of a tile

// Taps of a filter row that a lane holds; rows in shared memory are padded with zeros.
inline constexpr int kTapsAtATime = 3;

struct Params : HaloParams {
  int32_t strips_across = 1;  // of a tile
  int32_t filter_row = 32;    // bytes from a channel of the packed filter to the next
  int32_t row_taps = 3;       // of a filter row in shared memory
  int32_t taps_offset = 0;    // there
  RequantizeParams requantize;
};

using LaunchParams = HaloLaunch<Params>;

}  // namespace jaxconv::depthwise_int8

#endif  // JAXCONV_CUDA_DEPTHWISE_INT8_PARAMS_H_
