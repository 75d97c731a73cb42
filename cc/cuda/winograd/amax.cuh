// The power of two by which a tensor is multiplied, so that float16 holds its transform (of
// bfloat16 and float32), or its products too (where M is float16).
//
// A pass over the tensor leaves kMaxPartials partial maxima: of each CTA the float32 bits of its
// largest finite magnitude, which order as integers do. There is no atomic and no last CTA. A
// reader's warp takes the largest partial maximum by itself, 2 KB from L1 or L2 and no barrier, and
// makes
//
//     scale = 2^e  such that  2^13 <= scale * largest < 2^14,  1 where all is zero.
//
// Operands of float16 whose products alone are scaled need no pass: the transforms, which read them
// anyway, raise the partial maxima (TakeMaximum) that a small kernel has cleared. The largest of a
// set does not depend on the order. Nor do the activations and filters of bfloat16 whose products
// are float16: they are multiplied by constants, and once more, by their own powers of two, where
// the maxima say that the constants do not suit (repair_sm90.cuh).
//
// Infinities and NaN are left out: they stay what they are in the transform, and the finite values
// beside them keep their accuracy.
#ifndef JAXCONV_CUDA_WINOGRAD_AMAX_CUH_
#define JAXCONV_CUDA_WINOGRAD_AMAX_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/winograd/element_pair.cuh"
#include "cuda/winograd/params.h"

namespace jaxconv::winograd {

inline constexpr int kAmaxThreads = 256;

// Magnitude as float32 bits, 0 where it is not finite.
__device__ __forceinline__ uint32_t FiniteBits(uint32_t bits) {
  bits &= 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}

// A tensor of so many chunks of 16 bytes.
struct AmaxTensor {
  const uint4* chunks = nullptr;
  int64_t count = 0;
  uint32_t* partials = nullptr;
};
// The input and the filter: the grid's y.
struct AmaxParams {
  AmaxTensor tensor[2];
};

// Four chunks a thread are under way at a time: with four CTAs an SM, 64 KB. T: of the elements.
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

// Clears the partial maxima of one operand or both: one CTA.
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

// Raises one of a tensor's partial maxima to the largest of the lanes of `mask`, all that call it.
// `magnitude`: of a finite number, as float32 bits.
__device__ __forceinline__ void TakeMaximum(uint32_t* maxima, unsigned mask, uint32_t magnitude) {
  const uint32_t largest = __reduce_max_sync(mask, magnitude);
  if (threadIdx.x % 32 == static_cast<unsigned>(__ffs(static_cast<int>(mask)) - 1)) {
    atomicMax(maxima + blockIdx.x % kMaxPartials, largest);
  }
}

// Of all lanes of a warp: the tensor's power of two.
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
  // 127 + kScaledExponent - (exponent - 127), at most 2^126, whose inverse is a normal number too.
  const uint32_t exponent = min(254u + kScaledExponent - (largest >> 23), 253u);
  return __uint_as_float(exponent << 23);
}

// Of a power of two between 2^-126 and 2^126, exactly.
__device__ __forceinline__ float InversePower(float scale) {
  return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

// What the transforms multiplied a tensor by whose power of two is `scale`.
__device__ __forceinline__ float AppliedScale(const ScaleSource& source, float scale) {
  if (source.assumed == 0) return scale;
  if (!source.repaired) return source.assumed;
  const bool holds = scale >= source.assumed && scale <= kMostAssumedRatio * source.assumed;
  return holds ? source.assumed : scale;
}
// Of all lanes of a warp: the part of a tensor's power of two that the transforms left to M.
__device__ __forceinline__ float RemainingScale(const ScaleSource& source) {
  const float scale = WarpScale(source);
  return scale * InversePower(AppliedScale(source, scale));
}

// Divides a result by the scales of both operands. By the larger one first: results are of the
// order of 2^26 times a root of the reduction, whose product with 2^-126 is a normal number, but
// with the inverse of a scale of 2^-114 may be none, whatever follows.
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
