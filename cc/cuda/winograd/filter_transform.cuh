// U = G w G^T: transforms the filter to float16 in the Winograd domain, the reduction innermost.
//
// A CTA has 64 channels of the reduction and 16 columns (output channels) of a group, a warp four
// of the columns, a lane two neighbouring channels of each column: 9 taps in, (m + 2)^2 points out.
// A warp writes 128 contiguous bytes of a point, so U, (m + 2)^2 / 9 times as large as the filter,
// is written at DRAM rate.
//
// If the reduction is the filter's fastest axis (krsc in fprop, rsck in dgrad), a lane reads its
// pairs of channels directly. If the columns are (the other two cases), the CTA first copies its 9
// x 64 x 16 taps to shared memory and reads them there by columns:
//
//     [tap][channel % 2][channel / 2][9 words of two columns]      21,312 bytes
//     [tap][channel % 2][channel / 2][17 words of float columns]   39,744 bytes
//
// Rows have an odd number of words, and odd channels lie 16 words further, so the reads (32 rows of
// one word) have no bank conflicts and the copies (16 rows of two chunks) two-way conflicts. With
// twice the columns, a 512 x 512 filter would have fewer CTAs than an H200 has SMs.
//
// The one-dimensional form transforms along s only and writes the layout of row_filter.h, including
// the zeros that pad the reduction.
//
// dgrad reads the taps in reverse order, with negative strides. T: __half, __nv_bfloat16 or float,
// the latter two multiplied by their power of two (amax.cuh) as they are loaded.
#ifndef JAXCONV_CUDA_WINOGRAD_FILTER_TRANSFORM_CUH_
#define JAXCONV_CUDA_WINOGRAD_FILTER_TRANSFORM_CUH_

#include "cuda/common/winograd_transform.cuh"
#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/winograd/amax.cuh"
#include "cuda/winograd/element_pair.cuh"
#include "cuda/winograd/params.h"
#include "cuda/winograd/row_filter.h"

namespace jaxconv::winograd {

struct FilterTransformParams {
  FilterStrides filter;
  ScaleSource scale;
  uint32_t* maxima = nullptr;  // of measured operands
  const void* w = nullptr;
  __half* u = nullptr;
  int32_t red = 0, cols = 0;  // of a group
  int64_t u_point = 0;        // elements from a point to the next
  int64_t u_group = 0;        // one-dimensional: from a group to the next
  RowFilter row_filter;       // one-dimensional
  // CTAs: blocks of the reduction fastest, then blocks of columns, then groups.
  FastDivmod red_blocks, col_blocks;
};

inline constexpr int kFilterThreads = 128;
inline constexpr int kFilterReds = 64, kFilterCols = 16;  // of a CTA

// The taps of a CTA in shared memory. kWidth: bytes of an element.
template <int kWidth>
struct FilterStaging {
  static constexpr int kRowWords = kFilterCols * kWidth / 4 + 1;
  static constexpr int kOddRows = kFilterReds / 2 * kRowWords + 16;
  static constexpr int kTapWords = kOddRows + kFilterReds / 2 * kRowWords;
  static constexpr int kWords = kTaps * kTaps * kTapWords;

  __device__ static int Row(int tap, int red) {
    return tap * kTapWords + red % 2 * kOddRows + red / 2 * kRowWords;
  }
};

// Copies the CTA's part of a filter with contiguous columns to shared memory, 16 bytes at a time.
template <typename T>
__device__ __forceinline__ void StageFilter(const FilterTransformParams& params, const T* w,
                                            int first_red, int first_col, uint32_t* staging) {
  constexpr int kOfChunk = 16 / sizeof(T), kChunks = kFilterCols / kOfChunk;  // of a row
  static_assert(kFilterReds * kChunks % kFilterThreads == 0);
#pragma unroll
  for (int at = threadIdx.x; at < kFilterReds * kChunks; at += kFilterThreads) {
    const int red = at / kChunks, col = at % kChunks * kOfChunk;
    const bool inside = first_red + red < params.red && first_col + col < params.cols;
    const T* from = w + (first_red + red) * params.filter.red + first_col + col;
    uint4 chunk[kTaps * kTaps];
#pragma unroll
    for (int tap = 0; tap < kTaps * kTaps; ++tap) {
      const int64_t step = tap / kTaps * params.filter.r + tap % kTaps * params.filter.s;
      chunk[tap] =
          inside ? __ldg(reinterpret_cast<const uint4*>(from + step)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int tap = 0; tap < kTaps * kTaps; ++tap) {
      uint32_t* to = staging + FilterStaging<sizeof(T)>::Row(tap, red) + col * sizeof(T) / 4;
      to[0] = chunk[tap].x, to[1] = chunk[tap].y, to[2] = chunk[tap].z, to[3] = chunk[tap].w;
    }
  }
}

// The work of CTA `block` of the grid.
template <int m, bool kOneDimensional, typename T, bool kTransposed>
__device__ __forceinline__ void TransformFilterBlock(const FilterTransformParams& params,
                                                     int32_t block, uint32_t* staging,
                                                     uint32_t* maxima, float scale) {
  constexpr int kAlpha = m + 2, kAll = kTaps * kTaps;
  using Staging = FilterStaging<sizeof(T)>;
  int32_t red_block, col_block, group, rest;
  params.red_blocks.Divmod(block, &rest, &red_block);
  params.col_blocks.Divmod(rest, &group, &col_block);
  const int32_t first_red = red_block * kFilterReds, first_col = col_block * kFilterCols;
  const T* w = static_cast<const T*>(params.w) + params.filter.first + group * params.filter.group;
  if constexpr (kTransposed) {
    StageFilter(params, w, first_red, first_col, staging);
    __syncthreads();
  }
  const int lane = threadIdx.x % 32;
  const int32_t red = first_red + 2 * lane;
  constexpr int kColsOfWarp = kFilterCols / (kFilterThreads / 32);
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = 0; i < kColsOfWarp; ++i) {
    const int32_t own = threadIdx.x / 32 * kColsOfWarp + i, col = first_col + own;
    if (col >= params.cols) break;
    float taps[2][kTaps][kTaps];  // of the two channels
#pragma unroll
    for (int tap = 0; tap < kAll; ++tap) {
      float low, high;
      if constexpr (kTransposed) {
        constexpr int kOfWord = 4 / sizeof(T);
        const int place = Staging::Row(tap, 2 * lane) + own / kOfWord;
        const uint32_t even = staging[place], odd = staging[place + Staging::kOddRows];
        if constexpr (std::is_same_v<T, float>) {
          low = __uint_as_float(even);
          high = __uint_as_float(odd);
        } else {
          low = own % 2 == 0 ? ElementOfPair<T, 0>(even) : ElementOfPair<T, 1>(even);
          high = own % 2 == 0 ? ElementOfPair<T, 0>(odd) : ElementOfPair<T, 1>(odd);
        }
      } else {
        const T* from = w + col * params.filter.col + red + tap / kTaps * params.filter.r +
                        tap % kTaps * params.filter.s;
        const PairOf<T> pair = LoadPair(from, red < params.red);
        low = ElementOfPair<T, 0>(pair);
        high = ElementOfPair<T, 1>(pair);
      }
      taps[0][tap / kTaps][tap % kTaps] = low * scale;
      taps[1][tap / kTaps][tap % kTaps] = high * scale;
      if constexpr (!std::is_same_v<T, float> && !kOneDimensional) {
        largest =
            max(largest, max(FiniteBits(__float_as_uint(low)), FiniteBits(__float_as_uint(high))));
      }
    }
    if constexpr (kOneDimensional) {
      if (red >= params.row_filter.reduction_blocks * RowFilter::kReduction) continue;
      __half* to = params.u + group * params.u_group;
#pragma unroll
      for (int r = 0; r < kTaps; ++r) {
        float u[2][kAlpha];
        TransformFilter<m>(taps[0][r], u[0]);
        TransformFilter<m>(taps[1][r], u[1]);
#pragma unroll
        for (int j = 0; j < kAlpha; ++j) {
          StorePairTo(to + params.row_filter.Offset(r, j, col, red), u[0][j], u[1][j]);
        }
      }
    } else {
      if (red >= params.red) continue;
      float u[2][kAlpha][kAlpha];
      TransformFilterTile<m>(taps[0], u[0]);
      TransformFilterTile<m>(taps[1], u[1]);
      __half* to = params.u + (int64_t{group} * params.cols + col) * params.red + red;
#pragma unroll
      for (int r = 0; r < kAlpha; ++r) {
#pragma unroll
        for (int j = 0; j < kAlpha; ++j) {
          StorePairTo(to, u[0][r][j], u[1][r][j]);
          to += params.u_point;
        }
      }
    }
  }
  if constexpr (!std::is_same_v<T, float> && !kOneDimensional) {
    if (maxima != nullptr) TakeMaximum(maxima, 0xffffffffu, largest);
  }
}

template <int m, bool kOneDimensional, typename T, bool kTransposed, bool kOverlaps>
__global__ void __launch_bounds__(kFilterThreads, 4)
    FilterTransformKernel(const __grid_constant__ FilterTransformParams params) {
  __shared__ uint32_t staging[kTransposed ? FilterStaging<sizeof(T)>::kWords : 1];
  if constexpr (kOverlaps) {
    WaitForPrecedingGrids();
    LetNextGridStart();
  }
  const bool assumes = params.scale.assumed != 0;
  const float scale = assumes ? params.scale.assumed : WarpScale(params.scale);
  TransformFilterBlock<m, kOneDimensional, T, kTransposed>(params, blockIdx.x, staging,
                                                           params.maxima, scale);
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FILTER_TRANSFORM_CUH_
