// The parameters of batched_gemm_pingpong_sm90.cuh. Plain data, made on the host without CUDA
// headers.
#ifndef JAXCONV_CUDA_WINOGRAD_PINGPONG_GEMM_PARAMS_H_
#define JAXCONV_CUDA_WINOGRAD_PINGPONG_GEMM_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {

// CTAs of a cluster, and rows of V (and M) of a CTA's tile.
inline constexpr int kPingpongGemmCtas = 2, kPingpongGemmRows = 128;

// How cluster tiles, pairs of 128 x tile_cols, cover rows x cols of M.
struct PingpongGemmTiles {
  // Whether the CTAs of a cluster have different rows and the same columns; otherwise the reverse.
  bool pairs_rows;
  int64_t m_tiles, n_tiles;

  PingpongGemmTiles(int64_t rows, int64_t cols, int64_t tile_cols) {
    auto blocks = [](int64_t extent, int64_t block) { return (extent + block - 1) / block; };
    const int64_t of_m = blocks(rows, kPingpongGemmRows), of_n = blocks(cols, tile_cols);
    pairs_rows = blocks(of_m, kPingpongGemmCtas) * of_n <= of_m * blocks(of_n, kPingpongGemmCtas);
    m_tiles = pairs_rows ? blocks(of_m, kPingpongGemmCtas) : of_m;
    n_tiles = pairs_rows ? of_n : blocks(of_n, kPingpongGemmCtas);
  }
};

struct PingpongGemmParams {
  float* m = nullptr;
  void* half_m = nullptr;  // M in float16, times half_scale
  float half_scale = 1.0f;
  ScaleSource input_scale, filter_scale;  // and the remainders of these scales
  int32_t rows = 0, cols = 0;             // of a group's GEMM
  int32_t tile_cols = 0;                  // columns of a CTA's tile
  int32_t k_blocks = 0;
  int32_t m_row = 0;    // elements: the channels of all groups
  int64_t m_point = 0;  // elements from a point to the next
  int32_t pairs_rows = 0;
  // Digits of a cluster tile's index, fastest first; the quotient is the point.
  FastDivmod n_tiles, m_tiles, groups;
  int32_t tiles = 0;
};

// A CTA's tile of M.
struct PingpongGemmPlace {
  int32_t row, col, group, point;

  JAXCONV_HOST_DEVICE PingpongGemmPlace(const PingpongGemmParams& params, int32_t index,
                                        int32_t rank) {
    params.n_tiles.Divmod(index, &index, &col);
    params.m_tiles.Divmod(index, &index, &row);
    params.groups.Divmod(index, &point, &group);
    if (params.pairs_rows) {
      row = row * kPingpongGemmCtas + rank;
    } else {
      col = col * kPingpongGemmCtas + rank;
    }
    row *= kPingpongGemmRows;
    col *= params.tile_cols;
  }
};

inline PingpongGemmParams MakePingpongGemmParams(const Products& products, int32_t tile_cols) {
  const Geometry& g = products.geometry;
  const PingpongGemmTiles tiles(products.tiles, g.cols, tile_cols);
  PingpongGemmParams params;
  params.tile_cols = tile_cols;
  params.m = products.m;
  params.half_m = products.half_m;
  params.half_scale = products.half_scale;
  params.input_scale = products.input_scale;
  params.filter_scale = products.filter_scale;
  params.rows = products.tiles;
  params.cols = g.cols;
  params.k_blocks = (g.red + 63) / 64;
  params.m_row = g.out_channels();
  params.m_point = products.m_point;
  params.pairs_rows = tiles.pairs_rows;
  params.n_tiles = FastDivmod(tiles.n_tiles);
  params.m_tiles = FastDivmod(tiles.m_tiles);
  params.groups = FastDivmod(g.groups);
  params.tiles =
      static_cast<int32_t>(tiles.n_tiles * tiles.m_tiles * g.groups * int64_t{products.points});
  return params;
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_PINGPONG_GEMM_PARAMS_H_
