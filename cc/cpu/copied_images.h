// Copies of 8-bit images, for which oneDNN computes exact sums where it does not for the original
// images (onednn_bugs.h). Copies include the padding and, on CPUs without a product of two s8
// numbers, are u8.
//
// Flipping the sign bit of an s8 number x gives x + 128 as u8, and padding of 0 becomes 128. Every
// sum then exceeds that of x by 128 times the sum of the filter over all taps and input channels:
// one offset for each output channel.
#ifndef JAXCONV_CPU_COPIED_IMAGES_H_
#define JAXCONV_CPU_COPIED_IMAGES_H_

#include <cstdint>

#include "core/conv_problem.h"

namespace jaxconv::cpu {

// The convolution of a copy, which needs no padding. `p` has no negative low padding, except on an
// axis whose rows are divided.
ConvProblem WithoutPadding(const ConvProblem& p);

// Copies the images of `p` with their padding; with `flip`, flips the sign bits of both.
void CopyImages(const ConvProblem& p, bool flip, const void* x, void* copy);

// Output channels are summed in blocks, which may run on different threads.
int64_t OffsetBlocks(const ConvProblem& p);
// offsets[k] for the output channels of a block: 128 times the sum of w, modulo 2^32 like the
// kernels' sums.
void MakeOffsets(const ConvProblem& p, const void* w, int64_t block, uint32_t* offsets);
void SubtractOffsets(const ConvProblem& p, const uint32_t* offsets, int64_t pixels, void* sums);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_COPIED_IMAGES_H_
