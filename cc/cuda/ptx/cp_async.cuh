// cp.async: copies global to shared memory without registers (sm_80).
#ifndef JAXCONV_CUDA_PTX_CP_ASYNC_CUH_
#define JAXCONV_CUDA_PTX_CP_ASYNC_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

// Copies kBytes (16, 8 or 4). If `valid` is false it writes zeros and does not read `source`, which
// may be invalid. 16-byte copies bypass L1 (.cg) unless kThroughL1; narrower copies always go
// through it (.ca), which also merges accesses to one sector. There is no memory clobber here or in
// the loads of mma.cuh: CopyAsyncWait and the barriers order them, and between these the compiler
// should be free to move other instructions.
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

// source + count * bytes in one instruction; the compiler uses five for the same 64-bit product.
template <typename T>
__device__ __forceinline__ const T* OffsetBytes(const T* source, int32_t count, int32_t bytes) {
  uint64_t address;
  asm("mad.wide.s32 %0, %1, %2, %3;"
      : "=l"(address)
      : "r"(count), "r"(bytes), "l"(reinterpret_cast<uint64_t>(source)));
  return reinterpret_cast<const T*>(address);
}

// Prefetches the line of `source` to L2.
__device__ __forceinline__ void PrefetchToL2(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_CP_ASYNC_CUH_
