// Minimum and maximum that propagate NaN, unlike fminf and fmaxf.
#ifndef JAXCONV_CUDA_PTX_MIN_MAX_CUH_
#define JAXCONV_CUDA_PTX_MIN_MAX_CUH_

#include <cuda_runtime.h>

namespace jaxconv {

__device__ __forceinline__ float MaxNan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float MinNan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_MIN_MAX_CUH_
