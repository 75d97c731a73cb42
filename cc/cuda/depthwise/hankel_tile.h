// Sizes of hankel.cuh's tiles, for the kernel and its plan.
#ifndef JAXCONV_CUDA_DEPTHWISE_HANKEL_TILE_H_
#define JAXCONV_CUDA_DEPTHWISE_HANKEL_TILE_H_

#include <cstdint>

#include "core/fast_divmod.h"

namespace jaxconv::depthwise {

// A tile's channels, one a warp.
inline constexpr int kHankelChannels = 8;
// Columns of dy of a strip: two instructions of 16.
inline constexpr int kHankelColumns = 32;
inline constexpr int kHankelSteps = kHankelColumns / 16;
inline constexpr int kHankelZeroBytes = kHankelColumns * 2;

// The taps of a part, by blocks of 8 filter rows and of 16 filter columns.
JAXCONV_HOST_DEVICE constexpr int HankelRows(int row_blocks) { return 8 * row_blocks; }
JAXCONV_HOST_DEVICE constexpr int HankelColumns(int column_blocks) { return 16 * column_blocks; }

// The pitch of the sums in shared memory, [tap][channel], in floats; odd against bank conflicts.
inline constexpr int kHankelSumPitch = kHankelChannels + 1;

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_HANKEL_TILE_H_
