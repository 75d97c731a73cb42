// The parameters of winograd_int8. Plain data, made on the host without CUDA headers.
//
// Tiles of m x m outputs are counted along W, then H, then images. Tiles at the lower and right
// edge may reach past the output: inputs outside the image are zeros, outputs outside are not
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
// The products: rows of V, and columns, in a CTA's tile; channels in a stage.
inline constexpr int kProductsRows = 128, kProductsChannels = 128;
// CTAs of a cluster, with neighbouring rows and the same columns.
inline constexpr int kProductsCtas = 2;
// Channels of a thread in the transforms to V and U: a word of int8.
inline constexpr int kWordChannels = 4;
// The most threads that share a row of channels; a thread holds its channels' points in registers.
template <int m>
inline constexpr int kMaxLanes = m == 2 ? 512 : 320;
// The threads of a CTA with shorter rows. A row has at least 32 channels, hence eight lanes.
inline constexpr int kShortRowThreads = 128, kMaxRows = kShortRowThreads / 8;

// The assignment of rows of channels to a CTA's threads; a row is quantised as a whole at each
// point.
struct Rows {
  int32_t rows = 0;   // of all CTAs
  int32_t words = 0;  // of a row
  int32_t rows_of_cta = 1;
  int32_t passes = 1;           // of a CTA over its rows
  FastDivmod lanes;             // threads of a row
  float unit[kMaxPoints] = {};  // the smallest scale of a point; with it nothing is rounded

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
  float exponent = 1.0f;  // 2^exponent, a factor of v_scale
  int32_t channels = 0;
  int32_t in_h = 0, in_w = 0, pad_h = 0, pad_w = 0;
  FastDivmod tiles_h, tiles_w;
  // Strides of x in elements: to the next pixel, to the next 32 channels, to the next image.
  int32_t pixel_stride = 0;
  int64_t block_stride = 0, image_stride = 0;
};

struct FilterParams {
  Rows rows;
  const int8_t* w = nullptr;
  int8_t* u = nullptr;
  float* u_scale = nullptr;
  float exponent = 1.0f;  // 2^-exponent, a factor of u_scale
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
