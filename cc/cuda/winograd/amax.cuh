// The power of two that scales a tensor so that its transform fits in float16 (bfloat16 and float32
// operands), and its products too if M is float16.
//
// A pass over the tensor writes kMaxPartials partial maxima: for each CTA the float32 bits of its
// largest finite magnitude, which compare like integers. It needs no atomic and no final CTA. Each
// reading warp takes the maximum of the partial maxima (2 KB from L1 or L2, no barrier) and
// computes
//
//     scale = 2^e  such that  2^13 <= scale * largest < 2^14,  1 where all is zero.
//
// Two cases need no pass. If only the products of float16 operands are scaled, the transforms,
// which read the operands anyway, update the partial maxima (TakeMaximum) that a small kernel has
// cleared; a maximum does not depend on the order. bfloat16 activations and filters with float16
// products are scaled by constants; if the maxima show that the constants do not suit, they are
// transformed again with their own powers of two (repair_sm90.cuh).
//
// Infinities and NaN are ignored: the transform preserves them, and finite values keep their
// accuracy.
#ifndef JAXCONV_CUDA_WINOGRAD_AMAX_CUH_
#define JAXCONV_CUDA_WINOGRAD_AMAX_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/winograd/element_pair.cuh"
#include "cuda/winograd/params.h"

namespace jaxconv::winograd {

inline constexpr int kAmaxThreads = 256;

// The magnitude as float32 bits, 0 if it is not finite.
__device__ __forceinline__ uint32_t FiniteBits(uint32_t bits) {
  bits &= 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}

// A tensor of `chunks` chunks of 16 bytes.
struct AmaxTensor {
  const uint4* chunks = nullptr;
  int64_t count = 0;
  uint32_t* partials = nullptr;
};
// The input and the filter, selected by blockIdx.y.
struct AmaxParams {
  AmaxTensor tensor[2];
};

// A thread has four chunks in flight: 64 KB an SM with four CTAs. T: the element type.
template <typename T, bool kOverlaps>
__global__ void __launch_bounds__(kAmaxThreads)
    AmaxKernel(const __grid_constant__ AmaxParams params) {
  if constexpr (kOverlaps) {
    WaitForPrecedingGrids();
    LetNextGridStart();
  }
  constexpr int kAhead = 4;
  const AmaxTensor& of = params.tensor[blockIdx.y];
  const uint4* const tensor = of.chunks;
  const int64_t chunks = of.count;
  const int64_t step = int64_t{gridDim.x} * kAmaxThreads;
  uint32_t largest = 0;
  for (int64_t at = int64_t{blockIdx.x} * kAmaxThreads + threadIdx.x; at < chunks;
       at += kAhead * step) {
    uint4 chunk[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      chunk[i] = at + i * step < chunks ? __ldg(tensor + at + i * step) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      for (const uint32_t word : {chunk[i].x, chunk[i].y, chunk[i].z, chunk[i].w}) {
        if constexpr (std::is_same_v<T, float>) {
          largest = max(largest, FiniteBits(word));
        } else {
          largest = max(largest, FiniteBits(__float_as_uint(ElementOfPair<T, 0>(word))));
          largest = max(largest, FiniteBits(__float_as_uint(ElementOfPair<T, 1>(word))));
        }
      }
    }
  }
  __shared__ uint32_t of_warp[kAmaxThreads / 32];
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kAmaxThreads / 32; ++warp) largest = max(largest, of_warp[warp]);
    of.partials[blockIdx.x] = largest;
  }
}

// Clears the partial maxima of one operand or both, by one CTA.
struct ClearMaximaParams {
  uint32_t* maxima = nullptr;
  int32_t count = 0;
};
inline constexpr int kClearThreads = 2 * kMaxPartials;
static_assert(kClearThreads <= 1024);
template <int kThreads, bool kOverlaps>
__global__ void __launch_bounds__(kThreads)
    ClearMaximaKernel(const __grid_constant__ ClearMaximaParams params) {
  if constexpr (kOverlaps) {
    WaitForPrecedingGrids();
    LetNextGridStart();
  }
  if (static_cast<int32_t>(threadIdx.x) < params.count) params.maxima[threadIdx.x] = 0;
}

// Raises one of a tensor's partial maxima to the maximum over the lanes of `mask`, which are all
// callers. `magnitude`: of a finite number, as float32 bits.
__device__ __forceinline__ void TakeMaximum(uint32_t* maxima, unsigned mask, uint32_t magnitude) {
  const uint32_t largest = __reduce_max_sync(mask, magnitude);
  if (threadIdx.x % 32 == static_cast<unsigned>(__ffs(static_cast<int>(mask)) - 1)) {
    atomicMax(maxima + blockIdx.x % kMaxPartials, largest);
  }
}

// The tensor's power of two; called by all lanes of a warp.
__device__ __forceinline__ float WarpScale(const ScaleSource& source) {
  if (source.partials == nullptr) return source.value == nullptr ? 1.0f : __ldg(source.value);
  constexpr int kQuads = kMaxPartials / 32 / 4;
  static_assert(kQuads * 32 * 4 == kMaxPartials);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const uint4 quad =
        __ldg(reinterpret_cast<const uint4*>(source.partials) + i * 32 + threadIdx.x % 32);
    largest = max(max(max(largest, quad.x), quad.y), max(quad.z, quad.w));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (largest == 0) return 1.0f;
  // 127 + kScaledExponent - (exponent - 127); at most 2^126, whose inverse is normal.
  const uint32_t exponent = min(254u + kScaledExponent - (largest >> 23), 253u);
  return __uint_as_float(exponent << 23);
}

// The exact inverse of a power of two between 2^-126 and 2^126.
__device__ __forceinline__ float InversePower(float scale) {
  return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

// The factor that the transforms applied to a tensor whose power of two is `scale`.
__device__ __forceinline__ float AppliedScale(const ScaleSource& source, float scale) {
  if (source.assumed == 0) return scale;
  if (!source.repaired) return source.assumed;
  const bool holds = scale >= source.assumed && scale <= kMostAssumedRatio * source.assumed;
  return holds ? source.assumed : scale;
}
// The part of a tensor's power of two that the transforms left to M; called by all lanes of a warp.
__device__ __forceinline__ float RemainingScale(const ScaleSource& source) {
  const float scale = WarpScale(source);
  return scale * InversePower(AppliedScale(source, scale));
}

// Divides a result by the scales of both operands, the larger one first. Results are of the order
// of 2^26 sqrt(reduction); times 2^-126 they are still normal, but times the inverse of a scale of
// 2^-114 they may overflow before the second factor.
struct Unscale {
  float first, second;

  __device__ __forceinline__ Unscale(float input_scale, float filter_scale)
      : first(InversePower(fmaxf(input_scale, filter_scale))),
        second(InversePower(fminf(input_scale, filter_scale))) {}
  __device__ __forceinline__ float operator()(float result) const {
    return result * first * second;
  }
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_AMAX_CUH_
