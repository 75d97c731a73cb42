// A move that the compiler does not see through.
#ifndef JAXCONV_CUDA_PTX_KEPT_CUH_
#define JAXCONV_CUDA_PTX_KEPT_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

// The value, which stays in a register: in loops the compiler may compute it again from what it was
// computed from, by more instructions than the loop has besides.
__device__ __forceinline__ int32_t Kept(int32_t value) {
  int32_t kept;
  asm volatile("mov.b32 %0, %1;" : "=r"(kept) : "r"(value));
  return kept;
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_KEPT_CUH_
