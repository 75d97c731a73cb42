// The sums over positions in a normalisation's backward pass, with the mask or the derivative of an
// activation, in one pass:
//
//     g        = gradient, or gradient + gradient2 rounded
//     dz       = g * derivative(u), rounded; or g where above < a (< below) or where a bit is
//                set, else 0; or g
//     sums[0]  = sum of dz,    sums[1 + i] = sum of dz * (y_i - mean_i)
//
// where a is the activation's stored result, or u = (y_0 - mean_0) * scale + offset rounded to dz's
// type. With `activation`, the last sum is of g * activation(u), and neither u nor dz is rounded:
// the gradient of a gate that multiplies the activation. The bits are those of normalise_add.h, (rows, channels / 8) bytes. Arrays are (segments,
// rows, channels), contiguous, of one type. Vectors have `channels` float32 numbers; all segments
// share a vector, or each has its own. Each of a segment's `parts` CTAs adds its share of the rows
// in a fixed order, so the bits of the sums depend only on the shape and on `parts`.
#ifndef JAXCONV_CUDA_NORMALISATION_MASKED_SUMS_H_
#define JAXCONV_CUDA_NORMALISATION_MASKED_SUMS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/epilogue.h"
#include "core/status.h"
#include "cuda/normalisation/derivative.h"
#include "cuda/normalisation/plan.h"

namespace jaxconv {

inline constexpr int kMaxSummedArrays = 2;

struct MaskedSums {
  int64_t segments, rows, channels, parts;  // rows and parts of a segment
  const void* gradient;
  const void* gradient2;                   // or null
  const void* result;                      // or null
  const uint8_t* bits;                     // or null
  const void* arrays[kMaxSummedArrays];    // each or null
  ChannelNumbers means[kMaxSummedArrays];  // for each array
  ChannelNumbers scale, offset;            // if u is computed
  Derivative derivative;                   // of u
  float slope;
  Activation activation;  // with the derivative `derivative`; kNone: no sum of it
  float above, below;     // NaN: no bound
  void* masked;           // dz, or null
  float* sums;            // (segments, parts, 1 + arrays, or 3 with `activation`, channels)
};

// Unimplemented: a type, form or number of channels that the kernels do not accept; operands whose
// address is no multiple of 16 bytes.
Status LaunchMaskedSums(DType dtype, const MaskedSums& sums, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_MASKED_SUMS_H_
