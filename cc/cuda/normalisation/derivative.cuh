// Derivatives of activations. For float32 arrays the error is about 4 ulp of max(1, result), for
// 16-bit arrays 2e-5 of it. NaN stays NaN.
#ifndef JAXCONV_CUDA_NORMALISATION_DERIVATIVE_CUH_
#define JAXCONV_CUDA_NORMALISATION_DERIVATIVE_CUH_

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/common/activation.cuh"
#include "cuda/normalisation/derivative.h"

namespace jaxconv {

__device__ __forceinline__ float Clamped(float u, float low, float high) {
  return MaxNan(MinNan(u, high), low);
}

// The functions that the derivatives consist of, for float32 arrays.
struct FloatDerivatives : FloatActivations {
  // exp(x).
  static __device__ __forceinline__ float Exponential(float x) {
    const jaxconv::Exponential exp = Exp(x);
    return exp.value * exp.power;
  }

  // exp(-c^2 / 2), and with it Q(|c|).
  struct Tail {
    float density, q;
  };
  static __device__ __forceinline__ Tail TailOf(float c) {
    const NormalTail tail = NormalTailOf(c);
    const float density = tail.exp.value * tail.exp.power;
    return {density, tail.ratio * density};
  }
};

// The same for 16-bit arrays, by the functions of ShortActivations: within 2e-5 of max(1, result).
struct ShortDerivatives : ShortActivations {
  static __device__ __forceinline__ float Exponential(float x) { return PowerOf2(x * kLog2E); }

  using Tail = FloatDerivatives::Tail;
  static __device__ __forceinline__ Tail TailOf(float c) {
    const float density = Density(c), a = fabsf(c);
    const float r = Reciprocal(a + kPivot);
    return {density, density * (r * TailRatio(a * r))};
  }
};

template <typename T>
using DerivativesOf = std::conditional_t<sizeof(T) == 2, ShortDerivatives, FloatDerivatives>;

// e / (1 + e)^2 with e = exp(-|x|), which equals s (1 - s) with s = sigmoid(x), without
// cancellation.
template <class Functions>
__device__ __forceinline__ float LogisticDerivative(float x) {
  const float e = Functions::Exponential(-fabsf(x)), r = Reciprocal(1 + e);
  return e * r * r;
}

template <class Functions>
__device__ __forceinline__ float SiluDerivative(float u) {
  const float s = Functions::Sigmoid(u);
  return s * fmaf(u, 1 - s, 1);
}

// Phi(u) + u phi(u). Beyond 15 it is 0 or 1, and NaN at infinity, where phi vanishes.
template <class Functions>
__device__ __forceinline__ float GeluDerivative(float u) {
  const float c = Clamped(u, -15, 15);
  const auto tail = Functions::TailOf(c);
  return fmaf(u * 0.398942280f, tail.density, c < 0 ? tail.q : 1 - tail.q);
}

// s + u s (1 - s) v' with s = sigmoid(v), v = u (linear + cubic u^2). NaN beyond 1e13 and at
// infinity, where u^3 overflows in the definition too.
template <class Functions>
__device__ __forceinline__ float GeluTanhDerivative(float u) {
  constexpr float kLinear = 1.5957691f, kCubic = 0.071354816f;
  const float square = u * u;
  const float s = Functions::Sigmoid(u * fmaf(square, kCubic, kLinear));
  return s * fmaf(u * (1 - s), fmaf(square, 3 * kCubic, kLinear), 1);
}

// With e = exp(u) and n = e (e + 2): tanh(log(1 + e)) = n / (n + 2), with the derivative 4 e (1 +
// e) / (n + 2)^2. The result is 1 above 20 and 0 below -80, and NaN at infinity.
template <class Functions>
__device__ __forceinline__ float MishDerivative(float u) {
  const float c = Clamped(u, -80, 20);
  const float e = Functions::Exponential(c), n = e * (e + 2), r = Reciprocal(n + 2);
  return fmaf(r, fmaf(4 * c * r, e * (1 + e), n), 0 * u);
}

// Whether programs select by this derivative: where it is 0, so is a gradient of NaN or infinity.
__device__ __forceinline__ bool Selects(Derivative derivative) {
  return derivative == Derivative::kHardSigmoid || derivative >= Derivative::kRelu;
}

// 1 between the bounds, 1/2 at each, otherwise 0.
__device__ __forceinline__ float BetweenHalved(float v, float low, float high) {
  return v > low && v < high ? 1.0f : v == low || v == high ? 0.5f : 0.0f;
}

// Replaces each value u of an array of T by the derivative, with one uniform branch for all.
template <typename T, int kCount>
__device__ __forceinline__ void Differentiate(Derivative derivative, float slope,
                                              float (&u)[kCount]) {
  using Functions = DerivativesOf<T>;
  const auto each = [&](auto function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) u[i] = function(u[i]);
  };
  switch (derivative) {
    case Derivative::kNone:
      break;
    case Derivative::kLeakyRelu:
      each([&](float v) { return v >= 0 ? 1.0f : slope; });
      break;
    case Derivative::kElu:
      each([&](float v) { return v > 0 ? 1.0f : slope * Functions::Exponential(v); });
      break;
    case Derivative::kHardSigmoid:
      each([](float v) { return v > -3 && v < 3 ? 1 / 6.0f : 0.0f; });
      break;
    case Derivative::kHardSwish:
      each([](float v) { return v <= -3 ? 0.0f : v >= 3 ? 1.0f : fmaf(v, 1 / 3.0f, 0.5f); });
      break;
    case Derivative::kSigmoid:
      each([](float v) { return LogisticDerivative<Functions>(v); });
      break;
    case Derivative::kSilu:
      each([](float v) { return SiluDerivative<Functions>(v); });
      break;
    case Derivative::kTanh:
      each([](float v) { return 4 * LogisticDerivative<Functions>(2 * v); });
      break;
    case Derivative::kGelu:
      each([](float v) { return GeluDerivative<Functions>(v); });
      break;
    case Derivative::kGeluTanh:
      each([](float v) { return GeluTanhDerivative<Functions>(v); });
      break;
    case Derivative::kSoftplus:
      each([](float v) { return Functions::Sigmoid(v); });
      break;
    case Derivative::kMish:
      each([](float v) { return MishDerivative<Functions>(v); });
      break;
    case Derivative::kMaximum:
      each([](float v) { return v > 0 ? 1.0f : v == 0 ? 0.5f : 0.0f; });
      break;
    case Derivative::kClip6:
      each([](float v) { return BetweenHalved(v, 0, 6); });
      break;
    case Derivative::kLeakyMaximum:
      each([&](float v) {
        const float of_sign = v > 0 ? 1.0f : v < 0 ? slope : 0.0f;
        return v == slope * v ? fmaf(slope, 0.5f, 0.5f) : of_sign;
      });
      break;
    case Derivative::kClipHardSigmoid:
      each([](float v) { return BetweenHalved(v, -3, 3) * (1 / 6.0f); });
      break;
    case Derivative::kClipHardSwish:
      // The clipped factor, and v times its derivative.
      each([](float v) {
        const float factor = fmaf(Clamped(v, -3, 3), 1 / 6.0f, 0.5f);
        return fmaf(fabsf(v) <= 3 ? v * (1 / 6.0f) : 0, BetweenHalved(v, -3, 3), factor);
      });
      break;
    case Derivative::kRelu:
      each([](float v) { return v > 0 ? 1.0f : 0.0f; });
      break;
    case Derivative::kRelu6:
      each([](float v) { return v > 0 && v < 6 ? 1.0f : 0.0f; });
      break;
  }
}

// The same, and the activation of each value; silu shares the sigmoid, the slowest part of both.
template <typename T, int kCount>
__device__ __forceinline__ void ActivateAndDifferentiate(Activation activation,
                                                         Derivative derivative, float slope,
                                                         float (&u)[kCount],
                                                         float (&activated)[kCount]) {
  if (derivative == Derivative::kSilu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float s = DerivativesOf<T>::Sigmoid(u[i]);
      activated[i] = u[i] * s;
      u[i] = s * fmaf(u[i], 1 - s, 1);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) activated[i] = u[i];
  Activate<T>(activation, slope, activated);
  Differentiate<T>(derivative, slope, u);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_DERIVATIVE_CUH_
