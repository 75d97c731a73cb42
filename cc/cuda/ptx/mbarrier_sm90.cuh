// mbarrier, named-barrier and register-budget instructions (sm_90a).
//
// An mbarrier completes a phase when all its arrivals and announced bytes have arrived. A wait
// names the parity of its phase; on a new barrier, phase -1 (parity 1) counts as complete.
#ifndef JAXCONV_CUDA_PTX_MBARRIER_SM90_CUH_
#define JAXCONV_CUDA_PTX_MBARRIER_SM90_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

__device__ __forceinline__ void BarrierInit(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at a barrier in the shared memory of any CTA of the cluster (AddressInCluster), without
// release and acquire at cluster scope, which would cost a fifth of a mainloop's throughput: the
// waiter's copies to this CTA's memory need neither.
__device__ __forceinline__ void BarrierArriveInCluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\nWAIT:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@done bra DONE;\n\tbra WAIT;\nDONE:\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Whether the phase is complete; does not wait.
__device__ __forceinline__ bool BarrierTest(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t.reg .pred done;\n\tmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, done;\n\t}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// True in one thread of a converged warp. If the compiler does not know that only one thread issues
// a copy, it loops over all threads that might.
__device__ __forceinline__ bool ElectOne() {
  uint32_t elected;
  asm volatile(
      "{\n\t.reg .pred one;\n\telect.sync _|one, 0xffffffff;\n\tselp.u32 %0, 1, 0, one;\n\t}"
      : "=r"(elected));
  return elected;
}

// Named barriers, 1 to 15: `threads` threads take part, some by arriving only.
__device__ __forceinline__ void NamedBarrierSync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedBarrierArrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Sets the registers of each thread of the warpgroup from here on; a multiple of 8.
template <int kRegisters>
__device__ __forceinline__ void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void LowerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_MBARRIER_SM90_CUH_
