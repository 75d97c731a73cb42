// Activations of float sums.
//
// Quick ones are one to six instructions and stand beside every store. The others are 15 to 50, which
// would fill the instruction cache if each of a thread's 64 to 160 sums had a copy of them: stores
// apply them in a loop that is not unrolled. No function here is called; a call beside wgmma makes
// ptxas serialise it.
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
#include "cuda/ptx/min_max.cuh"

namespace jaxconv {

__device__ __forceinline__ bool IsQuick(Activation activation) {
  return activation <= Activation::kLeakyRelu || activation == Activation::kHardSwish;
}

// The exponent is never positive, so nothing overflows, and the sum lies between 1 and 2.
__device__ __forceinline__ float Sigmoid(float v) {
  const float e = expf(-fabsf(v));
  return __fdividef(v < 0 ? e : 1, 1 + e);
}

// The bounds of an activation that clamps (none, relu, relu6), for two 16-bit elements in a word.
// NaN stays. Rounding keeps the order, and the bounds are numbers of the type: to round and then
// clamp gives what to clamp and then round gives.
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

// One of the others.
template <int kCount>
__device__ __forceinline__ void ActivateSlow(Activation activation, float (&v)[kCount]) {
  if (activation == Activation::kGelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      v[i] = 0.5f * v[i] * erfcf(v[i] * -0.70710678f);  // 1 + erf would cancel below 0
    }
  } else if (activation == Activation::kTanh) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = tanhf(v[i]);
  } else {
    // (1 + tanh(u)) / 2 = sigmoid(2 u)
    const bool gelu = activation == Activation::kGeluTanh;
    const bool alone = activation == Activation::kSigmoid;
    const float cubic = gelu ? 0.071354816f : 0, linear = gelu ? 1.5957691f : 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float u = gelu ? v[i] * fmaf(cubic * v[i], v[i], linear) : v[i];
      const float s = Sigmoid(u);
      v[i] = alone ? s : v[i] * s;
    }
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

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_ACTIVATION_CUH_
