// Activations in float32, within a few ulp even where the result is small relative to the argument.
// Each is straight-line arithmetic that vectorizes. NaN stays NaN, because comparisons with it are
// false.
#ifndef JAXCONV_CPU_ACTIVATIONS_H_
#define JAXCONV_CPU_ACTIVATIONS_H_

#include <cstdint>
#include <cstring>

#include "cpu/block_loops.h"

namespace jaxconv::cpu {

JAXCONV_INLINE float Polynomial(float, float last) { return last; }

// c0 + x (c1 + x (c2 + ...)).
template <typename... Rest>
JAXCONV_INLINE float Polynomial(float x, float first, Rest... rest) {
  return __builtin_fmaf(x, Polynomial(x, rest...), first);
}

JAXCONV_INLINE float Clamped(float value, float low, float high) {
  value = value < low ? low : value;
  return value > high ? high : value;
}

JAXCONV_INLINE float PowerOf2(int32_t exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

// exp(x + low) for x in [-104, 89], where `low` is the rounding error of x. Outside, exp is 0 or
// infinite.
//
// Adding 1.5 * 2^23 to a value below 2^22 leaves the integer, rounded to nearest, in the last bits.
// log 2 is subtracted in two parts. exp(r) - 1 - r over r^2 is a polynomial of least error over
// |r| <= log(2) / 2, 3.4e-9.
JAXCONV_INLINE float ExpReduced(float x, float low) {
  constexpr float kShift = 12582912.0f;
  constexpr int32_t kShiftBits = 0x4b400000;
  const float shifted = __builtin_fmaf(x, 1.44269504f, kShift);
  const float whole = shifted - kShift;
  float r = __builtin_fmaf(whole, -0x1.62e43p-1f, x);
  r = __builtin_fmaf(whole, 0x1.05c61p-29f, r) + low;
  const float q = Polynomial(r, 0.5f, 0.16666512191295624f, 0.0416661873459816f,
                             0.008369598537683487f, 0.0013951718574389815f);
  const float power = 1.0f + __builtin_fmaf(r * r, q, r);
  int32_t exponent;
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  exponent -= kShiftBits;
  // In two factors, because 2^-150 and 2^128 are not representable.
  const int32_t half = exponent >> 1;
  return power * PowerOf2(half) * PowerOf2(exponent - half);
}

JAXCONV_INLINE float Exp(float x) { return ExpReduced(Clamped(x, -104.0f, 89.0f), 0.0f); }

JAXCONV_INLINE float Sigmoid(float v) { return 1.0f / (1.0f + Exp(-v)); }

JAXCONV_INLINE float Silu(float v) { return v / (1.0f + Exp(-v)); }

// Below 5/8: u + u^3 P(u^2), with a minimax P of error 4.1e-9. Above: by exp, because 1 - tanh is
// small.
JAXCONV_INLINE float Tanh(float v) {
  const float u = __builtin_fabsf(v), z = u * u;
  const float p = Polynomial(z, -0.3333328366279602f, 0.13331490755081177f, -0.05374349653720856f,
                             0.020650586113333702f, -0.005717044230550528f);
  const float small = __builtin_fmaf(p * z, u, u);
  const float e = Exp(-2.0f * u);
  const float large = (1.0f - e) / (1.0f + e);
  return __builtin_copysignf(u < 0.625f ? small : large, v);
}

// v Phi(v). For the normal distribution, Phi(-u) = exp(-u^2 / 2) m(u), where m, a multiple of
// Mills' ratio, is smooth: a minimax polynomial in (u - 4) / (u + 4) with the relative error
// 3.2e-10 for u up to 15; from there on exp is 0.
JAXCONV_INLINE float Gelu(float v) {
  const float u = Clamped(__builtin_fabsf(v), 0.0f, 15.0f);
  const float s = (u - 4.0f) / (u + 4.0f);
  const float m =
      Polynomial(s, 0.09441064298152924f, -0.17039772868156433f, 0.12437925487756729f,
                 -0.07170738279819489f, 0.030864806845784187f, -0.008492381311953068f,
                 0.0005074995569884777f, 0.0006403418956324458f, -0.0001864005607785657f,
                 -4.9222642701352015e-05f, 2.5469071260886267e-05f, 7.639163413841743e-06f);
  const float square = u * u, error = __builtin_fmaf(u, u, -square);
  const float density = ExpReduced(Clamped(-0.5f * square, -104.0f, 0.0f), -0.5f * error);
  // The density of an infinite v is 0: v = inf gives 15 * 0 = 0, v = -inf gives -inf * 0 = NaN.
  const float tail = (v > 15.0f ? 15.0f : v) * density * m;
  return v < 0 ? tail : v - tail;
}

// v / 2 (1 + tanh(a / 2)) = v / (1 + exp(-a)), a = sqrt(8 / pi) (v + 0.044715 v^3). exp magnifies
// the error of a, so `low` collects every rounding error of a. The linear factor has few enough
// digits to make q - kLinear exact. Above v = 12, a exceeds 104.
JAXCONV_INLINE float GeluTanh(float v) {
  constexpr float kLinear = 1.595703125f, kLinearLow = 6.5996605730847e-05f;
  constexpr float kCubic = 0.0713548138737678f, kCubicLow = 2.3988324e-09f;
  const float u = Clamped(v, -12.0f, 12.0f);
  const float square = u * u, square_low = __builtin_fmaf(u, u, -square);
  const float q = __builtin_fmaf(kCubic, square, kLinear);
  float q_low = __builtin_fmaf(kCubic, square, -(q - kLinear));
  q_low += kLinearLow + __builtin_fmaf(kCubicLow, square, kCubic * square_low);
  const float a = u * q;
  const float low = __builtin_fmaf(u, q_low, __builtin_fmaf(u, q, -a));
  return v / (1.0f + ExpReduced(Clamped(-a, -104.0f, 89.0f), -low));
}

// The factor is 1 from 3 on, so no product overflows.
JAXCONV_INLINE float HardSwish(float v) { return v * (Clamped(v + 3.0f, 0.0f, 6.0f) / 6.0f); }

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_ACTIVATIONS_H_
