// The end of a residual block in training, with a bit for each element that tells whether the
// activation's gradient is one:
//
//     n_i     = (y_i - mean_i) * scale_i + offset_i in float32, rounded
//     result  = n_0 + other, rounded, between 0 and below;  other: an array as it is, or n_1
//     bits    = 0 < result < below, of 8 channels a byte, the first channel's the lowest
//
// Arrays are (rows, channels), contiguous, of one type, the bits (rows, channels / 8); vectors are
// float32 of `channels` numbers. A product and its sum round once (FMA), as XLA's code may, so that
// the result is XLA's but for a rounding; the bits are those of this result. NaN stays NaN, and its
// bit is 0.
#ifndef JAXCONV_CUDA_NORMALISATION_NORMALISE_ADD_H_
#define JAXCONV_CUDA_NORMALISATION_NORMALISE_ADD_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv {

inline constexpr int kMaxNormalisedArrays = 2;

struct NormaliseAdd {
  int64_t rows, channels;
  int64_t ctas;                              // about as many as run at a time
  const void* arrays[kMaxNormalisedArrays];  // the second or null
  const float* means[kMaxNormalisedArrays];  // of the arrays that there are
  const float* scales[kMaxNormalisedArrays];
  const float* offsets[kMaxNormalisedArrays];
  const void* shortcut;  // what is added as it is; null with two arrays
  float below;           // a number of the arrays' type; NaN for no bound
  void* result;
  uint8_t* bits;
};

// Unimplemented: a type or a number of channels that the kernels do not take, operands that do not
// lie on multiples of 16 bytes.
Status LaunchNormaliseAdd(DType dtype, const NormaliseAdd& sum, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_NORMALISE_ADD_H_
