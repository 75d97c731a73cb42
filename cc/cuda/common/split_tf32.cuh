// Products of float32 on tensor cores: three TF32 products for one ("3xTF32").
//
//     x = big + small     big: x rounded to TF32's 11 bits; small: the rest, of which the tensor core
//                         reads the upper 11 bits
//     a b = big_a big_b + big_a small_b + small_a big_b + what is dropped, 2^-22 of it at most
//
// big + small hold at least 23 of x's 24 bits, so a product's error (rms 7e-8 of it) is about that of
// rounding it to float32. After: Ootomo and Yokota, "Recovering single precision accuracy from Tensor
// Cores while surpassing the FP32 theoretical peak performance", 2022; CUTLASS calls it 3xTF32.
//
// Sums: the tensor core cuts off what its accumulators cannot hold, always towards zero, and over a
// long reduction that adds up. So a short run of the reduction, kSplitRunSteps steps of 8 indices, is
// summed in accumulators of its own, which are then added to the float32 sums by FADD, rounded to
// nearest (Promote).
//
// Not finite: the small part of Inf and of NaN is NaN, and of a value within 2^-12 of the largest
// float, whose big part is Inf, it is -Inf; zero times either is NaN. So a run with such an operand has
// a sum that is not finite, and is computed again (PromoteWithCare) with operands split by
// SplitTf32WithCare: first the sum of the products with small parts, which is made finite, then those of
// big parts, which have the right Inf or NaN. Where the sums are wgmma's (igemm_wgmma's fprop and
// dgrad), operands are looked at instead, and SplitTf32Finite splits those that need it.
//
// Operands below 2^-112 in magnitude have small parts that are subnormal, with fewer bits: there the
// error is up to 2^-137 times the other factor.
#ifndef JAXCONV_CUDA_COMMON_SPLIT_TF32_CUH_
#define JAXCONV_CUDA_COMMON_SPLIT_TF32_CUH_

#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "cuda/ptx/mma.cuh"

namespace jaxconv {

inline constexpr int kSplitRunSteps = 2;

inline constexpr uint32_t kTf32Mask = 0xffffe000;

// Of a finite x below the largest float by more than 2^-12 of it. Else `small` is NaN or Inf, and `big`
// may be anything.
__device__ __forceinline__ void SplitTf32(uint32_t x, uint32_t* big, uint32_t* small) {
  *big = (x + 0x1000) & kTf32Mask;
  *small = __float_as_uint(__uint_as_float(x) - __uint_as_float(*big));
}

// Of any x. `big` is NaN or Inf where x is, and finite where x is; `small` is NaN where `big` is not
// finite.
__device__ __forceinline__ void SplitTf32WithCare(uint32_t x, uint32_t* big, uint32_t* small) {
  const uint32_t magnitude = x & 0x7fffffff;
  *big = magnitude > 0x7f800000    ? x | 0x400000  // a NaN whose upper bits may be zeros
         : magnitude >= 0x7f7ff000 ? x & kTf32Mask
                                   : (x + 0x1000) & kTf32Mask;
  *small = __float_as_uint(__uint_as_float(x) - __uint_as_float(*big));
}

// Of any x, where sums are not looked at: `big` is finite, and where x is not, 1 with its sign, and
// `small` is x. The sum of the three products with b is then x b + small_b + b, where the product of an
// infinite `big` and a `small_b` of zero would make it NaN.
__device__ __forceinline__ void SplitTf32Finite(uint32_t x, uint32_t* big, uint32_t* small) {
  const uint32_t magnitude = x & 0x7fffffff;
  if (magnitude >= 0x7f800000) {
    *big = (x & 0x80000000) | 0x3f800000;
    *small = magnitude > 0x7f800000 ? x | 0x400000 : x;  // a NaN whose upper bits may be zeros
    return;
  }
  const uint32_t half = magnitude >= 0x7f7ff000 ? 0 : 0x1000;  // not up to Inf
  *big = (x + half) & kTf32Mask;
  *small = __float_as_uint(__uint_as_float(x) - __uint_as_float(*big));
  if (half == 0) *small = (*small + 0x1000) & kTf32Mask;  // of 13 bits, where it has 12 otherwise
}

// Which products of an mma step, in the order in which they are added.
enum class SplitProducts { kAll, kSmall, kBig };

// sums += A B of one mma step, of a warp's fragments: A as FragmentReader reads it, of B two words for
// 8 columns, in order. kFirst: sums = A B. kCare: SplitTf32WithCare.
template <SplitProducts kProducts, bool kFirst, bool kCare, int kBlocksM, int kBlocksN, int kRowsB,
          int kWordsB>
__device__ __forceinline__ void MultiplySplit(const uint32_t (&a)[kBlocksM][4],
                                              const uint32_t (&b)[kRowsB][kWordsB],
                                              float (&sums)[kBlocksM][kBlocksN][4]) {
  static_assert(kRowsB * kWordsB == kBlocksN * 2);
  static_assert(!kFirst || kProducts == SplitProducts::kAll);
  auto split = [](uint32_t x, uint32_t* big, uint32_t* small) {
    kCare ? SplitTf32WithCare(x, big, small) : SplitTf32(x, big, small);
  };
  uint32_t big_b[kBlocksN][2], small_b[kBlocksN][2];
#pragma unroll
  for (int word = 0; word < kBlocksN * 2; ++word) {
    split(b[word / kWordsB][word % kWordsB], &big_b[word / 2][word % 2],
          &small_b[word / 2][word % 2]);
  }
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) {
    uint32_t big_a[4], small_a[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) split(a[i][e], &big_a[e], &small_a[e]);
    // Passes over the columns, so that instructions with one accumulator lie apart.
    if constexpr (kProducts != SplitProducts::kBig) {
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        if constexpr (kFirst) {
          Multiply<float>(sums[i][j], small_a, big_b[j][0], big_b[j][1]);
        } else {
          MultiplyAdd<float>(sums[i][j], small_a, big_b[j][0], big_b[j][1]);
        }
      }
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        MultiplyAdd<float>(sums[i][j], big_a, small_b[j][0], small_b[j][1]);
      }
    }
    if constexpr (kProducts != SplitProducts::kSmall) {
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        MultiplyAdd<float>(sums[i][j], big_a, big_b[j][0], big_b[j][1]);
      }
    }
  }
}

template <SplitProducts kProducts>
using SplitConstant = std::integral_constant<SplitProducts, kProducts>;

template <int kBlocksM, int kBlocksN, typename Body>
__device__ __forceinline__ void Each(float (&sums)[kBlocksM][kBlocksN][4], Body body) {
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) body(sums[i][j][e]);
    }
  }
}

// Whether any of the warp's sums of a run is not finite.
template <int kBlocksM, int kBlocksN>
__device__ __forceinline__ bool AnyNotFinite(float (&run)[kBlocksM][kBlocksN][4]) {
  float zero[4] = {};  // or NaN
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) zero[e] = fmaf(run[i][j][e], 0.f, zero[e]);
    }
  }
  return __any_sync(0xffffffff, (zero[0] + zero[1]) + (zero[2] + zero[3]) != 0);
}

// acc += run.
template <int kBlocksM, int kBlocksN>
__device__ __forceinline__ void Promote(const float (&run)[kBlocksM][kBlocksN][4],
                                        float (&acc)[kBlocksM][kBlocksN][4]) {
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][j][e] += run[i][j][e];
    }
  }
}

// The same of a run with operands that are not finite, or too large for SplitTf32. add(products) adds
// its products of a kind, split with care, to `run`.
template <int kBlocksM, int kBlocksN, typename Add>
__device__ __forceinline__ void PromoteWithCare(float (&run)[kBlocksM][kBlocksN][4],
                                                float (&acc)[kBlocksM][kBlocksN][4], Add add) {
  Each(run, [](float& sum) { sum = 0; });
  add(SplitConstant<SplitProducts::kSmall>());
  // Of NaN, too.
  Each(run, [](float& sum) { sum = fmaxf(fminf(sum, FLT_MAX), -FLT_MAX); });
  add(SplitConstant<SplitProducts::kBig>());
  Promote(run, acc);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_SPLIT_TF32_CUH_
