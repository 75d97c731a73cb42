// cp.async: global memory -> shared memory without passing through registers (sm_80).
#ifndef JAXCONV_CUDA_PTX_CP_ASYNC_CUH_
#define JAXCONV_CUDA_PTX_CP_ASYNC_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

// Copies kBytes (16, 8 or 4); where `valid` is false it writes zeros and reads nothing, whatever
// `source` is. 16 bytes go past the L1 cache (.cg); narrower copies exist only through it (.ca),
// which also merges the neighbours of a sector.
template <int kBytes>
__device__ __forceinline__ void CopyAsync(uint32_t shared, const void* source, bool valid) {
  const int read = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source),
                 "r"(read)
                 : "memory");
  } else {
    static_assert(kBytes == 8 || kBytes == 4);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(source),
                 "n"(kBytes), "r"(read)
                 : "memory");
  }
}

__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's committed groups are still under way.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_CP_ASYNC_CUH_
