// A normalised array through an activation with an exponential:
//
//     z = activation((y - mean) * scale + offset)
//
// in float32, rounded to y's type once. Arrays are (segments, rows, channels), contiguous, of one
// 16-bit type; absent vectors are 0, 1 and 0.
#ifndef JAXCONV_CUDA_NORMALISATION_NORMALISE_H_
#define JAXCONV_CUDA_NORMALISATION_NORMALISE_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/epilogue.h"
#include "core/status.h"
#include "cuda/normalisation/plan.h"

namespace jaxconv {

struct Normalise {
  int64_t segments, rows, channels;  // rows of a segment
  int64_t ctas;                      // about as many as are resident
  const void* y;
  ChannelNumbers mean, scale, offset;  // each may be null
  Activation activation;               // one of CheckExponential
  void* z;
};

// Unimplemented: a type, number of channels or activation that the kernels do not accept; an array
// whose address is no multiple of 16 bytes.
Status LaunchNormalise(DType dtype, const Normalise& layer, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_NORMALISE_H_
