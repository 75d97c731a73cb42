// float32 products on tensor cores: three TF32 products for each ("3xTF32").
//
//     x = big + small     big: x rounded to TF32's 11 bits; small: the rest, of which the tensor core
//                         reads the upper 11 bits
//     a b = big_a big_b + big_a small_b + small_a big_b + dropped terms, at most 2^-22 |a b|
//
// big + small hold at least 23 of x's 24 bits, so a product's error (rms 7e-8 of it) is about that
// of rounding it to float32. After: Ootomo and Yokota, "Recovering single precision accuracy from
// Tensor Cores while surpassing the FP32 theoretical peak performance", 2022; CUTLASS calls it
// 3xTF32.
//
// Sums: the tensor core truncates its accumulators towards zero, and over a long reduction these
// errors add up. So a short run of the reduction, kSplitRunSteps steps of 8 indices
// (block_diagonal: up to three), is summed in separate accumulators, which FADD adds to the float32
// sums with rounding to nearest (PromoteFinite).
//
// Inf and NaN: the small part of Inf and NaN is NaN. A value within 2^-12 of the largest float has
// the big part Inf and the small part -Inf. Zero times either is NaN, so a run with such an operand
// has a sum that is not finite. That run is computed again (PromoteWithCare) with operands split by
// SplitTf32WithCare: first the products with small parts, whose sum is made finite, then the
// products of the big parts, which give the right Inf or NaN. igemm_wgmma tests the operands
// instead of the sums, and splits those that need it by SplitTf32Finite.
//
// Operands below 2^-112 in magnitude have subnormal small parts, with fewer bits; the error is then
// up to 2^-137 times the other factor.
#ifndef JAXCONV_CUDA_COMMON_SPLIT_TF32_CUH_
#define JAXCONV_CUDA_COMMON_SPLIT_TF32_CUH_

#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "cuda/common/mma_tile.cuh"
#include "cuda/ptx/mma.cuh"

namespace jaxconv {

inline constexpr int kSplitRunSteps = 2;

inline constexpr uint32_t kTf32Mask = 0xffffe000;

// Splits a finite x whose magnitude is below (1 - 2^-12) of the largest float. For any other x,
// `small` is NaN or Inf and `big` is arbitrary.
__device__ __forceinline__ void SplitTf32(uint32_t x, uint32_t* big, uint32_t* small) {
  *big = (x + 0x1000) & kTf32Mask;
  *small = __float_as_uint(__uint_as_float(x) - __uint_as_float(*big));
}

// acc += run if `add`. Predicated, because a branch would separate the MMAs that run at the same
// time.
__device__ __forceinline__ void AddIf(bool add, const float (&run)[4], float (&acc)[4]) {
  asm("{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %8, 0;\n"
      "@p add.f32 %0, %0, %4;\n"
      "@p add.f32 %1, %1, %5;\n"
      "@p add.f32 %2, %2, %6;\n"
      "@p add.f32 %3, %3, %7;\n"
      "}"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "f"(run[0]), "f"(run[1]), "f"(run[2]), "f"(run[3]), "r"(uint32_t{add}));
}

// Splits any x. `big` is NaN, Inf or finite as x is; `small` is NaN if `big` is not finite.
__device__ __forceinline__ void SplitTf32WithCare(uint32_t x, uint32_t* big, uint32_t* small) {
  const uint32_t magnitude = x & 0x7fffffff;
  *big = magnitude > 0x7f800000    ? x | 0x400000  // a NaN whose upper bits may be zeros
         : magnitude >= 0x7f7ff000 ? x & kTf32Mask
                                   : (x + 0x1000) & kTf32Mask;
  *small = __float_as_uint(__uint_as_float(x) - __uint_as_float(*big));
}

// Splits any x for callers that do not test sums. `big` is always finite: if x is not finite, `big`
// is 1 with the sign of x, and `small` is x. The three products with b then sum to x b + small_b +
// b; an infinite `big` times a zero `small_b` would make the sum NaN.
__device__ __forceinline__ void SplitTf32Finite(uint32_t x, uint32_t* big, uint32_t* small) {
  const uint32_t magnitude = x & 0x7fffffff;
  if (magnitude >= 0x7f800000) {
    *big = (x & 0x80000000) | 0x3f800000;
    *small = magnitude > 0x7f800000 ? x | 0x400000 : x;  // a NaN whose upper bits may be zeros
    return;
  }
  const uint32_t half = magnitude >= 0x7f7ff000 ? 0 : 0x1000;  // must not round up to Inf
  *big = (x + half) & kTf32Mask;
  *small = __float_as_uint(__uint_as_float(x) - __uint_as_float(*big));
  if (half == 0) *small = (*small + 0x1000) & kTf32Mask;  // here 13 bits remain, otherwise 12
}

// The parts of a warp's fragments for one run of kSteps steps: kBlocks blocks of kWords words each.
template <int kSteps, int kBlocks, int kWords>
struct SplitWords {
  uint32_t big[kSteps][kBlocks][kWords], small[kSteps][kBlocks][kWords];

  SplitWords() = default;
  // The steps of two runs, one behind the other.
  __device__ __forceinline__ SplitWords(const SplitWords<kSteps / 2, kBlocks, kWords>& first,
                                        const SplitWords<kSteps / 2, kBlocks, kWords>& second) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto& from = step < kSteps / 2 ? first : second;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          big[step][block][word] = from.big[step % (kSteps / 2)][block][word];
          small[step][block][word] = from.small[step % (kSteps / 2)][block][word];
        }
      }
    }
  }

  template <bool kCare>
  __device__ __forceinline__ void Split(int step, int block, const uint32_t (&words)[kWords]) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32_t* const of_big = &big[step][block][word];
      uint32_t* const of_small = &small[step][block][word];
      if constexpr (kCare) {
        SplitTf32WithCare(words[word], of_big, of_small);
      } else {
        SplitTf32(words[word], of_big, of_small);
      }
    }
  }
};

// Returns whether a sum of a run is not finite; acc += run if all are finite.
template <int kBlocksN>
__device__ __forceinline__ bool PromoteFinite(const float (&run)[kBlocksN][4],
                                              float (&acc)[kBlocksN][4]) {
  float zero[4] = {};  // or NaN
#pragma unroll
  for (int j = 0; j < kBlocksN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) zero[e] = fmaf(run[j][e], 0.f, zero[e]);
  }
  const bool finite = (zero[0] + zero[1]) + (zero[2] + zero[3]) == 0;
#pragma unroll
  for (int j = 0; j < kBlocksN; ++j) AddIf(finite, run[j], acc[j]);
  return !finite;
}

// acc += A B for one run of split words and 16 rows, if all sums are finite; returns whether some
// are not.
template <int kSteps, int kBlocksN>
__device__ __forceinline__ bool MultiplySplit(const SplitWords<kSteps, 1, 4>& of_a,
                                              const SplitWords<kSteps, kBlocksN, 2>& of_b,
                                              float (&acc)[kBlocksN][4]) {
  // Small products first. Each pass runs over the columns, so that instructions on the same
  // accumulator are far apart.
  float sums[kBlocksN][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
      const uint32_t (&big_b)[2] = of_b.big[step][j];
      if (step == 0) {
        Multiply<float>(sums[j], of_a.small[step][0], big_b[0], big_b[1]);
      } else {
        MultiplyAdd<float>(sums[j], of_a.small[step][0], big_b[0], big_b[1]);
      }
    }
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
      const uint32_t (&small_b)[2] = of_b.small[step][j];
      MultiplyAdd<float>(sums[j], of_a.big[step][0], small_b[0], small_b[1]);
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
      const uint32_t (&big_b)[2] = of_b.big[step][j];
      MultiplyAdd<float>(sums[j], of_a.big[step][0], big_b[0], big_b[1]);
    }
  }
  return PromoteFinite(sums, acc);
}

// acc += A B over one run, with a warp's fragments in mma.cuh's order. Blocks of 16 rows follow
// each other: the sums of one are promoted while the next is multiplied.
//     b               the words of B, for 8 columns two
//     a               the words of the first block of A
//     read_a(i, a)    reads the words of block i
//     beside(i)       called during the products of block i; it may overwrite b, and a during
//                     those of the last
// Returns one bit for each block that this thread leaves to PromoteWithCare.
template <int kSteps, int kBlocksM, int kBlocksN, typename ReadA, typename Beside>
__device__ __forceinline__ uint32_t MultiplySplitRun(const uint32_t (&b)[kSteps][kBlocksN][2],
                                                     uint32_t (&a)[kSteps][4],
                                                     float (&acc)[kBlocksM][kBlocksN][4],
                                                     ReadA read_a, Beside beside) {
  SplitWords<kSteps, kBlocksN, 2> of_b;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) of_b.template Split<false>(step, j, b[step][j]);
  }
  uint32_t left = 0;
  Unroll<kBlocksM>([&](auto block) {
    constexpr int i = decltype(block)::value;
    SplitWords<kSteps, 1, 4> of_a;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) of_a.template Split<false>(step, 0, a[step]);
    if constexpr (i + 1 < kBlocksM) read_a(i + 1, a);
    beside(block);
    left |= uint32_t{MultiplySplit(of_a, of_b, acc[i])} << i;
  });
  return left;
}

// acc += the products of one run for the blocks in `left`, with operands of any value. read(step,
// a, b) reads all words of a step. All threads of the warp call it.
template <int kSteps = kSplitRunSteps, int kBlocksM, int kBlocksN, typename Read>
__device__ __forceinline__ void PromoteWithCare(uint32_t left, float (&acc)[kBlocksM][kBlocksN][4],
                                                Read read) {
  float run[kBlocksM][kBlocksN][4] = {};
#pragma unroll 1
  for (int pass = 0; pass < 2 * kSteps; ++pass) {
    const bool small = pass < kSteps;
    uint32_t a[kBlocksM][4], b[kBlocksN][2];
    read(pass % kSteps, a, b);
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
      uint32_t big_a[4], small_a[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) SplitTf32WithCare(a[i][e], &big_a[e], &small_a[e]);
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        uint32_t big_b[2], small_b[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) SplitTf32WithCare(b[j][e], &big_b[e], &small_b[e]);
        if (small) {
          MultiplyAdd<float>(run[i][j], small_a, big_b[0], big_b[1]);
          MultiplyAdd<float>(run[i][j], big_a, small_b[0], small_b[1]);
        } else {
          MultiplyAdd<float>(run[i][j], big_a, big_b[0], big_b[1]);
        }
      }
    }
    if (pass == kSteps - 1) {
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
          // Also true for NaN.
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            run[i][j][e] = fmaxf(fminf(run[i][j][e], FLT_MAX), -FLT_MAX);
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) {
    if ((left >> i & 1) == 0) continue;
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][j][e] += run[i][j][e];
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_SPLIT_TF32_CUH_
