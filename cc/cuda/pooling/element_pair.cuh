// What a thread of the pooling kernels has: pairs of 16-bit elements, numbers of its channels.
#ifndef JAXCONV_CUDA_POOLING_ELEMENT_PAIR_CUH_
#define JAXCONV_CUDA_POOLING_ELEMENT_PAIR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/pooling/windows.h"

namespace jaxconv {

template <typename T>
using PairOf = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <typename T>
__device__ __forceinline__ PairOf<T> AsPair(uint32_t word) {
  PairOf<T> pair;
  memcpy(&pair, &word, sizeof(pair));
  return pair;
}
template <typename Pair>
__device__ __forceinline__ uint32_t AsWord(const Pair& pair) {
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

// One instruction for an element of bfloat16: its bits are the float's upper half.
template <typename T>
__device__ __forceinline__ float2 UnpackPair(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  } else {
    return __half22float2(AsPair<T>(pair));
  }
}

// Sums, rounded: what a sum in float32 is rounded to.
template <typename T>
__device__ __forceinline__ uint32_t AddPairs(uint32_t a, uint32_t b) {
  return AsWord(__hadd2(AsPair<T>(a), AsPair<T>(b)));
}

// A vector's numbers of a thread's channels.
__device__ __forceinline__ void LoadNumbers(const float* from, float (&values)[kPoolVector]) {
#pragma unroll
  for (int i = 0; i < kPoolVector; i += 4) {
    const float4 quad = __ldg(reinterpret_cast<const float4*>(from + i));
    values[i] = quad.x, values[i + 1] = quad.y, values[i + 2] = quad.z, values[i + 3] = quad.w;
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_POOLING_ELEMENT_PAIR_CUH_
