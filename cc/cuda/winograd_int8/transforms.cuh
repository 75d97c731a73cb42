// The transforms of winograd_int8: x -> V, w -> U (quantised_rows.cuh), and M -> y.
//
// Input: a thread has four channels of a tile, with (m + 2)^2 loads of a word; a warp stores lines
// of 128 bytes at each point. Filter: the same for the nine taps of an output channel.
//
// Output: a thread has two neighbouring channels of a tile, with (m + 2)^2 loads of 4 bytes, and
// stores its m^2 sums, rounded to int32, in shared memory (16 KB for m = 4, 4 KB for m = 2). After
// a barrier it passes eight neighbouring channels of m^2 / 4 pixels to the epilogue of the int8
// families. If V, U and M needed no rounding, these sums equal the definition's.
#ifndef JAXCONV_CUDA_WINOGRAD_INT8_TRANSFORMS_CUH_
#define JAXCONV_CUDA_WINOGRAD_INT8_TRANSFORMS_CUH_

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "cuda/common/requantize.cuh"
#include "cuda/common/winograd_transform.cuh"
#include "cuda/winograd_int8/matrices.h"
#include "cuda/winograd_int8/params.h"
#include "cuda/winograd_int8/quantised_rows.cuh"

namespace jaxconv::winograd_int8 {

struct Tile {
  int32_t image, row, column;  // of the tile in its image, in tiles
  __device__ __forceinline__ Tile(const FastDivmod& tiles_h, const FastDivmod& tiles_w,
                                  int32_t index) {
    int32_t rows;
    tiles_w.Divmod(index, &rows, &column);
    tiles_h.Divmod(rows, &image, &row);
  }
};

// One of the four int8 of a word.
__device__ __forceinline__ float ByteOf(uint32_t word, int byte) {
  return requantize_internal::ByteAsFloat<true>(word, byte, 0x4b000000);
}

// Bytes c and c + 1 of a word. A byte is placed in the low mantissa bits of 1024, and 1024 is
// subtracted, which is exact.
__device__ __forceinline__ __half2 PairOf(uint32_t word, int c) {
  const uint32_t bits = __byte_perm(word ^ 0x80808080u, 0x64646464u, 0x4040 | (c + 1) << 8 | c);
  __half2 pair;
  memcpy(&pair, &bits, sizeof(pair));
  return __hsub2(pair, __float2half2_rn(1024.0f + 128.0f));
}

template <class Tag, int m>
__global__ void __launch_bounds__(kMaxLanes<m>, 1)
    InputTransformKernel(const __grid_constant__ InputParams params) {
  constexpr int kAlpha = m + 2, kPoints = kAlpha * kAlpha;
  __shared__ RowScales<kPoints> scales;
  auto load = [&](int32_t index, int32_t word, uint32_t (&words)[kPoints]) {
    const Tile tile(params.tiles_h, params.tiles_w, index);
    const int32_t h = tile.row * m - params.pad_h, w = tile.column * m - params.pad_w;
    const int32_t stride = params.pixel_stride;
    const int8_t* from = params.x + tile.image * params.image_stride +
                         (int64_t{h} * params.in_w + w) * stride + word / 8 * params.block_stride +
                         word % 8 * kWordChannels;
#pragma unroll
    for (int i = 0; i < kAlpha; ++i) {
      const bool row_inside = static_cast<uint32_t>(h + i) < static_cast<uint32_t>(params.in_h);
#pragma unroll
      for (int j = 0; j < kAlpha; ++j) {
        const bool inside =
            row_inside && static_cast<uint32_t>(w + j) < static_cast<uint32_t>(params.in_w);
        words[i * kAlpha + j] =
            inside ? __ldg(reinterpret_cast<const uint32_t*>(from + j * stride)) : 0;
      }
      from += int64_t{params.in_w} * stride;
    }
  };
  auto transform = [](const uint32_t (&words)[kPoints], int c, float (&value)[2][kPoints]) {
    // The transform along the columns in float16, on two channels at once; it is exact, because all
    // sums have less than 11 bits.
    __half2 half[kAlpha][kAlpha];
#pragma unroll
    for (int j = 0; j < kAlpha; ++j) {
      __half2 column[kAlpha], transformed[kAlpha];
#pragma unroll
      for (int i = 0; i < kAlpha; ++i) column[i] = PairOf(words[i * kAlpha + j], c);
      winograd::TransformInput<m>(column, transformed);
#pragma unroll
      for (int i = 0; i < kAlpha; ++i) half[i][j] = transformed[i];
    }
#pragma unroll
    for (int i = 0; i < kAlpha; ++i) {
      float rows[2][kAlpha];
#pragma unroll
      for (int j = 0; j < kAlpha; ++j) {
        const float2 both = __half22float2(half[i][j]);
        rows[0][j] = both.x, rows[1][j] = both.y;
      }
#pragma unroll
      for (int channel = 0; channel < 2; ++channel) {
        auto& points = reinterpret_cast<float (&)[kAlpha][kAlpha]>(value[channel]);
        winograd::TransformInput<m>(rows[channel], points[i]);
      }
    }
  };
  QuantiseRows<kPoints, kPoints>(
      params.rows, &scales, load, transform,
      [&](int32_t tile, int32_t point, float scale) {
        params.v_scale[int64_t{tile} * kPoints + point] = scale * params.exponent;
      },
      params.v);
}

// u = G g of one vector of taps.
template <int m, int i = 0>
__device__ __forceinline__ void TransformFilter(const float (&g)[kTaps], float (&u)[m + 2]) {
  if constexpr (i < m + 2) {
    u[i] = winograd::Dot<FilterRow<m, i>, kTaps>(g);
    TransformFilter<m, i + 1>(g, u);
  }
}
// y = A^T M.
template <int m, int i = 0>
__device__ __forceinline__ void TransformOutput(const float (&products)[m + 2], float (&y)[m]) {
  if constexpr (i < m) {
    y[i] = winograd::Dot<OutputRow<m, i>, m + 2>(products);
    TransformOutput<m, i + 1>(products, y);
  }
}

template <class Tag, int m>
__global__ void __launch_bounds__(kMaxLanes<m>, 1)
    FilterTransformKernel(const __grid_constant__ FilterParams params) {
  constexpr int kAlpha = m + 2, kPoints = kAlpha * kAlpha;
  __shared__ RowScales<kPoints> scales;
  constexpr int kWords = kTaps * kTaps;
  auto load = [&](int32_t row, int32_t word, uint32_t (&words)[kWords]) {
    const int8_t* const from = params.w + int64_t{row} * params.row_stride +
                               word / 8 * params.block_stride + word % 8 * kWordChannels;
#pragma unroll
    for (int tap = 0; tap < kWords; ++tap) {
      words[tap] = __ldg(reinterpret_cast<const uint32_t*>(from + tap * params.tap_stride));
    }
  };
  auto transform = [](const uint32_t (&words)[kWords], int c, float (&value)[2][kPoints]) {
#pragma unroll
    for (int channel = 0; channel < 2; ++channel) {
      float rows[kAlpha][kTaps];
#pragma unroll
      for (int s = 0; s < kTaps; ++s) {
        const float column[kTaps] = {ByteOf(words[s], c + channel),
                                     ByteOf(words[kTaps + s], c + channel),
                                     ByteOf(words[2 * kTaps + s], c + channel)};
        float transformed[kAlpha];
        TransformFilter<m>(column, transformed);
#pragma unroll
        for (int i = 0; i < kAlpha; ++i) rows[i][s] = transformed[i];
      }
      auto& tile = reinterpret_cast<float (&)[kAlpha][kAlpha]>(value[channel]);
#pragma unroll
      for (int i = 0; i < kAlpha; ++i) TransformFilter<m>(rows[i], tile[i]);
    }
  };
  QuantiseRows<kPoints, kWords>(
      params.rows, &scales, load, transform,
      [&](int32_t row, int32_t point, float scale) {
        params.u_scale[int64_t{point} * params.rows.rows + row] = scale * params.exponent;
      },
      params.u);
}

inline constexpr int kOutputThreads = 128;

template <class Tag, int m>
__global__ void __launch_bounds__(kOutputThreads, m == 2 ? 8 : 4)
    OutputTransformKernel(const __grid_constant__ OutputParams params) {
  constexpr int kAlpha = m + 2, kPoints = kAlpha * kAlpha;
  __shared__ __align__(16) int32_t sums[kOutputThreads * 2 * m * m];  // [tile][pixel][channel]
  const int32_t channels = params.block_channels, first_channel = blockIdx.y * channels;
  const int32_t tiles_of_cta = 2 * kOutputThreads / channels;
  const int32_t first_tile = blockIdx.x * tiles_of_cta;
  {
    const int32_t slot = threadIdx.x / (channels / 2), pair = threadIdx.x % (channels / 2);
    const int32_t tile = min(first_tile + slot, params.tiles - 1);
    const __half* const from = static_cast<const __half*>(params.m) +
                               int64_t{tile} * params.columns + first_channel + 2 * pair;
    const auto* const scales =
        reinterpret_cast<const float4*>(params.v_scale + int64_t{tile} * kPoints);
    uint32_t words[kPoints];
#pragma unroll
    for (int p = 0; p < kPoints; ++p) {
      words[p] = __ldg(reinterpret_cast<const uint32_t*>(from + p * params.m_point));
    }
    float low[kAlpha][kAlpha], high[kAlpha][kAlpha];
#pragma unroll
    for (int p = 0; p < kPoints; p += 4) {
      const float4 quad = __ldg(scales + p / 4);
      const float scale[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
      for (int q = p; q < p + 4; ++q) {
        __half2 both;
        memcpy(&both, &words[q], sizeof(both));
        const float2 product = __half22float2(both);
        low[q / kAlpha][q % kAlpha] = product.x * scale[q - p];
        high[q / kAlpha][q % kAlpha] = product.y * scale[q - p];
      }
    }
    float rows[2][m][kAlpha];
#pragma unroll
    for (int j = 0; j < kAlpha; ++j) {
      float column[2][kAlpha], transformed[2][m];
#pragma unroll
      for (int i = 0; i < kAlpha; ++i) column[0][i] = low[i][j], column[1][i] = high[i][j];
      TransformOutput<m>(column[0], transformed[0]);
      TransformOutput<m>(column[1], transformed[1]);
#pragma unroll
      for (int i = 0; i < m; ++i)
        rows[0][i][j] = transformed[0][i], rows[1][i][j] = transformed[1][i];
    }
    int32_t* to = sums + slot * m * m * channels + 2 * pair;
#pragma unroll
    for (int i = 0; i < m; ++i) {
      float y[2][m];
      TransformOutput<m>(rows[0][i], y[0]);
      TransformOutput<m>(rows[1][i], y[1]);
#pragma unroll
      for (int j = 0; j < m; ++j) {
        *reinterpret_cast<int2*>(to) = make_int2(__float2int_rn(y[0][j]), __float2int_rn(y[1][j]));
        to += channels;
      }
    }
  }
  __syncthreads();

  constexpr int kPixels = m * m / 4;
  const int32_t octets = channels / 8, octet = threadIdx.x % octets;
  const int32_t step = kOutputThreads / octets;  // pixels of all threads at once
  OutputPixel pixels[kPixels];
  int32_t own[kPixels][8];
#pragma unroll
  for (int q = 0; q < kPixels; ++q) {
    const int32_t index = threadIdx.x / octets + q * step;  // among the CTA's pixels, tile by tile
    const int32_t tile_index = first_tile + index / (m * m), pixel = index % (m * m);
    const Tile tile(params.tiles_h, params.tiles_w, tile_index);
    const int32_t h = tile.row * m + pixel / m, w = tile.column * m + pixel % m;
    const bool inside = tile_index < params.tiles && h < params.out_h && w < params.out_w;
    pixels[q] =
        OutputPixel(params.requantize, (tile.image * params.out_h + h) * params.out_w + w, inside);
    const auto* const from = reinterpret_cast<const int4*>(sums + index * channels + octet * 8);
    const int4 quads[2] = {from[0], from[1]};
    memcpy(own[q], quads, sizeof(quads));
  }
  const int32_t channel = first_channel + octet * 8;
  ForRequantizePath(params.requantize, [&](auto path) {
    constexpr RequantizePath kPath = decltype(path)::value;
    Residual<kPixels> residual{};
    if constexpr (HasResidual(kPath)) {
      LoadResidual(params.requantize, pixels, channel, true, &residual);
    }
    RequantizeEight<kPath>(params.requantize, pixels, channel, true, GlobalTerms{params.requantize},
                           residual, [&](int i, int e) { return own[i][e]; });
  });
}

}  // namespace jaxconv::winograd_int8

#endif  // JAXCONV_CUDA_WINOGRAD_INT8_TRANSFORMS_CUH_
