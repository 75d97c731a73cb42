// Powers of two and reciprocals by the special function unit. The error bounds are those of the PTX
// manual; subnormal operands and results are flushed to zero.
#ifndef JAXCONV_CUDA_PTX_APPROXIMATE_CUH_
#define JAXCONV_CUDA_PTX_APPROXIMATE_CUH_

#include <cuda_runtime.h>

namespace jaxconv {

// 2^x, with a relative error of at most 2^-22.5.
__device__ __forceinline__ float PowerOf2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// 1 / x, within one ulp.
__device__ __forceinline__ float Reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_APPROXIMATE_CUH_
