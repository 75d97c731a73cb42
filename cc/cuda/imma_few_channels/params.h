// The parameter block of imma_few_channels. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_IMMA_FEW_CHANNELS_PARAMS_H_
#define JAXCONV_CUDA_IMMA_FEW_CHANNELS_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/common/requantize_params.h"

namespace jaxconv::imma_few_channels {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kChannels = 32;     // output channels of a CTA
inline constexpr int kBlockPixels = 16;  // neighbours in a row of y that a warp computes at once
inline constexpr int kPixelBytes = 4;
inline constexpr int kTermsBytes = kChannels * 8;  // scales and biases
// A filter row is one instruction's reduction, 8 pixels.
inline constexpr int kMaxFilterColumns = 8;
// Pixels of one 16-byte copy.
inline constexpr int kCopyPixels = 4;

// One axis: i = p * stride + r * dilation - pad.
struct Axis {
  int32_t in = 1, out = 1, taps = 1, stride = 1, dilation = 1, pad = 0;
};

// The kernel's parameters. A launch sets the pointers.
//
// Tile: tile_rows rows of y by blocks_across blocks of 16 pixels. Its halo tile begins at a
// multiple of 4 pixels of x, `lead` pixels before the first tap of the first output.
struct Params {
  const void* x = nullptr;
  const void* w = nullptr;
  Axis rows, columns;
  int32_t channels = 32;  // of y
  int32_t w_row = 32;     // from one output channel to the next, in bytes
  int32_t tile_rows = 1;
  FastDivmod blocks_across;                // of a tile
  FastDivmod parts, across, down;          // digits of a tile index, fastest first; then images
  int32_t tiles = 1;                       // of all images and channel parts
  int32_t halo_rows = 1, halo_copies = 1;  // copies of 16 bytes of a row
  int32_t lead = 0;
  int32_t vector = 0;  // rows of x are whole copies
  RequantizeParams requantize;
};

// The parameter block of a plan: the kernel's parameters and the launch configuration.
struct LaunchParams {
  Params kernel;
  int32_t ctas = 0;
  int32_t shared_bytes = 0;
};

}  // namespace jaxconv::imma_few_channels

#endif  // JAXCONV_CUDA_IMMA_FEW_CHANNELS_PARAMS_H_
