// y[n, k] = sum over i of x[n, i] w[i, k], where i runs over all elements of an image
//
// The time is that of one read of the filter: 6.4 MB for 7x7, 256 to 128 channels, with 12
// multiply-adds a cache line for 4 images. Tasks therefore divide the rows of the filter; each
// reads its part in order, and their partial sums are added afterwards. oneDNN's tasks divide the
// images, so each reads the whole filter.
//
// A step takes 8 rows of the filter and proceeds along their columns, 32 at a time: it loads the
// sums of these columns (2 vectors an image), multiplies 16 vectors of the filter, and stores the
// sums, which take a few KB and stay in L1.
//
// If the window is smaller than the input, up to 128 output pixels take the place of images: for
// every tap, 64 channels of its pixels of x are gathered (zeros in the padding) and multiplied by
// the corresponding 64 rows of the filter, 8 pixels at a time.
//
// The loops over a block must be unrolled, or the sums go through memory.
#include "cpu/few_pixels.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace jaxconv::cpu {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kMaxImages = 8;
constexpr int64_t kRowsAtATime = 8;
constexpr int64_t kMaxPixels = 128, kGatheredRows = 64;

// sum (n, K) += x[:, 0 .. rows) w (rows, K); images of x lie x_stride apart.
template <int kImages>
__attribute__((target("avx512f"))) void AddRows(const float* x, int64_t x_stride, int64_t rows,
                                                const float* w, int64_t k_count, float* sum) {
  for (int64_t k = 0; k < k_count; k += 2 * kLanes) {
    const int64_t left = k_count - k;
    const auto low = static_cast<__mmask16>(left >= kLanes ? 0xffff : (1u << left) - 1);
    const auto high = static_cast<__mmask16>(left >= 2 * kLanes ? 0xffff
                                             : left > kLanes    ? (1u << (left - kLanes)) - 1
                                                                : 0);
    // Masked lanes are not accessed, so the pointer may lie past the row.
    __m512 total[kImages][2];
#pragma GCC unroll 8
    for (int n = 0; n < kImages; ++n) {
      total[n][0] = _mm512_maskz_loadu_ps(low, sum + n * k_count + k);
      total[n][1] = _mm512_maskz_loadu_ps(high, sum + n * k_count + k + kLanes);
    }
    for (int64_t i = 0; i < rows; ++i) {
      __m512 w0 = _mm512_maskz_loadu_ps(low, w + i * k_count + k);
      __m512 w1 = _mm512_maskz_loadu_ps(high, w + i * k_count + k + kLanes);
#pragma GCC unroll 8
      for (int n = 0; n < kImages; ++n) {
        __m512 value = _mm512_set1_ps(x[n * x_stride + i]);
        total[n][0] = _mm512_fmadd_ps(value, w0, total[n][0]);
        total[n][1] = _mm512_fmadd_ps(value, w1, total[n][1]);
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < kImages; ++n) {
      _mm512_mask_storeu_ps(sum + n * k_count + k, low, total[n][0]);
      _mm512_mask_storeu_ps(sum + n * k_count + k + kLanes, high, total[n][1]);
    }
  }
}

using AddRowsFn = void (*)(const float*, int64_t, int64_t, const float*, int64_t, float*);
constexpr AddRowsFn kAddRows[kMaxImages + 1] = {nullptr,    AddRows<1>, AddRows<2>,
                                                AddRows<3>, AddRows<4>, AddRows<5>,
                                                AddRows<6>, AddRows<7>, AddRows<8>};

// Whether an image has one output pixel whose window is the whole input.
bool IsWholeWindow(const ConvProblem& p) {
  for (int a = 0; a < 3; ++a) {
    const bool whole = p.filter[a] == p.in[a] && (p.filter[a] == 1 || p.dilation[a] == 1);
    if (!whole || p.out[a] != 1 || p.pad_lo[a] != 0) return false;
  }
  return p.n <= kMaxImages;
}

// Copies channels [first, first + rows) of tap `tap`'s pixel of x for every output pixel;
// `gathered` has kGatheredRows elements a pixel.
void Gather(const ConvProblem& p, const float* x, int64_t tap, int64_t first, int64_t rows,
            float* gathered) {
  const Spatial at_tap{tap / (p.filter[1] * p.filter[2]), tap / p.filter[2] % p.filter[1],
                       tap % p.filter[2]};
  for (int64_t i = 0; i < p.n * p.out_pixels(); ++i, gathered += kGatheredRows) {
    int64_t rest = i;
    Spatial at;
    bool inside = true;
    for (int a = 2; a >= 0; --a) {
      at[a] = rest % p.out[a] * p.stride[a] + at_tap[a] * p.dilation[a] - p.pad_lo[a];
      rest /= p.out[a];
      inside &= at[a] >= 0 && at[a] < p.in[a];
    }
    if (inside) {
      const int64_t pixel = ((rest * p.in[0] + at[0]) * p.in[1] + at[1]) * p.in[2] + at[2];
      std::memcpy(gathered, x + pixel * p.c + first, rows * sizeof(float));
    } else {
      std::memset(gathered, 0, rows * sizeof(float));
    }
  }
}

// sum (pixels, K) += the contribution of rows [begin, end) of the filter (taps C, K).
void AddGathered(const ConvProblem& p, const float* x, const float* w, int64_t begin, int64_t end,
                 float* gathered, float* sum) {
  const int64_t pixels = p.n * p.out_pixels();
  for (int64_t rows, row = begin; row < end; row += rows) {
    const int64_t tap = row / p.c, first = row % p.c;
    rows = std::min({end - row, p.c - first, kGatheredRows});
    Gather(p, x, tap, first, rows, gathered);
    for (int64_t i = 0; i < pixels; i += kMaxImages) {
      kAddRows[std::min(kMaxImages, pixels - i)](gathered + i * kGatheredRows, kGatheredRows, rows,
                                                 w + row * p.k, p.k, sum + i * p.k);
    }
  }
}

}  // namespace

Status CheckFewPixels(const ConvProblem& p) {
  static const bool runs = __builtin_cpu_supports("avx512f");
  if (!runs) return Status::Unimplemented("needs AVX-512");
  if (p.groups != 1) return Status::Unimplemented("takes no groups");
  if (p.n * p.out_pixels() > kMaxPixels) {
    return Status::Unimplemented("takes up to " + std::to_string(kMaxPixels) +
                                 " output pixels, got " + std::to_string(p.n * p.out_pixels()));
  }
  return {};
}

Status FewPixelsPays(const ConvProblem& p) {
  if (IsWholeWindow(p)) return {};
  // oneDNN reads the filter again for every output row (for a 1x1 filter: for every image). With
  // short rows this is slower if the filter exceeds L2; with single pixels also below (measured:
  // docs/notes/cpu.md).
  constexpr int64_t kShort = 5, kLargeFilter = 1 << 20;
  const int64_t run = p.taps() == 1 ? p.out_pixels() : p.out[2];
  const int64_t filter = p.w_elements() / p.batch * static_cast<int64_t>(sizeof(float));
  const bool vectors = p.c >= kLanes && p.k >= 2 * kLanes;
  if (vectors && (run == 1 || (run <= kShort && filter >= kLargeFilter))) return {};
  return Status::Unimplemented(
      "pays for windows that are the whole input, and for short rows of a large filter's output");
}

int64_t FewPixelsPartialBytes(const ConvProblem& p) {
  return p.y_elements() * static_cast<int64_t>(sizeof(float));
}

int64_t FewPixelsScratchBytes(const ConvProblem& p) {
  const int64_t pixels = IsWholeWindow(p) ? 0 : p.n * p.out_pixels();
  return pixels * kGatheredRows * static_cast<int64_t>(sizeof(float));
}

void FewPixels(const ConvProblem& p, int64_t task, int64_t tasks, const float* x, const float* w,
               float* scratch, float* partial) {
  std::memset(partial, 0, FewPixelsPartialBytes(p));
  const int64_t inner = p.taps() * p.c, image = p.n * p.in_pixels() * p.c;
  const int64_t begin = task * inner / tasks, end = (task + 1) * inner / tasks;
  for (int64_t b = 0; b < p.batch; ++b) {
    const float* filter = w + b * inner * p.k;
    float* sum = partial + b * p.n * p.out_pixels() * p.k;
    if (!IsWholeWindow(p)) {
      AddGathered(p, x + b * image, filter, begin, end, scratch, sum);
      continue;
    }
    for (int64_t i = begin; i < end; i += kRowsAtATime) {
      kAddRows[p.n](x + b * image + i, inner, std::min(kRowsAtATime, end - i), filter + i * p.k,
                    p.k, sum);
    }
  }
}

}  // namespace jaxconv::cpu
