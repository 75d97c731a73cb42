// y[n, p, q, k] = sum over r, s, c of x[n, p * stride + r * dilation - pad, ..., c] w[r, s, c, k]
//
// A kernel with output channels in its vectors, like oneDNN's, uses K of 16 lanes. Here the vectors
// hold input channels: every pair of output pixel and output channel has a vector of partial sums,
// which is reduced once, after all taps and channels. A block of neighbouring pixels of a row, with
// all K channels, has up to 24 sums in registers. For 16 input channels of a tap it loads K vectors
// of the filter and one vector of x for each pixel: 11 loads for 24 multiply-adds with 8 pixels and
// 3 channels.
//
// The filter is stored as (taps, K, C), so that its vectors are contiguous.
//
// The loops over a block must be unrolled, or the sums go through memory.
#include "cpu/few_outputs.h"

#include <immintrin.h>

#include <algorithm>
#include <string>

#include "cpu/geometry.h"

namespace jaxconv::cpu {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kMaxOutputs = 8;

// The sum of the lanes. With _mm512_reduce_add_ps GCC 12 warns about its own header.
__attribute__((target("avx512f"))) inline float Sum(__m512 lanes) {
  constexpr __mmask16 kAll = 0xffff;
  lanes = _mm512_add_ps(lanes, _mm512_maskz_shuffle_f32x4(kAll, lanes, lanes, 0x4e));
  lanes = _mm512_add_ps(lanes, _mm512_maskz_shuffle_f32x4(kAll, lanes, lanes, 0xb1));
  lanes = _mm512_add_ps(lanes, _mm512_maskz_permute_ps(kAll, lanes, 0x4e));
  lanes = _mm512_add_ps(lanes, _mm512_maskz_permute_ps(kAll, lanes, 0xb1));
  return _mm512_cvtss_f32(lanes);
}

// One output row. Strides are in elements.
struct Row {
  const float* x;  // the input plane, or image, in which the row of taps begins
  const float* w;  // packed
  float* y;        // the row
  const ConvProblem* p;
  int64_t p0, p1;  // of the row
  int64_t first;   // output column of y[0]
};

// The pixels [q, q + kPixels) of a row. kInside: every filter column lies inside the input at every
// pixel; only then can kPixels exceed 1.
template <int kPixels, int kOutputs, bool kInside>
__attribute__((target("avx512f"))) void Block(const Row& row, int64_t q) {
  const ConvProblem& p = *row.p;
  const int64_t c = p.c, full = c / kLanes * kLanes;
  const auto tail = static_cast<__mmask16>((1u << (c - full)) - 1);
  const int64_t pixel = p.stride[2] * c;
  __m512 sum[kPixels * kOutputs];
#pragma GCC unroll 24
  for (int i = 0; i < kPixels * kOutputs; ++i) sum[i] = _mm512_setzero_ps();
  for (int64_t r0 = 0; r0 < p.filter[0]; ++r0) {
    int64_t i0 = row.p0 * p.stride[0] + r0 * p.dilation[0] - p.pad_lo[0];
    if (i0 < 0 || i0 >= p.in[0]) continue;
    for (int64_t r1 = 0; r1 < p.filter[1]; ++r1) {
      int64_t i1 = row.p1 * p.stride[1] + r1 * p.dilation[1] - p.pad_lo[1];
      if (i1 < 0 || i1 >= p.in[1]) continue;
      const float* x_row = row.x + (i0 * p.in[1] + i1) * p.in[2] * c;
      const float* w_row = row.w + (r0 * p.filter[1] + r1) * p.filter[2] * kOutputs * c;
      for (int64_t s = 0; s < p.filter[2]; ++s) {
        int64_t column = (row.first + q) * p.stride[2] + s * p.dilation[2] - p.pad_lo[2];
        if (!kInside && (column < 0 || column >= p.in[2])) continue;
        const float* x = x_row + column * c;
        const float* w = w_row + s * kOutputs * c;
        for (int64_t i = 0; i < full; i += kLanes) {
          __m512 filter[kOutputs];
#pragma GCC unroll 8
          for (int k = 0; k < kOutputs; ++k) filter[k] = _mm512_loadu_ps(w + k * c + i);
#pragma GCC unroll 24
          for (int j = 0; j < kPixels; ++j) {
            __m512 value = _mm512_loadu_ps(x + j * pixel + i);
#pragma GCC unroll 8
            for (int k = 0; k < kOutputs; ++k) {
              sum[j * kOutputs + k] = _mm512_fmadd_ps(value, filter[k], sum[j * kOutputs + k]);
            }
          }
        }
        if (tail == 0) continue;
        __m512 filter[kOutputs];
#pragma GCC unroll 8
        for (int k = 0; k < kOutputs; ++k)
          filter[k] = _mm512_maskz_loadu_ps(tail, w + k * c + full);
#pragma GCC unroll 24
        for (int j = 0; j < kPixels; ++j) {
          __m512 value = _mm512_maskz_loadu_ps(tail, x + j * pixel + full);
#pragma GCC unroll 8
          for (int k = 0; k < kOutputs; ++k) {
            sum[j * kOutputs + k] = _mm512_fmadd_ps(value, filter[k], sum[j * kOutputs + k]);
          }
        }
      }
    }
  }
  float* y = row.y + q * kOutputs;
#pragma GCC unroll 24
  for (int i = 0; i < kPixels * kOutputs; ++i) y[i] = Sum(sum[i]);
}

template <int kOutputs>
void OutputRow(const Row& row, int64_t columns) {
  constexpr int kPixels = kOutputs == 1 ? 16 : 24 / kOutputs;
  const ConvProblem& p = *row.p;
  // Columns at which no tap lies outside the input.
  const int64_t stride = p.stride[2], reach = (p.filter[2] - 1) * p.dilation[2];
  const int64_t begin = std::clamp<int64_t>(CeilDiv(p.pad_lo[2], stride) - row.first, 0, columns);
  const int64_t end = std::clamp<int64_t>(
      FloorDiv(p.in[2] - 1 - reach + p.pad_lo[2], stride) + 1 - row.first, begin, columns);
  int64_t q = 0;
  for (; q < begin; ++q) Block<1, kOutputs, false>(row, q);
  for (; q + kPixels <= end; q += kPixels) Block<kPixels, kOutputs, true>(row, q);
  for (; q + 2 <= end; q += 2) Block<2, kOutputs, true>(row, q);
  for (; q < columns; ++q) Block<1, kOutputs, false>(row, q);
}

using OutputRowFn = void (*)(const Row&, int64_t);
constexpr OutputRowFn kOutputRow[kMaxOutputs + 1] = {nullptr,      OutputRow<1>, OutputRow<2>,
                                                     OutputRow<3>, OutputRow<4>, OutputRow<5>,
                                                     OutputRow<6>, OutputRow<7>, OutputRow<8>};

Status Check(const ConvProblem& p) {
  static const bool runs = __builtin_cpu_supports("avx512f");
  if (!runs) return Status::Unimplemented("needs AVX-512");
  if (p.groups != 1) return Status::Unimplemented("takes no groups");
  if (p.k > kMaxOutputs) {
    return Status::Unimplemented("takes up to " + std::to_string(kMaxOutputs) +
                                 " output channels, got " + std::to_string(p.k));
  }
  return {};
}

Status Pays(const ConvProblem& p) {
  if (p.k > 4) return Status::Unimplemented("pays up to 4 output channels only");
  if (p.c < kLanes) return Status::Unimplemented("pays from 16 input channels on");
  return {};
}

// (taps, C, K) as (taps, K, C).
void Pack(const ConvProblem& p, const float* w, float* packed) {
  for (int64_t t = 0; t < p.taps(); ++t, w += p.c * p.k, packed += p.c * p.k) {
    for (int64_t k = 0; k < p.k; ++k) {
      for (int64_t c = 0; c < p.c; ++c) packed[k * p.c + c] = w[c * p.k + k];
    }
  }
}

int64_t PackedElements(const ConvProblem& p) { return p.taps() * p.c * p.k; }

int64_t ScratchBytes(const ConvProblem&) { return 0; }

void Compute(const ConvProblem& p, const float* x, const float* packed, float* y, int64_t row_begin,
             int64_t row_end, float*) {
  // Axis 2 runs along a row; with one spatial axis, rows are also counted along it.
  Row row{x, packed, nullptr, &p, 0, 0, p.rank == 1 ? row_begin : 0};
  const int64_t columns = p.rank == 1 ? row_end - row_begin : p.out[2];
  Spatial begin{0, 0, 0}, end{p.out[0], p.out[1], 1};
  if (p.rank > 1) {
    begin[3 - p.rank] = row_begin;
    end[3 - p.rank] = row_end;
  }
  for (row.p0 = begin[0]; row.p0 < end[0]; ++row.p0) {
    for (row.p1 = begin[1]; row.p1 < end[1]; ++row.p1) {
      row.y = y + ((row.p0 * p.out[1] + row.p1) * p.out[2] + row.first) * p.k;
      kOutputRow[p.k](row, columns);
    }
  }
}

}  // namespace

const RegionKernel kFewOutputs = {Check, Pays, PackedElements, Pack, ScratchBytes, Compute};

}  // namespace jaxconv::cpu
