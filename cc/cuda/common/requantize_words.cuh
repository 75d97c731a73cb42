// Eight neighbouring channels of a pixel in the int8 families' epilogue, as words of the output's
// type.
#ifndef JAXCONV_CUDA_COMMON_REQUANTIZE_WORDS_CUH_
#define JAXCONV_CUDA_COMMON_REQUANTIZE_WORDS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/requantize_params.h"

namespace jaxconv {
namespace requantize_internal {

// Four values saturated to bytes.
__device__ __forceinline__ uint32_t PackS8(const int32_t* v) {
  uint32_t high, all;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(v[3]), "r"(v[2]), "r"(0));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(v[1]), "r"(v[0]), "r"(high));
  return all;
}
__device__ __forceinline__ uint32_t PackU8(const int32_t* v) {
  uint32_t high, all;
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(v[3]), "r"(v[2]), "r"(0));
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(v[1]), "r"(v[0]), "r"(high));
  return all;
}
// The low bytes of four values.
__device__ __forceinline__ uint32_t LowBytes(const int32_t* v) {
  return __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
}

__device__ __forceinline__ void LoadEight(const void* from, uint32_t (&words)[2]) {
  const uint2 v = __ldg(static_cast<const uint2*>(from));
  words[0] = v.x, words[1] = v.y;
}
template <int kWords>
__device__ __forceinline__ void LoadEight(const void* from, uint32_t (&words)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    const uint4 v = __ldg(static_cast<const uint4*>(from) + i / 4);
    words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
  }
}

__device__ __forceinline__ void StoreEight(void* to, const uint32_t (&words)[2]) {
  *static_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}
template <int kWords>
__device__ __forceinline__ void StoreEight(void* to, const uint32_t (&words)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    static_cast<uint4*>(to)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
  }
}

// Converts a byte of a word to float in two instructions: it places the byte in the low mantissa
// bits of 2^23 and subtracts 2^23, which is exact. The conversion instruction uses the slowest
// pipe, 16 lanes a cycle. `exponent`: 0x4b000000 in a register (ComputedHere); as a constant it
// would be loaded for every byte.
template <bool kSigned>
__device__ __forceinline__ float ByteAsFloat(uint32_t word, int byte, uint32_t exponent) {
  const uint32_t bytes = kSigned ? word ^ 0x80808080u : word;
  return __uint_as_float(__byte_perm(bytes, exponent, 0x7650 | byte)) -
         (kSigned ? 0x1p23f + 128 : 0x1p23f);
}

// Element e of 8 as a float, from an array stored in kWords words.
template <int kWords>
__device__ __forceinline__ float ToFloat(const uint32_t (&words)[kWords], DType dtype, int e) {
  if constexpr (kWords == 2) {
    const uint32_t byte = words[e / 4] >> (e % 4 * 8);
    return dtype == DType::kS8 ? static_cast<float>(static_cast<int8_t>(byte))
                               : static_cast<float>(static_cast<uint8_t>(byte));
  } else if constexpr (kWords == 4) {
    const auto half = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
    return dtype == DType::kBF16 ? __bfloat162float(__ushort_as_bfloat16(half))
                                 : __half2float(__ushort_as_half(half));
  } else {
    return dtype == DType::kF32 ? __uint_as_float(words[e])
                                : static_cast<float>(static_cast<int32_t>(words[e]));
  }
}

// Packs eight finished values into kWords words of the output's type.
template <int kWords>
__device__ __forceinline__ void Round(const RequantizeParams& params, const float (&t)[8],
                                      uint32_t (&words)[kWords]) {
  if constexpr (kWords == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (params.out_dtype == DType::kBF16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(t[2 * i], t[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(t[2 * i], t[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
  } else if (kWords == 8 && params.out_dtype == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __float_as_uint(t[i]);
  } else {
    int32_t r[8];  // saturated to int32; NaN gives 0
#pragma unroll
    for (int e = 0; e < 8; ++e) r[e] = __float2int_rn(t[e]);
    if constexpr (kWords == 8) {
#pragma unroll
      for (int e = 0; e < 8; ++e) words[e] = r[e];
    } else {
      if (params.zero_point != 0) {
        constexpr int32_t kFar = 1 << 20;  // outside the byte range for every zero point
#pragma unroll
        for (int e = 0; e < 8; ++e) r[e] = min(max(r[e], -kFar), kFar) + params.zero_point;
      }
      const bool s8 = params.out_dtype == DType::kS8;
#pragma unroll
      for (int i = 0; i < 2; ++i) words[i] = s8 ? PackS8(r + 4 * i) : PackU8(r + 4 * i);
    }
  }
}

// Packs sums without an epilogue.
template <int kWords>
__device__ __forceinline__ void Plain(const RequantizeParams& params, const int32_t (&sum)[8],
                                      uint32_t (&words)[kWords]) {
  if constexpr (kWords == 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = LowBytes(sum + 4 * i);
  } else if (kWords == 8 && params.out_dtype == DType::kS32) {
#pragma unroll
    for (int e = 0; e < kWords; ++e) words[e] = sum[e];
  } else {
    float t[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) t[e] = static_cast<float>(sum[e]);
    Round<kWords>(params, t, words);
  }
}

__device__ __forceinline__ void LoadFloats(const float* from, float (&values)[8]) {
  uint32_t words[8];
  LoadEight(from, words);
#pragma unroll
  for (int e = 0; e < 8; ++e) values[e] = __uint_as_float(words[e]);
}

// The negative bytes of a word as a mask.
__device__ __forceinline__ uint32_t NegativeBytes(uint32_t word) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(mask) : "r"(word));
  return mask;
}

// Saturates four values to bytes; with ReLU, clears the negative ones.
template <bool kSigned>
__device__ __forceinline__ uint32_t PackBytes(const RequantizeParams& params, const int32_t* v) {
  if constexpr (!kSigned) return PackU8(v);
  const uint32_t word = PackS8(v);
  return word & (~NegativeBytes(word) | params.kept_negative);
}

}  // namespace requantize_internal
}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_REQUANTIZE_WORDS_CUH_
