// A move that is opaque to the compiler.
#ifndef JAXCONV_CUDA_PTX_KEPT_CUH_
#define JAXCONV_CUDA_PTX_KEPT_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

// Returns the value and keeps it in a register. Otherwise the compiler may recompute it within a
// loop, by more instructions than the rest of the loop has.
__device__ __forceinline__ int32_t Kept(int32_t value) {
  int32_t kept;
  asm volatile("mov.b32 %0, %1;" : "=r"(kept) : "r"(value));
  return kept;
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_KEPT_CUH_
