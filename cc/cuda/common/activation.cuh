// Activations of float sums.
//
// Quick activations take one to six instructions and are inlined in every store. The others take 5
// to 30; a copy for each of a thread's 64 to 160 sums would fill the instruction cache, so stores
// apply them in a loop that is not unrolled. All functions here are inlined, because a call beside
// wgmma makes ptxas serialise it.
#ifndef JAXCONV_CUDA_COMMON_ACTIVATION_CUH_
#define JAXCONV_CUDA_COMMON_ACTIVATION_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/epilogue.h"
#include "cuda/common/element.cuh"
#include "cuda/ptx/approximate.cuh"
#include "cuda/ptx/min_max.cuh"

namespace jaxconv {

__device__ __forceinline__ bool IsQuick(Activation activation) {
  return activation <= Activation::kLeakyRelu || activation == Activation::kHardSwish;
}

// exp(x + low), or exp(x), = power * value. x * log2(e) = n + f with n in [-126, 126]: saturation
// clamps n, and adding 1.5 * 2^23 moves n to the last bits.
struct Exponential {
  float value, power;
};
template <typename... Low>
__device__ __forceinline__ Exponential Exp(float x, Low... low) {
  constexpr float kLog2E = 1.44269502f, kLog2ELow = 1.92596303e-8f;
  const float n = __fmaf_rd(__saturatef(fmaf(x, kLog2E / 252, 0.5f)), 252, 12582913);
  float f = fmaf(x, kLog2ELow, fmaf(x, kLog2E, 12583039 - n));
  ((f = fmaf(low, kLog2E, f)), ...);
  return {PowerOf2(f), __int_as_float(__float_as_int(n) << 23)};
}

// 1 / (1 + exp(x)): sigmoid(-x).
__device__ __forceinline__ float Logistic(float x) {
  const Exponential exp = Exp(x);
  return Reciprocal(fmaf(exp.power, exp.value, 1));
}

// The bounds of an activation that clamps (none, relu, relu6), for two 16-bit elements in a word.
// NaN stays NaN. Rounding is monotonic and the bounds are representable, so rounding and clamping
// commute.
template <typename T>
struct PairBounds {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  Pair lower, upper;

  __device__ __forceinline__ explicit PairBounds(Activation activation) {
    const float low = activation == Activation::kNone ? -INFINITY : 0.0f;
    const float high = activation == Activation::kRelu6 ? 6.0f : INFINITY;
    const uint32_t words[2] = {PackPair<T>(low, low), PackPair<T>(high, high)};
    memcpy(&lower, &words[0], sizeof(lower));
    memcpy(&upper, &words[1], sizeof(upper));
  }
  __device__ __forceinline__ uint32_t Clamp(uint32_t word) const {
    Pair pair;
    memcpy(&pair, &word, sizeof(pair));
    pair = __hmin2_nan(__hmax2_nan(pair, lower), upper);
    memcpy(&word, &pair, sizeof(word));
    return word;
  }
};

// A quick activation of kCount values: one uniform branch for all of them.
template <int kCount>
__device__ __forceinline__ void ActivateQuick(Activation activation, float negative_slope,
                                              float (&v)[kCount]) {
  switch (activation) {
    case Activation::kRelu6:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = MinNan(MaxNan(v[i], 0), 6);
      break;
    case Activation::kRelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = MaxNan(v[i], 0);
      break;
    case Activation::kLeakyRelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = v[i] < 0 ? v[i] * negative_slope : v[i];
      break;
    case Activation::kHardSwish:
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        v[i] *= MinNan(MaxNan(v[i] + 3, 0), 6) * (1 / 6.0f);
      }
      break;
    default:
      break;
  }
}

// R(a) and the exponential of Q(a) = Phi(-a) = exp(-a^2 / 2) R(a), for a = |c| <= 15. R(a) (a + 3)
// is a polynomial in (a - 3) / (a + 3), fitted to erfcx: relative error 4.9e-8. Q(15) is zero.
struct NormalTail {
  float ratio;
  Exponential exp;
};
__device__ __forceinline__ NormalTail NormalTailOf(float c) {
  const float a = fabsf(c);
  const float r = Reciprocal(a + 3), t = fmaf(-6, r, 1);
  float p = fmaf(-2.65245074e-4f, t, -9.01020559e-4f);
  p = fmaf(p, t, 1.07554041e-3f);
  p = fmaf(p, t, 6.92234816e-3f);
  p = fmaf(p, t, -1.04800122e-2f);
  p = fmaf(p, t, -4.72557757e-2f);
  p = fmaf(p, t, 2.30019371e-1f);
  p = fmaf(p, t, -5.09332302e-1f);
  p = fmaf(p, t, 7.29083669e-1f) * r;
  const float half = -0.5f * c, square = half * c;
  return {p, Exp(square, fmaf(half, c, -square))};
}

// Activations of results in float32, within 4 ulp (gelu 6). Exception: where gelu_tanh vanishes,
// the rounded exponent costs 16 ulp at -3 and 60 at -6. Results below 1e-36 may be zero.
struct FloatActivations {
  // sigmoid(v).
  static __device__ __forceinline__ float Sigmoid(float v) { return Logistic(-v); }

  // v / 2 * (1 + tanh(u)) = v * sigmoid(2 u), with 2 u = v (linear + cubic v^2).
  static __device__ __forceinline__ float GeluTanh(float v) {
    constexpr float kLinear = -1.5957691f, kCubic = -0.071354816f;
    const float p = fmaf(v * v, kCubic, kLinear), x = v * p;
    return v * Logistic(x);
  }

  // v Phi(v) = max(v, 0) - |v| Q(|v|).
  static __device__ __forceinline__ float Gelu(float v) {
    const NormalTail tail = NormalTailOf(MaxNan(MinNan(v, 15), -15));
    return fmaf(-fabsf(MinNan(v, 15)), tail.ratio * tail.exp.value * tail.exp.power, MaxNan(v, 0));
  }

  // 1 - 2 / (1 + exp(2 |v|)); near zero, where this cancels, v + v^3 P(v^2).
  static __device__ __forceinline__ float Tanh(float v) {
    const float a = fabsf(v), square = v * v;
    const float large = fmaf(-2, Logistic(2 * a), 1);
    float p = fmaf(-5.90604e-3f, square, 2.080552e-2f);
    p = fmaf(p, square, -5.378672e-2f);
    p = fmaf(p, square, 1.3331959e-1f);
    p = fmaf(p, square, -3.3333299e-1f) * square;
    return a < 0.6f ? fmaf(v, p, v) : copysignf(large, v);
  }
};

// Activations of results that are rounded to 16 bits: within 1.2e-5 of the result, a fortieth of
// half an ulp of float16, in 5 (sigmoid, silu) to 16 instructions (gelu), which is half as many as
// for float32. Results below 1e-36 may be zero.
struct ShortActivations {
  static constexpr float kLog2E = 1.44269502f, kPivot = 3.25f;

  static __device__ __forceinline__ float Sigmoid(float v) {
    return Reciprocal(1 + PowerOf2(v * -kLog2E));
  }

  static __device__ __forceinline__ float GeluTanh(float v) {
    constexpr float kLinear = -1.5957691f * kLog2E, kCubic = -0.071354816f * kLog2E;
    return v * Reciprocal(1 + PowerOf2(v * fmaf(v * v, kCubic, kLinear)));
  }

  // max(v, 0) - |v| Q(|v|), with |v| Q(|v|) = exp(-v^2 / 2) s P(s) and s = |v| / (|v| + kPivot).
  static __device__ __forceinline__ float Gelu(float v) {
    const float least = MinNan(v, 15), s = Share(least);
    return fmaf(-Density(least), s * TailRatio(s), MaxNan(v, 0));
  }

  // (1 - e) / (1 + e) with e = exp(-2 |v|); near zero, where this cancels, v - v^3 / 3.
  static __device__ __forceinline__ float Tanh(float v) {
    const float e = PowerOf2(fabsf(v) * (-2 * kLog2E));
    const float large = (1 - e) * Reciprocal(1 + e);
    return fabsf(v) < 0.03f ? fmaf(v * v * v, -1 / 3.0f, v) : copysignf(large, v);
  }

  // exp(-c^2 / 2).
  static __device__ __forceinline__ float Density(float c) {
    const float root = c * 0.849321800f;  // sqrt(log2(e) / 2)
    return PowerOf2(-root * root);
  }
  static __device__ __forceinline__ float Share(float c) {
    return fabsf(c) * Reciprocal(fabsf(c) + kPivot);
  }
  // (a + kPivot) exp(a^2 / 2) Q(a) as a polynomial in s = a / (a + kPivot), for a <= 13.5: relative
  // error 3.7e-6. Q(13.5) is 1e-41.
  static __device__ __forceinline__ float TailRatio(float s) {
    float p = fmaf(2.46300951e-1f, s, -6.09425187e-1f);
    p = fmaf(p, s, -4.32926267e-2f);
    p = fmaf(p, s, 1.76945746f);
    p = fmaf(p, s, -2.58823729f);
    return fmaf(p, s, 1.62499404f);
  }
};

// The activations of results of type T.
template <typename T>
using ActivationsOf = std::conditional_t<sizeof(T) == 2, ShortActivations, FloatActivations>;

// An activation that is not quick, of results that are stored as T.
template <typename T, int kCount>
__device__ __forceinline__ void ActivateSlow(Activation activation, float (&v)[kCount]) {
  using Functions = ActivationsOf<T>;
  const auto each = [&](auto function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = function(v[i]);
  };
  if (activation == Activation::kSilu) {
    each([](float t) { return t * Functions::Sigmoid(t); });
  } else if (activation == Activation::kSigmoid) {
    each([](float t) { return Functions::Sigmoid(t); });
  } else if (activation == Activation::kGeluTanh) {
    each([](float t) { return Functions::GeluTanh(t); });
  } else if (activation == Activation::kGelu) {
    each([](float t) { return Functions::Gelu(t); });
  } else {
    each([](float t) { return Functions::Tanh(t); });
  }
}

// silu or hard_swish (IsSwish), with one uniform branch.
template <typename T, int kCount>
__device__ __forceinline__ void ActivateSwish(Activation activation, float (&v)[kCount]) {
  if (activation == Activation::kSilu) {
    ActivateSlow<T>(Activation::kSilu, v);
  } else {
    ActivateQuick(Activation::kHardSwish, 0, v);
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void Activate(Activation activation, float negative_slope,
                                         float (&v)[kCount]) {
  if (IsQuick(activation)) {
    ActivateQuick(activation, negative_slope, v);
  } else {
    ActivateSlow<T>(activation, v);
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_ACTIVATION_CUH_
