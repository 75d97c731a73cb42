// The products of the Winograd domain in sync_free.cuh and elementwise.cuh:
//
//     M[point][tile][group * cols + column] = sum over r of V[point][tile][group * reduction + r]
//                                                           U[point][group * cols + column][r]
#ifndef JAXCONV_CUDA_WINOGRAD_PRODUCTS_PARAMS_H_
#define JAXCONV_CUDA_WINOGRAD_PRODUCTS_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {

struct ProductsParams {
  const void* v = nullptr;  // float16
  const void* u = nullptr;  // float16
  float* m = nullptr;
  int32_t tiles = 0;                              // rows of V and M
  int32_t reduction = 0, cols = 0;                // of a group
  int32_t v_row = 0, m_row = 0;                   // elements: the channels of all groups
  int64_t v_point = 0, u_point = 0, m_point = 0;  // elements from a point to the next
  // CTAs: blocks of columns within a group fastest, then groups, then blocks of tiles.
  FastDivmod column_blocks, groups;
  int64_t ctas = 0;
};

// The parameters of a chunk, for CTAs of tile_m tiles and tile_n columns at all points.
inline ProductsParams DescribeProducts(const Products& products, int tile_m, int tile_n) {
  const Geometry& g = products.geometry;
  ProductsParams params;
  params.v = products.v;
  params.u = products.u;
  params.m = products.m;
  params.tiles = products.tiles;
  params.reduction = g.red;
  params.cols = g.cols;
  params.v_row = g.in_channels();
  params.m_row = g.out_channels();
  params.v_point = products.v_point;
  params.u_point = products.u_point;
  params.m_point = products.m_point;
  const int64_t column_blocks = (g.cols + tile_n - 1) / tile_n;
  params.column_blocks = FastDivmod(column_blocks);
  params.groups = FastDivmod(g.groups);
  params.ctas = column_blocks * g.groups * ((products.tiles + tile_m - 1) / tile_m);
  return params;
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_PRODUCTS_PARAMS_H_
