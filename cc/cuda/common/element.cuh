// Element types: vectors of four, and conversions to and from float.
#ifndef JAXCONV_CUDA_COMMON_ELEMENT_CUH_
#define JAXCONV_CUDA_COMMON_ELEMENT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/conv_problem.h"

namespace jaxconv {

template <DType kType>
struct ElementOf;
template <>
struct ElementOf<DType::kF32> {
  using Type = float;
};
template <>
struct ElementOf<DType::kF16> {
  using Type = __half;
};
template <>
struct ElementOf<DType::kBF16> {
  using Type = __nv_bfloat16;
};

__device__ inline float ToFloat(float value) { return value; }
__device__ inline float ToFloat(__half value) { return __half2float(value); }
__device__ inline float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ inline T FromFloat(float value);
template <>
__device__ inline float FromFloat<float>(float value) {
  return value;
}
template <>
__device__ inline __half FromFloat<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// `kWidth` (1 or 4) neighbouring elements, packed in registers as in memory.
template <typename T, int kWidth>
struct Pack;
template <typename T>
struct Pack<T, 1> {
  T value;
  __device__ void Load(const T* source) { value = __ldg(source); }
  __device__ void Clear() { value = FromFloat<T>(0.0f); }
  __device__ void Unpack(float (&out)[1]) const { out[0] = ToFloat(value); }
};
template <>
struct Pack<float, 4> {
  float4 value;
  __device__ void Load(const float* source) {
    value = __ldg(reinterpret_cast<const float4*>(source));
  }
  __device__ void Clear() { value = make_float4(0, 0, 0, 0); }
  __device__ void Unpack(float (&out)[4]) const {
    out[0] = value.x, out[1] = value.y, out[2] = value.z, out[3] = value.w;
  }
};
template <typename T>
struct Pack<T, 4> {
  uint2 value;
  __device__ void Load(const T* source) { value = __ldg(reinterpret_cast<const uint2*>(source)); }
  __device__ void Clear() { value = make_uint2(0, 0); }
  __device__ void Unpack(float (&out)[4]) const {
    T elements[4];
    memcpy(elements, &value, sizeof(value));
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = ToFloat(elements[i]);
  }
};

// Two elements rounded into a word.
template <typename T>
__device__ __forceinline__ uint32_t PackPair(float first, float second);
template <>
__device__ __forceinline__ uint32_t PackPair<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
template <>
__device__ __forceinline__ uint32_t PackPair<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

// kWidth neighbouring elements, up to 16 bytes, loaded and stored as one vector at an address
// aligned to its size.
template <typename T, int kWidth>
struct Neighbours {
  static constexpr int kBytes = kWidth * sizeof(T);
  using Raw = std::conditional_t<
      kBytes == 16, uint4,
      std::conditional_t<kBytes == 8, uint2,
                         std::conditional_t<kBytes == 4, uint32_t, unsigned short>>>;
  static_assert(sizeof(Raw) == kBytes);
  Raw raw;

  static __device__ __forceinline__ Neighbours Load(const T* from) {
    return {*reinterpret_cast<const Raw*>(from)};
  }
  static __device__ __forceinline__ Neighbours Rounded(const float (&values)[kWidth]) {
    Neighbours rounded;
    if constexpr (sizeof(T) == 2 && kWidth % 2 == 0) {
      uint32_t words[kWidth / 2];
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) {
        words[i] = PackPair<T>(values[2 * i], values[2 * i + 1]);
      }
      memcpy(&rounded.raw, words, kBytes);
    } else {
      T elements[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) elements[i] = FromFloat<T>(values[i]);
      memcpy(&rounded.raw, elements, kBytes);
    }
    return rounded;
  }
  __device__ __forceinline__ void Unpack(float (&values)[kWidth]) const {
    T elements[kWidth];
    memcpy(elements, &raw, kBytes);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = ToFloat(elements[i]);
  }
  __device__ __forceinline__ void AddTo(float (&values)[kWidth]) const {
    float added[kWidth];
    Unpack(added);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] += added[i];
  }
  __device__ __forceinline__ void Store(T* to) const { *reinterpret_cast<Raw*>(to) = raw; }
};

// Stores four neighbouring elements at an address aligned to their size.
__device__ inline void StoreQuad(float* to, const float* quad) {
  *reinterpret_cast<float4*>(to) = make_float4(quad[0], quad[1], quad[2], quad[3]);
}
template <typename T>
__device__ inline void StoreQuad(T* to, const float* quad) {
  T elements[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) elements[i] = FromFloat<T>(quad[i]);
  uint2 packed;
  memcpy(&packed, elements, sizeof(packed));
  *reinterpret_cast<uint2*>(to) = packed;
}

// Zeros for a row of any tile. Loads in the padding read them, so that the hot loop needs no
// predicate.
static __device__ const uint4 kZeroRow[32] = {};

template <typename T>
__device__ __forceinline__ const T* Zeros() {
  return reinterpret_cast<const T*>(kZeroRow);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_ELEMENT_CUH_
