// The gradient of max pooling, gathered: an element's is the sum of dy over the windows that contain
// it and have their place there (max_pool.h). Float32 sums in a fixed order, rounded once.
//
// With batch norm in front of the pooling, the gradient of its operand y, from the same sum dz:
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
  const void* dy2;  // or null; else the gradient is dy + dy2, rounded
  const uint8_t* places;
  const void* y;  // or null, as the vectors (channels,): dx is dz
  const float* scale;
  const float* y_scale;
  const float* offset;
  void* dx;
};

// Unimplemented: as LaunchMaxPool.
Status LaunchMaxPoolGradient(DType dtype, const MaxPoolGradient& gradient, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_POOLING_MAX_POOL_GRADIENT_H_
