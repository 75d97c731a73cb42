// Activations of float sums.
//
// Quick activations take one to six instructions and are inlined in every store. The others take 10
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

// v / 2 * (1 + tanh(u)) = v * sigmoid(2 u); the sigmoid's exponent is -2 u = -v (linear + cubic
// v^2).
__device__ __forceinline__ float GeluTanh(float v) {
  constexpr float kLinear = -1.5957691f, kCubic = -0.071354816f;
  const float p = fmaf(v * v, kCubic, kLinear), x = v * p;
  return v * Logistic(x);
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

// v Phi(v) = max(v, 0) - |v| Q(|v|).
__device__ __forceinline__ float Gelu(float v) {
  const NormalTail tail = NormalTailOf(MaxNan(MinNan(v, 15), -15));
  return fmaf(-fabsf(MinNan(v, 15)), tail.ratio * tail.exp.value * tail.exp.power, MaxNan(v, 0));
}

// 1 - 2 / (1 + exp(2 |v|)); near zero, where this cancels, v + v^3 P(v^2).
__device__ __forceinline__ float Tanh(float v) {
  const float a = fabsf(v), square = v * v;
  const float large = fmaf(-2, Logistic(2 * a), 1);
  float p = fmaf(-5.90604e-3f, square, 2.080552e-2f);
  p = fmaf(p, square, -5.378672e-2f);
  p = fmaf(p, square, 1.3331959e-1f);
  p = fmaf(p, square, -3.3333299e-1f) * square;
  return a < 0.6f ? fmaf(v, p, v) : copysignf(large, v);
}

// An activation that is not quick, within 4 ulp of float32 (gelu 6). Exception: where gelu_tanh
// vanishes, the rounded exponent costs 16 ulp at -3 and 60 at -6. Results below 1e-36 may be zero.
template <int kCount>
__device__ __forceinline__ void ActivateSlow(Activation activation, float (&v)[kCount]) {
  if (activation == Activation::kSilu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] *= Logistic(-v[i]);
  } else if (activation == Activation::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = Logistic(-v[i]);
  } else if (activation == Activation::kGeluTanh) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = GeluTanh(v[i]);
  } else if (activation == Activation::kGelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = Gelu(v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = Tanh(v[i]);
  }
}

template <int kCount>
__device__ __forceinline__ void Activate(Activation activation, float negative_slope,
                                         float (&v)[kCount]) {
  if (IsQuick(activation)) {
    ActivateQuick(activation, negative_slope, v);
  } else {
    ActivateSlow(activation, v);
  }
}

// The same for one value, by CUDA's math functions: with the functions above, few_channels spills.
__device__ __forceinline__ float ActivateByLibrary(Activation activation, float negative_slope,
                                                   float v) {
  if (IsQuick(activation)) {
    float value[1] = {v};
    ActivateQuick(activation, negative_slope, value);
    return value[0];
  }
  if (activation == Activation::kGelu) return 0.5f * v * erfcf(v * -0.70710678f);
  if (activation == Activation::kTanh) return tanhf(v);
  const bool gelu = activation == Activation::kGeluTanh;
  const float u = gelu ? v * fmaf(0.071354816f * v, v, 1.5957691f) : v;
  const float e = expf(-fabsf(u));
  const float s = __fdividef(u < 0 ? e : 1, 1 + e);
  return activation == Activation::kSigmoid ? s : v * s;
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_ACTIVATION_CUH_
