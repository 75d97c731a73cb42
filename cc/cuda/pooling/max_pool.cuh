// The maxima of windows and their positions (max_pool.h).
//
// A thread has 8 channels of one column of windows and advances along the outer axis from window to
// window. A row of a window is the part at one outer coordinate; its maximum is taken over the
// middle and inner axes. Windows that overlap by kKept rows share the maxima of these rows, so each
// column reads and normalises an element once: 3x3 with stride 2 reads 6 elements per window
// instead of 9 (the array has 4 per window).
//
// The thread index is, fastest first: vector of channels, inner window, middle window, part of the
// column, example. A warp loads whole cache lines, and L1 serves the lines that adjacent windows
// share. While a batch of up to kColumns elements of a row is pooled, the next batch is loaded,
// even if it belongs to the next row or window.
//
// Everything except the normalisation is computed on words of two 16-bit elements or one float32. A
// comparison returns a mask of ones or zeros for each element, which selects the operand and (by
// its bytes) the position. After batch norm, maxima are compared, because a window with NaN has no
// position, and rectified at the end, because elements <= 0 have none. Otherwise `taken` is
// compared, and the maximum, which stays NaN after a NaN, is computed separately.
#ifndef JAXCONV_CUDA_POOLING_MAX_POOL_CUH_
#define JAXCONV_CUDA_POOLING_MAX_POOL_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/fast_divmod.h"
#include "cuda/common/element.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/pooling/element_words.cuh"
#include "cuda/pooling/max_pool.h"
#include "cuda/pooling/plan.h"
#include "cuda/ptx/min_max.cuh"

namespace jaxconv {
namespace max_pool_internal {

constexpr int kColumns = kPoolColumns;
constexpr int kQuads = kPoolVector / 4;

struct Params {
  int32_t in[kPoolAxes], out[kPoolAxes], size[kPoolAxes], stride[kPoolAxes], low[kPoolAxes];
  int32_t weight[kPoolAxes];
  int64_t threads;
  int32_t channels, walk;
  FastDivmod vectors, inner, middle, parts;
  const void* x;
  const float *mean, *scale, *offset;
  void* maxima;
  uint8_t* places;
  void* operands;
};

// All ones for each element for which the comparison holds; it holds for no NaN.
template <typename T>
__device__ __forceinline__ uint32_t GreaterOrEqual(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(a) >= __uint_as_float(b) ? ~0u : 0;
  } else {
    return __hge2_mask(AsPair<T>(a), AsPair<T>(b));
  }
}
template <typename T>
__device__ __forceinline__ uint32_t Positive(uint32_t a) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(a) > 0 ? ~0u : 0;
  } else {
    return __hgt2_mask(AsPair<T>(a), AsPair<T>(0));
  }
}
// NaN if one operand is NaN.
template <typename T>
__device__ __forceinline__ uint32_t Larger(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(MaxNan(__uint_as_float(a), __uint_as_float(b)));
  } else {
    return AsWord(__hmax2_nan(AsPair<T>(a), AsPair<T>(b)));
  }
}
__device__ __forceinline__ uint32_t Select(uint32_t mask, uint32_t a, uint32_t b) {
  return (mask & a) | (~mask & b);
}
// One byte of the mask for each of four elements.
__device__ __forceinline__ uint32_t BytesOf(const uint32_t (&masks)[4], int quad) {
  return __byte_perm(masks[2 * quad], masks[2 * quad + 1], 0x6420);
}
__device__ __forceinline__ uint32_t BytesOf(const uint32_t (&masks)[8], int quad) {
  return __byte_perm(__byte_perm(masks[4 * quad], masks[4 * quad + 1], 0x0040),
                     __byte_perm(masks[4 * quad + 2], masks[4 * quad + 3], 0x0040), 0x5410);
}
__device__ __forceinline__ uint32_t InEveryByte(int32_t number) {
  return static_cast<uint32_t>(number) * 0x01010101u;
}
template <typename T>
__device__ __forceinline__ constexpr uint32_t Lowest() {
  if constexpr (sizeof(T) == 4) return 0xff800000u;
  return std::is_same_v<T, __half> ? 0xfc00fc00u : 0xff80ff80u;
}

// The result of a search over some elements of a window.
template <typename T, bool kAffine, bool kPlaces>
struct Found {
  using Words = ElementWords<T>;
  static constexpr int kWords = Words::kWords;
  Words largest;
  Words taken;  // the operand of the selected element
  uint32_t place[kQuads];

  static __device__ __forceinline__ Found Nothing() {
    Found found;
    found.largest = found.taken = Words::All(Lowest<T>());
#pragma unroll
    for (int i = 0; i < kQuads; ++i) found.place[i] = 0;
    return found;
  }
  // Adds the next element; z is the operand, or computed from it.
  __device__ __forceinline__ void Take(const Words& z, const Words& operand, uint32_t number) {
    if constexpr (kPlaces) {
      uint32_t keeps[kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        keeps[i] = GreaterOrEqual<T>(kAffine ? largest.word[i] : taken.word[i], z.word[i]);
        taken.word[i] = Select(keeps[i], taken.word[i], operand.word[i]);
      }
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        place[i] = Select(BytesOf(keeps, i), place[i], number);
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) largest.word[i] = Larger<T>(largest.word[i], z.word[i]);
  }
  // Adds the elements of a later row, whose positions in the window are higher by `number`. If the
  // row contains a NaN, its selected element replaces the present one in any case.
  __device__ __forceinline__ void Append(const Found& row, uint32_t number) {
    if constexpr (kPlaces) {
      uint32_t keeps[kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if constexpr (kAffine) {
          keeps[i] = GreaterOrEqual<T>(largest.word[i], row.largest.word[i]);
        } else {
          keeps[i] = GreaterOrEqual<T>(taken.word[i], row.taken.word[i]) &
                     GreaterOrEqual<T>(row.largest.word[i], row.largest.word[i]);
        }
        taken.word[i] = Select(keeps[i], taken.word[i], row.taken.word[i]);
      }
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        // No carry between bytes, because positions are below 255.
        place[i] = Select(BytesOf(keeps, i), place[i], row.place[i] + number);
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      largest.word[i] = Larger<T>(largest.word[i], row.largest.word[i]);
  }
  // maximum = max(maximum, lowest). No element is selected where the maximum is not above 0.
  __device__ __forceinline__ void Rectify(uint32_t lowest) {
    uint32_t above[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      above[i] = Positive<T>(largest.word[i]);
      taken.word[i] &= above[i];
      largest.word[i] = Larger<T>(largest.word[i], lowest);
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) place[i] |= ~BytesOf(above, i);
  }
};

struct Vectors {
  float mean[kPoolVector], scale[kPoolVector], offset[kPoolVector];
};

// round((x - mean) * scale + offset)
template <typename T>
__device__ __forceinline__ ElementWords<T> Normalised(const ElementWords<T>& x, const Vectors& by) {
  float values[kPoolVector];
  x.Unpack(values);
#pragma unroll
  for (int i = 0; i < kPoolVector; ++i) {
    values[i] = (values[i] - by.mean[i]) * by.scale[i] + by.offset[i];
  }
  return ElementWords<T>::Rounded(values);
}

// Whether a batch of columns ends a row or a window.
enum class Ends { kNothing, kRow, kWindow };

template <typename T, bool kAffineArg, bool kPlacesArg, int kKeptArg, bool kOneBatchArg>
struct PoolForm {
  using Element = T;
  static constexpr bool kAffine = kAffineArg, kPlaces = kPlacesArg, kOneBatch = kOneBatchArg;
  static constexpr int kKept = kKeptArg;
};

// kKept: the rows that a window shares with the next one and whose maxima are kept, or 0.
// kOneBatch: each row is one batch, as in windows of two axes up to kColumns wide.
template <class Tag, bool kSm90>
__global__ void __launch_bounds__(kPoolThreads, kPoolCtas<sizeof(typename Tag::Element), kSm90> -
                                                    (kSm90 && sizeof(typename Tag::Element) == 2
                                                         ? Tag::kKept / 2
                                                         : 0)) PoolMaxima(const Params p) {
  using T = typename Tag::Element;
  using Words = ElementWords<T>;
  constexpr bool kAffine = Tag::kAffine, kPlaces = Tag::kPlaces, kOneBatch = Tag::kOneBatch;
  constexpr int kKept = Tag::kKept;
  using Rows = Found<T, kAffine, kPlaces>;
  const int64_t index = int64_t{blockIdx.x} * kPoolThreads + threadIdx.x;
  if (index >= p.threads) return;
  int32_t rest, vector, inner, middle_window, part, example;
  p.vectors.Divmod(static_cast<int32_t>(index), &rest, &vector);
  p.inner.Divmod(rest, &rest, &inner);
  p.middle.Divmod(rest, &rest, &middle_window);
  p.parts.Divmod(rest, &example, &part);
  const int32_t first_window = part * p.walk;
  const int64_t channel = int64_t{vector} * kPoolVector;
  int64_t out =
      (((int64_t{example} * p.out[0] + first_window) * p.out[1] + middle_window) * p.out[2] +
       inner) *
          p.channels +
      channel;
  const int32_t first_middle = middle_window * p.stride[1] - p.low[1];
  const int32_t first_column = inner * p.stride[2] - p.low[2];
  // Whether the window contains elements, not only padding, along these axes; and the columns of a
  // batch that exist, as a mask.
  const bool has_elements = first_middle + p.size[1] > 0 && first_middle < p.in[1] &&
                            first_column + p.size[2] > 0 && first_column < p.in[2];
  auto columns_of = [&](int32_t column) {
    const int32_t w = first_column + column;
    const int32_t end = min(p.size[2] - column, p.in[2] - w);
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) bits |= (w + j >= 0 && j < end) ? 1u << j : 0;
    return bits;
  };
  Vectors by;
  if constexpr (kAffine) {
    LoadNumbers(p.mean + channel, by.mean);
    LoadNumbers(p.scale + channel, by.scale);
    LoadNumbers(p.offset + channel, by.offset);
  }

  // The next batch to load. `line` is the address of its row's first column.
  int32_t windows = min(p.walk, p.out[0] - first_window), row = 0, middle = 0, column = 0;
  int32_t top = first_window * p.stride[0] - p.low[0];  // of the window being pooled
  int32_t h = top;
  uint32_t columns = columns_of(0);
  const int64_t line_elements = int64_t{p.in[2]} * p.channels;
  const T* line = static_cast<const T*>(p.x) +
                  ((int64_t{example} * p.in[0] + h) * p.in[1] + first_middle) * line_elements +
                  int64_t{first_column} * p.channels + channel;
  const int64_t row_elements = p.in[1] * line_elements;
  auto advance = [&] {
    if constexpr (!kOneBatch) {
      column += kColumns;
      if (column < p.size[2]) {
        columns = columns_of(column);
        return Ends::kNothing;
      }
      if (p.size[2] > kColumns) columns = columns_of(0);
      column = 0;
      line += line_elements;
      if (++middle < p.size[1]) return Ends::kNothing;
      middle = 0;
      line -= p.size[1] * line_elements;
    }
    line += row_elements;
    ++h;
    if (++row < p.size[0]) return Ends::kRow;
    const int32_t between = p.stride[0] + kKept - p.size[0];  // to the next window's first new row
    line += between * row_elements;
    h += between;
    row = kKept;
    --windows;
    return Ends::kWindow;
  };
  Words raw[kColumns] = {};
  auto load_column = [&](int j, const T* from, uint32_t bits) {
    if ((bits >> j & 1) != 0) {
      raw[j] = Words::Load(from, j * p.channels);
    } else if constexpr (!kAffine) {
      raw[j] = Words::All(Lowest<T>());
    }
  };
  auto bits_of_batch = [&] {
    const int32_t d = first_middle + middle;
    return windows > 0 && h >= 0 && h < p.in[0] && d >= 0 && d < p.in[1] ? columns : 0u;
  };
  uint32_t loaded = bits_of_batch();
#pragma unroll
  for (int j = 0; j < kColumns; ++j) load_column(j, line, loaded);

  const uint32_t step = InEveryByte(p.weight[2]);
  Rows window = Rows::Nothing(), kept[kKept > 0 ? kKept : 1];
  while (true) {
    Ends ends;
    do {
      Rows found = Rows::Nothing();
      const uint32_t number_of_row = InEveryByte(row * p.weight[0]);
      do {
        uint32_t number = InEveryByte(middle * p.weight[1] + column * p.weight[2]);
        const int32_t left = p.size[2] - column;
        const uint32_t bits = loaded;
        ends = advance();
        loaded = bits_of_batch();
        const T* const from = line + int64_t{column} * p.channels;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const Words operand = raw[j];
          if constexpr (kAffine) {
            // The padding is below all elements; NaN has no position.
            if ((bits >> j & 1) != 0) found.Take(Normalised<T>(operand, by), operand, number);
          } else {
            if (j < left) found.Take(operand, operand, number);
          }
          load_column(j, from, loaded);
          number += step;
        }
      } while (ends == Ends::kNothing);
      window.Append(found, number_of_row);
      if constexpr (kKept > 0) {
#pragma unroll
        for (int k = 0; k + 1 < kKept; ++k) kept[k] = kept[k + 1];
        kept[kKept - 1] = found;
      }
    } while (ends != Ends::kWindow);

    if constexpr (kAffine) {
      // The activation, for windows that are not entirely padding.
      const bool rectified = has_elements && top + p.size[0] > 0 && top < p.in[0];
      window.Rectify(rectified ? 0 : Lowest<T>());
    }
    window.largest.Store(p.maxima, out);
    if constexpr (kPlaces) {
      *reinterpret_cast<uint2*>(p.places + out) = make_uint2(window.place[0], window.place[1]);
      if (p.operands != nullptr) window.taken.Store(p.operands, out);
    }
    if (windows == 0) return;
    out += int64_t{p.out[1]} * p.out[2] * p.channels;
    top += p.stride[0];
    window = Rows::Nothing();
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (k == 0) {
        window = kept[0];
      } else {
        window.Append(kept[k], InEveryByte(k * p.weight[0]));
      }
    }
  }
}

template <class Tag, bool kSm90>
Status LaunchPool(const MaxPool& pool, void* stream) {
  const PoolWindows& w = pool.windows;
  Params p = {};
  for (int i = 0; i < kPoolAxes; ++i) {
    p.in[i] = static_cast<int32_t>(w.in[i]), p.out[i] = static_cast<int32_t>(w.out[i]);
    p.size[i] = static_cast<int32_t>(w.size[i]), p.stride[i] = static_cast<int32_t>(w.stride[i]);
    p.low[i] = static_cast<int32_t>(w.low[i]), p.weight[i] = static_cast<int32_t>(w.weight(i));
  }
  const int64_t vectors = w.channels / kPoolVector;
  const int64_t columns = w.batch * w.out[1] * w.out[2] * vectors;
  const int64_t longest = std::min(pool.walk, w.out[0]);
  const int64_t parts = (w.out[0] + longest - 1) / longest;
  p.walk = static_cast<int32_t>((w.out[0] + parts - 1) / parts);
  p.threads = columns * parts;
  p.channels = static_cast<int32_t>(w.channels);
  p.vectors = FastDivmod(vectors), p.inner = FastDivmod(w.out[2]);
  p.middle = FastDivmod(w.out[1]), p.parts = FastDivmod(parts);
  p.x = pool.x;
  p.mean = pool.mean, p.scale = pool.scale, p.offset = pool.offset;
  p.maxima = pool.maxima, p.places = pool.places, p.operands = pool.operands;
  LaunchConfig config;
  config.threads = kPoolThreads;
  config.grid = static_cast<unsigned>((p.threads + kPoolThreads - 1) / kPoolThreads);
  return Launch<PoolMaxima<Tag, kSm90>>("max_pool", config, stream, p);
}

}  // namespace max_pool_internal
}  // namespace jaxconv

#endif  // JAXCONV_CUDA_POOLING_MAX_POOL_CUH_
