// The sums over positions of an activation that is not stored:
//
//     sum of activation(u),    u = (y - mean) * scale + offset
//
// in float32, without a rounding to y's type, for example for squeeze and excitation after a
// normalisation; on request also the sums of activation'(u) and activation'(u) * (y - mean), from
// which the gradients of the vectors follow. The array is (segments, rows, channels), contiguous;
// absent vectors are 0, 1 and 0. Rows are divided among CTAs as in masked_sums.h.
#ifndef JAXCONV_CUDA_NORMALISATION_ACTIVATED_SUMS_H_
#define JAXCONV_CUDA_NORMALISATION_ACTIVATED_SUMS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/epilogue.h"
#include "core/status.h"
#include "cuda/normalisation/derivative.h"
#include "cuda/normalisation/plan.h"

namespace jaxconv {

struct ActivatedSums {
  int64_t segments, rows, channels, parts;  // rows and parts of a segment
  const void* y;
  ChannelNumbers mean, scale, offset;  // each may be null
  Activation activation;
  Derivative derivative;  // of the activation; kNone: only the first sum
  float slope;
  float* sums;  // (segments, parts, 1 or 3, channels)
};

// Unimplemented: a type, number of channels or number of parts that the kernels do not accept; an
// array whose address is no multiple of 16 bytes.
Status LaunchActivatedSums(DType dtype, const ActivatedSums& sums, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_ACTIVATED_SUMS_H_
