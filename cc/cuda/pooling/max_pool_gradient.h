// The gradient of max pooling, as a gather: an element's gradient is the sum of dy over the windows
// whose place is this element (max_pool.h). Sums are float32, in a fixed order, rounded once.
//
// If batch norm precedes the pooling, the result is the gradient of its operand y, from the same
// sum dz:
//
//     dx = dz * scale + y * y_scale + offset
#ifndef JAXCONV_CUDA_POOLING_MAX_POOL_GRADIENT_H_
#define JAXCONV_CUDA_POOLING_MAX_POOL_GRADIENT_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/pooling/windows.h"

namespace jaxconv {

struct MaxPoolGradient {
  PoolWindows windows;
  const void* dy;
  const void* dy2;  // or null; otherwise the gradient is dy + dy2, rounded
  const uint8_t* places;
  const void* y;  // null, like the vectors (channels,), if dx is dz
  const float* scale;
  const float* y_scale;
  const float* offset;
  void* dx;
};

// Unimplemented: as in LaunchMaxPool.
Status LaunchMaxPoolGradient(DType dtype, const MaxPoolGradient& gradient, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_POOLING_MAX_POOL_GRADIENT_H_
