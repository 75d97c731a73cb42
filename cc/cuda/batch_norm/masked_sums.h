// The sums over positions of batch norm's backward pass, with the mask of an activation, in one
// pass:
//
//     g        = gradient [+ gradient2], rounded
//     dz       = g where above < a (and a < below), else 0, or where a bit is set
//     sums[0]  = sum of dz,    sums[1 + i] = sum of dz * (y_i - mean_i)
//
// a is the activation's result, read, or (y_0 - mean_0) * scale + offset, rounded as dz's type.
// Bits are those of normalise_add.h, (rows, channels / 8) bytes.
// Arrays are (rows, channels), contiguous, of 16 bits; vectors are float32 of `channels` numbers.
// Each of `parts` CTAs adds its share of the rows in a fixed order, so that the bits of the sums
// are those of the shape and of `parts` alone.
#ifndef JAXCONV_CUDA_BATCH_NORM_MASKED_SUMS_H_
#define JAXCONV_CUDA_BATCH_NORM_MASKED_SUMS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv {

inline constexpr int kMaxSummedArrays = 2;

struct MaskedSums {
  int64_t rows, channels, parts;
  const void* gradient;
  const void* gradient2;                 // or null
  const void* result;                    // or null
  const uint8_t* bits;                   // or null; without either a is computed from y_0
  const void* arrays[kMaxSummedArrays];  // the second or null
  const float* means[kMaxSummedArrays];  // of the arrays that there are
  const float* scale;                    // where a is computed
  const float* offset;                   // where a is computed
  float above, below;                    // below: NaN for no bound
  void* masked;                          // dz, or null
  float* sums;                           // (parts, 1 + arrays, channels)
};

// Unimplemented: a type or a number of channels that the kernels do not take, operands that do not
// lie on multiples of 16 bytes.
Status LaunchMaskedSums(DType dtype, const MaskedSums& sums, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_BATCH_NORM_MASKED_SUMS_H_
