// The parameter block of imma_nchw32. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_IMMA_NCHW32_PARAMS_H_
#define JAXCONV_CUDA_IMMA_NCHW32_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/common/requantize_params.h"

namespace jaxconv::imma_nchw32 {

// The most taps in the table of the parameter block: 16x16 and 6x6x6 fit, and the block stays below
// the 4 KB that every driver accepts.
inline constexpr int kMaxTaps = 256;
// Columns of a k-block that threads track separately: blocks of 32 channels, or, with 4 channels,
// the pixels of a 64-byte k-block.
inline constexpr int kMaxColumns = 16;
// Bits of a pixel's mask: one for each tap coordinate of each padded axis. Bit 31 is never set; it
// marks the end of the reduction.
inline constexpr int kMaxTapBits = 31;
inline constexpr uint32_t kEnd = uint32_t{1} << 31;

// One axis of the convolution: i = p * stride + r * dilation - pad.
struct Axis {
  int32_t in = 1, stride = 1, pad = 0;
  int32_t mask_bits = 0;  // the filter's extent; 0 if no tap ever lies outside x
  FastDivmod out, dilation;
};

// A tap of the filter.
struct Tap {
  // The distance in units (below) that the source of a thread's copies moves to this tap from the
  // previous k-block, without and with a carry of the inner loop into the outer one.
  int32_t arrival[2] = {0, 0};
  uint32_t bits = kEnd;  // one for each of its coordinates on padded axes
};

// The kernel's parameters. A launch sets the pointers.
//
// A row of the packed filter is traversed by two loops, over taps and over blocks of channels; a
// thread's column of a k-block tracks one tap and one block. The layouts differ in the order of the
// loops and in strides:
//
//                 inner loop          outer loop     from pixel to pixel  from block to block
//     nhwc        blocks of 32        taps           C                    32 bytes
//     nchw32      taps                blocks of 32   32                   32 H W bytes
//     4 channels  taps                -              4                    -
//
// A unit is 32 bytes, or 4 bytes with 4 channels.
struct Params {
  const void* x = nullptr;
  const void* w = nullptr;
  Axis axis[3];
  int32_t rows = 1;                  // output pixels of all images
  int32_t channels = 1;              // output channels of a group
  int32_t pixel_units = 1;           // from one pixel of x to the next
  int32_t image_pixels = 1;          // from one image of x to the next, in multiples of pixel_units
  int64_t x_group = 0, w_group = 0;  // from one group to the next, in bytes
  int32_t w_row = 32;                // from one output channel to the next, in bytes
  int32_t k_blocks = 1;
  // The steps of the two loops in a k-block.
  FastDivmod inner;
  int32_t inner_step = 1, outer_step = 0;
  int32_t taps_inside = 0;  // the inner loop runs over the taps
  // A one-dimensional grid: n tiles fastest, so that neighbours share their rows of A, then groups,
  // which share lines of nhwc, then m tiles.
  FastDivmod n_tiles, groups;
  RequantizeParams epilogue;
  // The source of each column in the first k-block, in units.
  int32_t first[kMaxColumns] = {};
  // After the last tap, the table holds entries for columns past the end.
  Tap tap[kMaxTaps + 2 * kMaxColumns];
};
static_assert(sizeof(Params) <= 4096);

// The parameter block of a plan: the kernel's parameters and the launch configuration.
struct LaunchParams {
  Params kernel;
  int64_t ctas = 0;
};

}  // namespace jaxconv::imma_nchw32

#endif  // JAXCONV_CUDA_IMMA_NCHW32_PARAMS_H_
