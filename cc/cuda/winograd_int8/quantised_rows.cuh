// Quantises rows of channels in the Winograd domain to 8 bits, with a scale for each row and point.
// Shared by the transforms of the input (a row is a tile) and of the filter (a row is an output
// channel).
//
// A thread has four neighbouring channels of a row. It computes all their points exactly in float32
// and holds them in float16. The scale is max(unit, max / 127), where max is the largest magnitude
// of a row at a point; if the scale is the unit, nothing is rounded. Eight lanes, which have 32
// channels, find their maximum by shuffles, each of which halves the points that a lane holds;
// atomics in shared memory do the rest.
//
// Rows longer than a CTA are transformed twice: first for the maximum, then for the bytes.
#ifndef JAXCONV_CUDA_WINOGRAD_INT8_QUANTISED_ROWS_CUH_
#define JAXCONV_CUDA_WINOGRAD_INT8_QUANTISED_ROWS_CUH_

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "cuda/ptx/shared_memory.cuh"
#include "cuda/winograd_int8/params.h"

namespace jaxconv::winograd_int8 {

template <int kPoints>
struct RowScales {
  uint32_t largest[kMaxRows][kPoints];  // float32 bits, which order like the numbers
  float factor[kMaxRows][kPoints];      // 1 / scale
};

// The maxima over two lanes that differ in `kBit`; each keeps half of the pairs.
template <int kBit, int kCount, int kAll>
__device__ __forceinline__ void HalveMaxima(__half2 (&pairs)[kAll]) {
  static_assert(kCount % 2 == 0);
  const bool upper = threadIdx.x & kBit;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    uint32_t bits[2];
    memcpy(&bits[0], &pairs[i], sizeof(bits[0]));
    memcpy(&bits[1], &pairs[i + kCount / 2], sizeof(bits[1]));
    const uint32_t kept = upper ? bits[1] : bits[0];
    const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? bits[0] : bits[1], kBit);
    __half2 own, other;
    memcpy(&own, &kept, sizeof(own));
    memcpy(&other, &got, sizeof(other));
    pairs[i] = __hmax2(own, other);
  }
}

// Packs the low byte of each word into one word.
__device__ __forceinline__ uint32_t PackLowBytes(const uint32_t (&word)[4]) {
  return __byte_perm(__byte_perm(word[0], word[1], 0x0040), __byte_perm(word[2], word[3], 0x0040),
                     0x5410);
}

// A thread's position in a pass. Recomputed at each use, because the transform needs the registers.
struct RowPlace {
  int32_t slot, row, word;
  bool inside;
  __device__ __forceinline__ RowPlace(const Rows& rows, int32_t pass) {
    int32_t lane;
    rows.lanes.Divmod(ComputedHere(threadIdx.x), &slot, &lane);
    row = blockIdx.x * rows.rows_of_cta + slot;
    word = pass * static_cast<int32_t>(rows.lanes.divisor) + lane;
    inside = slot < rows.rows_of_cta && row < rows.rows && word < rows.words;
  }
};

// load(row, word, words) reads a thread's words of a row. transform(words, c, values) computes the
// points of channels c and c + 1 of four. store_scale(row, point, scale). The bytes go to `out`,
// [point][row] [channel].
template <int kPoints, int kWords, typename Load, typename Transform, typename StoreScale>
__device__ __forceinline__ void QuantiseRows(const Rows& rows, RowScales<kPoints>* scales,
                                             Load load, Transform transform, StoreScale store_scale,
                                             int8_t* out) {
  static_assert(kPoints % 2 == 0);
  constexpr int kPairs = kPoints / 2, kPadded = (kPairs + 7) / 8 * 8;
  const int32_t first_row = blockIdx.x * rows.rows_of_cta;
  for (int i = threadIdx.x; i < rows.rows_of_cta * kPoints; i += blockDim.x) {
    scales->largest[i / kPoints][i % kPoints] = 0;
  }
  __syncthreads();

  __half2 value[kWordChannels][kPairs];  // two points each
  auto compute = [&](const RowPlace& place) {
    uint32_t words[kWords];
    load(place.row, place.word, words);
#pragma unroll
    for (int c = 0; c < kWordChannels; c += 2) {
      if (c > 0) {  // Otherwise the compiler unpacks both pairs' bytes before the first transform.
#pragma unroll
        for (uint32_t& word_of : words) word_of = ComputedHere(static_cast<int>(word_of));
      }
      float points[2][kPoints];
      transform(words, c, points);
#pragma unroll
      for (int p = 0; p < kPoints; p += 2) {
        value[c][p / 2] = __floats2half2_rn(points[0][p], points[0][p + 1]);
        value[c + 1][p / 2] = __floats2half2_rn(points[1][p], points[1][p + 1]);
      }
    }
  };
#pragma unroll 1
  for (int32_t pass = 0; pass < rows.passes; ++pass) {
    __half2 largest[kPadded];
#pragma unroll
    for (int p = 0; p < kPadded; ++p) largest[p] = __float2half2_rn(0.0f);
    if (const RowPlace place(rows, pass); place.inside) {
      compute(place);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        largest[p] = __hmax2(__hmax2(__habs2(value[0][p]), __habs2(value[1][p])),
                             __hmax2(__habs2(value[2][p]), __habs2(value[3][p])));
      }
    }
    HalveMaxima<4, kPadded>(largest);
    HalveMaxima<2, kPadded / 2>(largest);
    HalveMaxima<1, kPadded / 4>(largest);
    const int32_t eighth = threadIdx.x % 8;
    const int32_t first = (eighth & 4 ? kPadded / 2 : 0) + (eighth & 2 ? kPadded / 4 : 0) +
                          (eighth & 1 ? kPadded / 8 : 0);
    if (const RowPlace place(rows, pass); place.inside) {
#pragma unroll
      for (int i = 0; i < kPadded / 8; ++i) {
        if (first + i >= kPairs) continue;
        const float2 both = __half22float2(largest[i]);
        uint32_t* const to = &scales->largest[place.slot][2 * (first + i)];
        atomicMax(to, __float_as_uint(both.x));
        atomicMax(to + 1, __float_as_uint(both.y));
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows.rows_of_cta * kPoints; i += blockDim.x) {
    const int32_t of_row = i / kPoints, point = i % kPoints;
    if (first_row + of_row >= rows.rows) continue;
    const float largest = __uint_as_float(scales->largest[of_row][point]);
    const float unit = rows.unit[point];
    const bool rounds = largest > 127 * unit;
    store_scale(first_row + of_row, point, rounds ? largest / 127 : unit);
    scales->factor[of_row][point] = rounds ? 127 / largest : 1 / unit;
  }
  __syncthreads();

#pragma unroll 1
  for (int32_t pass = 0; pass < rows.passes; ++pass) {
    if (rows.passes > 1) {
      if (const RowPlace place(rows, pass); place.inside) compute(place);
    }
    const RowPlace place(rows, pass);
    if (!place.inside) continue;
    const int64_t row_bytes = int64_t{rows.words} * kWordChannels;
    int8_t* to = out + place.row * row_bytes + place.word * kWordChannels;
#pragma unroll
    for (int p = 0; p < kPoints; ++p) {
      const float factor = scales->factor[place.slot][p];
      uint32_t bits[kWordChannels];
#pragma unroll
      for (int c = 0; c < kWordChannels; ++c) {
        const float2 both = __half22float2(value[c][p / 2]);
        // Adding 1.5 * 2^23 rounds to an integer, whose low byte is the result.
        bits[c] = __float_as_uint(fmaf(p % 2 == 0 ? both.x : both.y, factor, 12582912.0f));
      }
      *reinterpret_cast<uint32_t*>(to) = PackLowBytes(bits);
      to += rows.rows * row_bytes;
    }
  }
}

}  // namespace jaxconv::winograd_int8

#endif  // JAXCONV_CUDA_WINOGRAD_INT8_QUANTISED_ROWS_CUH_
