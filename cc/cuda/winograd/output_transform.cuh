// Y = A^T M A: transforms the sums of the Winograd domain to the output's tiles.
//
// A thread has two neighbouring channels of one tile: (m + 2)^2 loads of 8 bytes, a column of
// points at a time, and m^2 stores of 4 bytes (8 of a float32 output). Lanes run along channels, so
// a warp reads 256 bytes and writes lines of 128. Bound by the bytes of M: 4 (m + 2)^2 for each
// channel of a tile, plus 2 m^2 of output; the arithmetic takes a fifth of the issue slots in that
// time. M in float16 has half the bytes; its loads of 4 bytes are all issued before the first
// column, so that as many bytes are in flight.
//
// The inverses of the operands' powers of two follow as two factors, the smaller one first
// (amax.cuh); float16 products are first multiplied by their own power of two. Pixels outside the
// output are not stored. No shared memory, no barrier.
#ifndef JAXCONV_CUDA_WINOGRAD_OUTPUT_TRANSFORM_CUH_
#define JAXCONV_CUDA_WINOGRAD_OUTPUT_TRANSFORM_CUH_

#include "cuda/common/winograd_transform.cuh"
#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/winograd/amax.cuh"
#include "cuda/winograd/element_pair.cuh"
#include "cuda/winograd/params.h"

namespace jaxconv::winograd {

struct OutputTransformParams {
  Geometry geometry;
  ScaleSource input_scale, filter_scale;
  const void* m = nullptr;
  float m_scale = 1.0f;  // M in float16: undoes the scale of the products
  void* y = nullptr;
  int64_t m_point = 0;  // elements from a point to the next
  int32_t first_tile = 0, tiles = 0;
  FastDivmod pairs,
      channel_blocks;  // pairs of channels in a block; a tile's blocks are neighbouring CTAs
};

inline constexpr int kOutputThreads = 64;

// Product: the element of M, float or __half.
template <int m, typename Out, typename Product, bool kOverlaps>
__global__ void __launch_bounds__(kOutputThreads, m == 6 ? 6 : 8)
    OutputTransformKernel(const __grid_constant__ OutputTransformParams params) {
  constexpr int kAlpha = m + 2;
  const Geometry& g = params.geometry;
  if constexpr (kOverlaps) {
    WaitForPrecedingGrids();
    LetNextGridStart();
  }
  const Unscale unscale(WarpScale(params.input_scale), WarpScale(params.filter_scale));
  int32_t tile, pair, tiles_block, channel_block;
  params.channel_blocks.Divmod(blockIdx.x, &tiles_block, &channel_block);
  params.pairs.Divmod(tiles_block * kOutputThreads + threadIdx.x, &tile, &pair);
  const int32_t channel = 2 * (channel_block * static_cast<int32_t>(params.pairs.divisor) + pair);
  const int32_t channels = g.out_channels();
  if (tile >= params.tiles || channel >= channels) return;

  constexpr bool kHalf = std::is_same_v<Product, __half>;
  const Product* from = static_cast<const Product*>(params.m) + int64_t{tile} * channels + channel;
  uint32_t pairs[kHalf ? kAlpha * kAlpha : 1];
  if constexpr (kHalf) {
#pragma unroll
    for (int point = 0; point < kAlpha * kAlpha; ++point) {
      pairs[point] = __ldg(reinterpret_cast<const uint32_t*>(from + point * params.m_point));
    }
  }
  float low[m][kAlpha], high[m][kAlpha];
#pragma unroll
  for (int j = 0; j < kAlpha; ++j) {
    float column[2][kAlpha], transformed[2][m];
#pragma unroll
    for (int i = 0; i < kAlpha; ++i) {
      const int point = i * kAlpha + j;
      if constexpr (kHalf) {
        column[0][i] = ElementOfPair<__half, 0>(pairs[point]);
        column[1][i] = ElementOfPair<__half, 1>(pairs[point]);
      } else {
        const float2 both = __ldg(reinterpret_cast<const float2*>(from + point * params.m_point));
        column[0][i] = both.x;
        column[1][i] = both.y;
      }
    }
    TransformOutput<m>(column[0], transformed[0]);
    TransformOutput<m>(column[1], transformed[1]);
#pragma unroll
    for (int i = 0; i < m; ++i) {
      low[i][j] = transformed[0][i];
      high[i][j] = transformed[1][i];
    }
  }
  const TilePlace place = g.Place(params.first_tile + tile);
  const int32_t h = place.row * m, w = place.column * m;
  Out* to = static_cast<Out*>(params.y) +
            ((int64_t{place.image} * g.out_h + h) * g.out_w + w) * channels + channel;
#pragma unroll
  for (int i = 0; i < m; ++i) {
    float first[m], second[m];
    TransformOutput<m>(low[i], first);
    TransformOutput<m>(high[i], second);
#pragma unroll
    for (int j = 0; j < m; ++j) {
      if (h + i < g.out_h && w + j < g.out_w) {
        if constexpr (kHalf) {
          first[j] *= params.m_scale;
          second[j] *= params.m_scale;
        }
        StorePairTo(to + j * channels, unscale(first[j]), unscale(second[j]));
      }
    }
    to += int64_t{g.out_w} * channels;
  }
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_OUTPUT_TRANSFORM_CUH_
