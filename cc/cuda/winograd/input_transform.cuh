// V = B^T d B: transforms the input's tiles, which overlap by two, to float16 in the Winograd
// domain.
//
// A thread has two neighbouring channels of one tile: (m + 2)^2 loads of 4 bytes, all in flight at
// once, both transforms in float32, one rounding, (m + 2)^2 stores of 4 bytes. Lanes run along
// channels, warps along tiles: from 64 channels on, a warp accesses one line of 128 bytes, and a
// CTA has neighbouring tiles of 64 channels, whose common columns L1 serves. 16 bytes a thread
// would be no faster, and the (m + 2)^2 x 8 elements of a tile would not fit in registers.
//
//     m                        2      4      6
//     float32 values           32     72     128     of a thread
//     registers                48     95     168
//     threads of an SM         1024   640    384
//     loads in flight          64     90     96 KB   of an SM
//     instructions             392    1064   1896    of a warp, for 64 channels of a tile
//     issue slots              71     74     69 %    of an H200, in the time of the tile's bytes at 4.3 TB/s
//
// It uses no shared memory and no barrier. Outside the image the input is zero. T: __half,
// __nv_bfloat16, or float with loads of 8 bytes; the latter two are scaled by their power of two
// (amax.cuh) when loaded.
#ifndef JAXCONV_CUDA_WINOGRAD_INPUT_TRANSFORM_CUH_
#define JAXCONV_CUDA_WINOGRAD_INPUT_TRANSFORM_CUH_

#include "cuda/common/winograd_transform.cuh"
#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/winograd/amax.cuh"
#include "cuda/winograd/element_pair.cuh"
#include "cuda/winograd/params.h"

namespace jaxconv::winograd {

struct InputTransformParams {
  Geometry geometry;
  ScaleSource scale;
  const void* x = nullptr;
  uint32_t* maxima = nullptr;  // of measured operands
  __half* v = nullptr;
  int64_t v_point = 0;  // elements from a point to the next
  int32_t first_tile = 0, tiles = 0;
  FastDivmod pairs,
      channel_blocks;  // pairs of channels in a block; a tile's blocks are neighbouring CTAs
  // The previous kernel is the filter's transform, whose results this kernel does not need.
  bool behind_filter = false;
};

inline constexpr int kInputThreads = 128;
template <int m>
inline constexpr int kInputCtas = m == 6   ? 3
                                  : m == 4 ? 5
                                           : 8;  // CTAs of an SM, at least

// The largest finite magnitude of a tile's pairs, as float32 bits: computed on pairs, and again on
// elements if one is infinite. The maximum of a NaN and a number is the number.
template <typename T, int kAlpha>
__device__ __forceinline__ uint32_t LargestFinite(const uint32_t (&pairs)[kAlpha][kAlpha]) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  uint32_t words = 0;
  Pair largest;
  memcpy(&largest, &words, sizeof(largest));
#pragma unroll
  for (int i = 0; i < kAlpha; ++i) {
#pragma unroll
    for (int j = 0; j < kAlpha; ++j) {
      Pair pair;
      memcpy(&pair, &pairs[i][j], sizeof(pair));
      largest = __hmax2(largest, __habs2(pair));
    }
  }
  memcpy(&words, &largest, sizeof(words));
  uint32_t bits = __float_as_uint(fmaxf(ElementOfPair<T, 0>(words), ElementOfPair<T, 1>(words)));
  if (FiniteBits(bits) == bits) return bits;
  bits = 0;
#pragma unroll
  for (int i = 0; i < kAlpha; ++i) {
#pragma unroll
    for (int j = 0; j < kAlpha; ++j) {
      bits = max(bits, FiniteBits(__float_as_uint(ElementOfPair<T, 0>(pairs[i][j]))));
      bits = max(bits, FiniteBits(__float_as_uint(ElementOfPair<T, 1>(pairs[i][j]))));
    }
  }
  return bits;
}

// The work of CTA `block` of the grid. T = __half is not scaled.
template <int m, typename T>
__device__ __forceinline__ void TransformInput(const InputTransformParams& params, int32_t block,
                                               uint32_t* maxima, float scale) {
  constexpr int kAlpha = m + 2;
  const Geometry& g = params.geometry;
  int32_t tile, pair, tiles_block, channel_block;
  params.channel_blocks.Divmod(block, &tiles_block, &channel_block);
  params.pairs.Divmod(tiles_block * kInputThreads + threadIdx.x, &tile, &pair);
  const int32_t channel = 2 * (channel_block * static_cast<int32_t>(params.pairs.divisor) + pair);
  const int32_t channels = g.in_channels();
  const bool inside_v = tile < params.tiles && channel < channels;
  const unsigned lanes = __ballot_sync(0xffffffffu, inside_v);
  if (!inside_v) return;

  const TilePlace place = g.Place(params.first_tile + tile);
  const int32_t h = place.row * m - g.pad_h, w = place.column * m - g.pad_w;
  const T* from = static_cast<const T*>(params.x) +
                  ((int64_t{place.image} * g.in_h + h) * g.in_w + w) * channels + channel;
  PairOf<T> pair_of[kAlpha][kAlpha];
#pragma unroll
  for (int i = 0; i < kAlpha; ++i) {
    const bool row_inside = static_cast<uint32_t>(h + i) < static_cast<uint32_t>(g.in_h);
#pragma unroll
    for (int j = 0; j < kAlpha; ++j) {
      const bool inside =
          row_inside && static_cast<uint32_t>(w + j) < static_cast<uint32_t>(g.in_w);
      pair_of[i][j] = LoadPair(from + j * channels, inside);
    }
    from += int64_t{g.in_w} * channels;
  }
  if constexpr (!std::is_same_v<T, float>) {
    if (maxima != nullptr) TakeMaximum(maxima, lanes, LargestFinite<T>(pair_of));
  }
  float low[kAlpha][kAlpha], high[kAlpha][kAlpha];
#pragma unroll
  for (int i = 0; i < kAlpha; ++i) {
#pragma unroll
    for (int j = 0; j < kAlpha; ++j) {
      low[i][j] = ElementOfPair<T, 0>(pair_of[i][j]);
      high[i][j] = ElementOfPair<T, 1>(pair_of[i][j]);
    }
  }
  if constexpr (!std::is_same_v<T, __half>) {
#pragma unroll
    for (int i = 0; i < kAlpha; ++i) {
#pragma unroll
      for (int j = 0; j < kAlpha; ++j) {
        low[i][j] *= scale;
        high[i][j] *= scale;
      }
    }
  }
  TransformInputTile<m>(low);
  TransformInputTile<m>(high);
  __half* to = params.v + int64_t{tile} * channels + channel;
#pragma unroll
  for (int i = 0; i < kAlpha; ++i) {
#pragma unroll
    for (int j = 0; j < kAlpha; ++j) {
      StorePairTo(to, low[i][j], high[i][j]);
      to += params.v_point;
    }
  }
}

// This kernel runs concurrently with the filter's transform before it; all earlier kernels have
// ended (launch.cuh). At its end it waits for that transform, so that the next kernel may read U.
template <int m, typename T, bool kOverlaps>
__global__ void __launch_bounds__(kInputThreads, kInputCtas<m>)
    InputTransformKernel(const __grid_constant__ InputTransformParams params) {
  if constexpr (kOverlaps) {
    if (!params.behind_filter) WaitForPrecedingGrids();
    LetNextGridStart();
  }
  const bool assumes = params.scale.assumed != 0;
  const float scale = assumes ? params.scale.assumed : WarpScale(params.scale);
  TransformInput<m, T>(params, blockIdx.x, params.maxima, scale);
  if constexpr (kOverlaps) WaitForPrecedingGrids();
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_INPUT_TRANSFORM_CUH_
