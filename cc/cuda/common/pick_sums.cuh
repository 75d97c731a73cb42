// Selects a part of a thread's sums in a loop over the parts.
#ifndef JAXCONV_CUDA_COMMON_PICK_SUMS_CUH_
#define JAXCONV_CUDA_COMMON_PICK_SUMS_CUH_

namespace jaxconv {

// sums[e] = of(part, e) for a part in [kFirst, kEnd). The sums are registers, so a uniform branch
// selects a copy of the code for each part. Without branches the compiler would select every
// element among all parts.
template <int kFirst, int kEnd, int kCount, typename Of>
__device__ __forceinline__ void PickSums(int part, Of of, float (&sums)[kCount]) {
  if constexpr (kEnd - kFirst > 1) {
    constexpr int kMiddle = (kFirst + kEnd) / 2;
    if (part < kMiddle) {
      PickSums<kFirst, kMiddle>(part, of, sums);
    } else {
      PickSums<kMiddle, kEnd>(part, of, sums);
    }
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const float sum = of(kFirst, e);
      asm volatile("mov.b32 %0, %1;" : "=f"(sums[e]) : "f"(sum));
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_PICK_SUMS_CUH_
