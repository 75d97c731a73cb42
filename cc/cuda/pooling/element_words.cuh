// The data of a thread of the pooling kernels: the elements of its channels as words (two of 16
// bits or one float32), and per-channel numbers.
#ifndef JAXCONV_CUDA_POOLING_ELEMENT_WORDS_CUH_
#define JAXCONV_CUDA_POOLING_ELEMENT_WORDS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/element.cuh"
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

// A thread's channels in memory order, accessed as 16 bytes.
template <typename T>
struct ElementWords {
  static constexpr int kWords = kPoolVector * sizeof(T) / 4;
  uint32_t word[kWords];

  static __device__ __forceinline__ ElementWords Load(const void* array, int64_t at) {
    ElementWords loaded;
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const T*>(array) + at);
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 raw = __ldg(from + i / 4);
      loaded.word[i] = raw.x, loaded.word[i + 1] = raw.y;
      loaded.word[i + 2] = raw.z, loaded.word[i + 3] = raw.w;
    }
    return loaded;
  }
  static __device__ __forceinline__ ElementWords All(uint32_t word) {
    ElementWords all;
#pragma unroll
    for (int i = 0; i < kWords; ++i) all.word[i] = word;
    return all;
  }
  static __device__ __forceinline__ ElementWords Rounded(const float (&values)[kPoolVector]) {
    ElementWords rounded;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) rounded.word[i] = __float_as_uint(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        rounded.word[i] = PackPair<T>(values[2 * i], values[2 * i + 1]);
      }
    }
    return rounded;
  }
  __device__ __forceinline__ void Store(void* array, int64_t at) const {
    auto* to = reinterpret_cast<uint4*>(static_cast<T*>(array) + at);
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      to[i / 4] = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
    }
  }
  // One instruction for a bfloat16 element: it is the upper half of a float.
  __device__ __forceinline__ void Unpack(float (&values)[kPoolVector]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        values[i] = __uint_as_float(word[i]);
      } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        values[2 * i] = __uint_as_float(word[i] << 16);
        values[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
      } else {
        const float2 pair = __half22float2(AsPair<T>(word[i]));
        values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
      }
    }
  }
  // Sums, rounded from float32.
  __device__ __forceinline__ ElementWords Plus(const ElementWords& other) const {
    ElementWords sum;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        sum.word[i] = __float_as_uint(__uint_as_float(word[i]) + __uint_as_float(other.word[i]));
      } else {
        sum.word[i] = AsWord(__hadd2(AsPair<T>(word[i]), AsPair<T>(other.word[i])));
      }
    }
    return sum;
  }
};

// Loads a vector's numbers for a thread's channels.
__device__ __forceinline__ void LoadNumbers(const float* from, float (&values)[kPoolVector]) {
#pragma unroll
  for (int i = 0; i < kPoolVector; i += 4) {
    const float4 quad = __ldg(reinterpret_cast<const float4*>(from + i));
    values[i] = quad.x, values[i + 1] = quad.y, values[i + 2] = quad.z, values[i + 3] = quad.w;
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_POOLING_ELEMENT_WORDS_CUH_
