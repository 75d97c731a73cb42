// cp.async: global memory -> shared memory without passing through registers (sm_80).
#ifndef JAXCONV_CUDA_PTX_CP_ASYNC_CUH_
#define JAXCONV_CUDA_PTX_CP_ASYNC_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

// Copies kBytes (16, 8 or 4); where `valid` is false it writes zeros and reads nothing, whatever
// `source` is. 16 bytes go past the L1 cache (.cg) unless kThroughL1; narrower copies exist only
// through it (.ca), which also merges the neighbours of a sector.
// No memory clobber, here and in the loads of mma.cuh: what orders them is CopyAsyncWait and the
// barriers, and between those the compiler should move other instructions past them.
template <int kBytes, bool kThroughL1 = (kBytes < 16)>
__device__ __forceinline__ void CopyAsync(uint32_t shared, const void* source, bool valid) {
  if constexpr (!kThroughL1) {
    static_assert(kBytes == 16);
    asm volatile(
        "{\n\t.reg .pred ignore;\n\tsetp.eq.u32 ignore, %2, 0;\n\t"
        "cp.async.cg.shared.global [%0], [%1], 16, ignore;\n\t}" ::"r"(shared),
        "l"(source), "r"(static_cast<uint32_t>(valid)));
  } else {
    static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4);
    asm volatile(
        "{\n\t.reg .pred ignore;\n\tsetp.eq.u32 ignore, %2, 0;\n\t"
        "cp.async.ca.shared.global [%0], [%1], %3, ignore;\n\t}" ::"r"(shared),
        "l"(source), "r"(static_cast<uint32_t>(valid)), "n"(kBytes));
  }
}

// source + count * bytes in one instruction: the compiler spends five on the same 64-bit product.
template <typename T>
__device__ __forceinline__ const T* OffsetBytes(const T* source, int32_t count, int32_t bytes) {
  uint64_t address;
  asm("mad.wide.s32 %0, %1, %2, %3;"
      : "=l"(address)
      : "r"(count), "r"(bytes), "l"(reinterpret_cast<uint64_t>(source)));
  return reinterpret_cast<const T*>(address);
}

// The line of `source` to L2; nothing waits for it.
__device__ __forceinline__ void PrefetchToL2(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
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
