// Conversions between the 16-bit types and float32, for problems without a 16-bit oneDNN kernel.
#ifndef JAXCONV_CPU_CONVERT_H_
#define JAXCONV_CPU_CONVERT_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/conv_problem.h"

namespace jaxconv::cpu {

inline float BF16ToFloat(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Rounds to nearest even; a NaN stays a (quiet) NaN.
inline uint16_t FloatToBF16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Converts eight at a time; the callers' loops finish the rest. Every AVX2 processor has F16C.
__attribute__((target("avx,f16c"))) inline int64_t F16ToFloatBy8(const uint16_t* from, float* to,
                                                                 int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
  }
  return i;
}

__attribute__((target("avx,f16c"))) inline int64_t FloatToF16By8(const float* from, uint16_t* to,
                                                                 int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
  }
  return i;
}

inline bool HasF16C() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}

// Converts elements [begin, end) of a buffer of `dtype` (f32, f16 or bf16) to float32.
inline void ToFloat(DType dtype, const void* from, float* to, int64_t begin, int64_t end) {
  const uint16_t* halves = static_cast<const uint16_t*>(from);
  if (dtype == DType::kF32) {
    std::memcpy(to + begin, static_cast<const float*>(from) + begin, (end - begin) * sizeof(float));
  } else if (dtype == DType::kBF16) {
    for (int64_t i = begin; i < end; ++i) to[i] = BF16ToFloat(halves[i]);
  } else {
    int64_t i = begin;
    if (HasF16C()) i += F16ToFloatBy8(halves + begin, to + begin, end - begin);
    for (; i < end; ++i) {
      _Float16 half;
      std::memcpy(&half, halves + i, sizeof(half));
      to[i] = static_cast<float>(half);
    }
  }
}

// The inverse, rounding to nearest even.
inline void FromFloat(DType dtype, const float* from, void* to, int64_t begin, int64_t end) {
  uint16_t* halves = static_cast<uint16_t*>(to);
  if (dtype == DType::kF32) {
    std::memcpy(static_cast<float*>(to) + begin, from + begin, (end - begin) * sizeof(float));
  } else if (dtype == DType::kBF16) {
    for (int64_t i = begin; i < end; ++i) halves[i] = FloatToBF16(from[i]);
  } else {
    int64_t i = begin;
    if (HasF16C()) i += FloatToF16By8(from + begin, halves + begin, end - begin);
    for (; i < end; ++i) {
      _Float16 half = static_cast<_Float16>(from[i]);
      std::memcpy(halves + i, &half, sizeof(half));
    }
  }
}

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_CONVERT_H_
