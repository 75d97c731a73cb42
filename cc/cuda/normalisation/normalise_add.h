// The end of a residual block in training, with one bit for each element that says whether the
// activation's derivative is 1 there:
//
//     n_i    = (y_i - mean_i) * scale_i + offset_i, computed in float32 and rounded
//     result = n_0 + n_1, or n_0 + shortcut, rounded and clamped to [0, below]
//     bits   = 0 < result < below, 8 channels per byte, the first channel in the lowest bit
//
// Arrays are (rows, channels), contiguous, of one type; bits are (rows, channels / 8); vectors have
// `channels` float32 numbers. A product and a sum are rounded once (FMA), as XLA's code may do, so
// the result differs from XLA's by at most one rounding. NaN stays NaN, and its bit is 0.
#ifndef JAXCONV_CUDA_NORMALISATION_NORMALISE_ADD_H_
#define JAXCONV_CUDA_NORMALISATION_NORMALISE_ADD_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv {

inline constexpr int kMaxNormalisedArrays = 2;

struct NormaliseAdd {
  int64_t rows, channels;
  int64_t ctas;                              // about as many as are resident
  const void* arrays[kMaxNormalisedArrays];  // the second may be null
  const float* means[kMaxNormalisedArrays];  // for each array
  const float* scales[kMaxNormalisedArrays];
  const float* offsets[kMaxNormalisedArrays];
  const void* shortcut;  // the unnormalised summand; null with two arrays
  float below;           // a number of the arrays' type; NaN for no bound
  void* result;
  uint8_t* bits;
};

// Unimplemented: a type or number of channels that the kernels do not accept; operands whose
// address is no multiple of 16 bytes.
Status LaunchNormaliseAdd(DType dtype, const NormaliseAdd& sum, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_NORMALISE_ADD_H_
