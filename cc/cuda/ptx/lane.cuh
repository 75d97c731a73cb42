// The thread's index in its warp.
#ifndef JAXCONV_CUDA_PTX_LANE_CUH_
#define JAXCONV_CUDA_PTX_LANE_CUH_

#include <cuda_runtime.h>

namespace jaxconv {

// threadIdx.x % 32, read again at every call, so that the compiler hoists nothing that depends on
// it: otherwise it keeps the epilogue's addresses in registers throughout the mainloop.
__device__ __forceinline__ int Lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// threadIdx.x, in the same way.
__device__ __forceinline__ int Thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_LANE_CUH_
