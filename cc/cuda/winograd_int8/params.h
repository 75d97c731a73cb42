// What the kernels of winograd_int8 know of a problem. Plain data, made on the host without CUDA
// headers.
//
// Tiles of m x m outputs are counted along W, then H, then images. Those at the lower and right
// edge reach past the output: their inputs outside the image are zeros, their outputs are not
// stored.
//
// In memory, points counted row by row:
//     V        [point][tile][C]     int8
//     v_scale  [tile][point]        float32
//     U        [point][K][C]        int8
//     u_scale  [point][K]           float32, times 2^-exponent
//     M        [point][tile][K]     float16: sums of products times u_scale
#ifndef JAXCONV_CUDA_WINOGRAD_INT8_PARAMS_H_
#define JAXCONV_CUDA_WINOGRAD_INT8_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/common/requantize_params.h"

namespace jaxconv::winograd_int8 {

inline constexpr int kMaxPoints = 36;
// Of the products: rows of V, and columns, of a CTA's tile; channels of a stage.
inline constexpr int kProductsRows = 128, kProductsChannels = 128;
// CTAs of a cluster: they have neighbouring rows and the same columns.
inline constexpr int kProductsCtas = 2;
// Channels of a thread in the transforms to V and U: a word of int8.
inline constexpr int kWordChannels = 4;
// Threads that share a row of channels, at most: a thread holds its channels' points in registers.
template <int m>
inline constexpr int kMaxLanes = m == 2 ? 512 : 320;
// Of a CTA with shorter rows; eight lanes are the 32 channels that a row has at least.
inline constexpr int kShortRowThreads = 128, kMaxRows = kShortRowThreads / 8;

// How a CTA's threads cover rows of channels, which are quantised together at each point.
struct Rows {
  int32_t rows = 0;   // of all CTAs
  int32_t words = 0;  // of a row
  int32_t rows_of_cta = 1;
  int32_t passes = 1;           // of a CTA over its rows
  FastDivmod lanes;             // threads of a row
  float unit[kMaxPoints] = {};  // the smallest scale of a point: below it nothing is rounded

  int32_t threads() const {
    return (rows_of_cta * static_cast<int32_t>(lanes.divisor) + 31) / 32 * 32;
  }
  int32_t ctas() const { return (rows + rows_of_cta - 1) / rows_of_cta; }
};

struct InputParams {
  Rows rows;
  const int8_t* x = nullptr;
  int8_t* v = nullptr;
  float* v_scale = nullptr;
  float exponent = 1.0f;  // 2^exponent, which v_scale is multiplied by
  int32_t channels = 0;
  int32_t in_h = 0, in_w = 0, pad_h = 0, pad_w = 0;
  FastDivmod tiles_h, tiles_w;
  // Of x, in elements: from a pixel to the next, to the next 32 channels, to the next image.
  int32_t pixel_stride = 0;
  int64_t block_stride = 0, image_stride = 0;
};

struct FilterParams {
  Rows rows;
  const int8_t* w = nullptr;
  int8_t* u = nullptr;
  float* u_scale = nullptr;
  float exponent = 1.0f;  // 2^-exponent, which u_scale is multiplied by
  int32_t channels = 0;
  int32_t row_stride = 0;  // of the packed filter, and within a row:
  int32_t tap_stride = 0, block_stride = 0;
};

struct ProductsParams {
  const float* u_scale = nullptr;
  void* m = nullptr;              // float16
  int32_t rows = 0, columns = 0;  // tiles, K
  int32_t points = 0, k_blocks = 0;
  int64_t m_point = 0;          // elements from a point to the next
  int32_t tiles = 0;            // of clusters, for all points
  FastDivmod n_tiles, m_tiles;  // digits of a tile's index, fastest first
};

struct OutputParams {
  RequantizeParams requantize;
  const void* m = nullptr;  // float16
  const float* v_scale = nullptr;
  int32_t tiles = 0, columns = 0;  // K
  int64_t m_point = 0;             // elements from a point to the next
  int32_t out_h = 0, out_w = 0;
  FastDivmod tiles_h, tiles_w;
  int32_t block_channels = 0;  // of a CTA: 64, or 32
};

// The parameter block of a plan.
struct LaunchParams {
  InputParams input;
  FilterParams filter;
  OutputParams output;
  ProductsParams products;
  int32_t products_ctas = 0;
  // Offsets in the workspace.
  int64_t v = 0, v_scale = 0, u = 0, u_scale = 0, m = 0;
};

}  // namespace jaxconv::winograd_int8

#endif  // JAXCONV_CUDA_WINOGRAD_INT8_PARAMS_H_
