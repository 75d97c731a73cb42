// Sizes of toeplitz.cuh's tiles, for the kernel and its plan.
#ifndef JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_TILE_H_
#define JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_TILE_H_

#include "core/fast_divmod.h"

namespace jaxconv::depthwise {

// Outputs of a warp: products of 8 rows x 16 columns side by side.
inline constexpr int kStripRows = 8;
JAXCONV_HOST_DEVICE constexpr int StripColumns(int products) { return 16 * products; }

// The filter columns of a band with this many column blocks of 8 that hold taps.
JAXCONV_HOST_DEVICE constexpr int ToeplitzFilterColumns(int blocks) { return 8 * blocks - 7; }
JAXCONV_HOST_DEVICE constexpr int ToeplitzInstructions(int blocks) { return blocks <= 3 ? 2 : 3; }
// Blocks of 8 columns of x that a strip reads.
JAXCONV_HOST_DEVICE constexpr int ToeplitzMatrices(int blocks, int products) {
  return StripColumns(products) / 8 + blocks - 1;
}

// A row of the band: the first tap is element kBandStart, words reach from tap -7 to 8 blocks - 1.
inline constexpr int kBandStart = 8;
JAXCONV_HOST_DEVICE constexpr int BandTaps(int blocks) { return kBandStart + 8 * blocks; }

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_TILE_H_
