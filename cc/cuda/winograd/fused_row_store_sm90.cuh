// The output of a tile of the fused row kernel: the warpgroups exchange points, transform and store
// (sm_90a).
#ifndef JAXCONV_CUDA_WINOGRAD_FUSED_ROW_STORE_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_FUSED_ROW_STORE_SM90_CUH_

#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "cuda/common/element.cuh"
#include "cuda/common/winograd_transform.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/winograd/amax.cuh"
#include "cuda/winograd/fused_row_mainloop_sm90.cuh"

namespace jaxconv::winograd {

// The destination of a thread's row of the tile: the output offset of the first of m pixels, and
// the number of pixels that exist.
struct RowTarget {
  int64_t offset;
  int32_t pixels;

  __device__ __forceinline__ RowTarget(const RowParams& params, int32_t position, int m) {
    const RowPosition at(params, position);
    const int32_t q = at.tile * m;
    pixels = at.image < params.images ? min(m, params.width - q) : 0;
    offset = ((int64_t{at.image} * params.rows.divisor + at.row) * params.width + q) *
             params.out_channels;
  }
};

// Divides by the operands' scales; float16 operands and filters prepared from float16 have none.
template <typename T>
struct RowUnscale : Unscale {
  using Unscale::Unscale;
};
template <>
struct RowUnscale<__half> {
  __device__ __forceinline__ RowUnscale(float, float) {}
  __device__ __forceinline__ float operator()(float result) const { return result; }
};

// Transforms eight of a thread's columns in one of its rows, all points, to m output pixels. The
// warpgroup's own accumulators are sums.point[p][first + 4 j + e]; the other warpgroup's lie in
// shared memory, 16 bytes for every two j.
template <typename Out, typename T, class Tile, int kWarpgroup>
__device__ __forceinline__ void StoreColumns(const RowParams& params, const RowSums<Tile>& sums,
                                             int first, uint32_t others, const RowTarget& target,
                                             int32_t channel, const RowUnscale<T>& unscale) {
  constexpr int m = Tile::m, kOwn = Tile::kOwnPoints;
  constexpr int kStorePairs = 8 / sizeof(Out);  // pairs of columns in a store of 16 bytes
  Out* const out = static_cast<Out*>(params.out) + target.offset + channel;
  uint32_t word[m][4];
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    float other[kOwn][4];
#pragma unroll
    for (int p = 0; p < kOwn; ++p) LoadShared<0>(others + (p * 4 + j / 2) * 2048, other[p]);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      float y[2][m];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float products[m + 2];
#pragma unroll
        for (int p = 0; p < kOwn; ++p) {
          const float own = sums.point[p][first + (j + pair) * 4 + e];
          products[p] = kWarpgroup == 0 ? own : other[p][pair * 2 + e];
          products[kOwn + p] = kWarpgroup == 0 ? other[p][pair * 2 + e] : own;
        }
        TransformOutput<m>(products, y[e]);
      }
#pragma unroll
      for (int i = 0; i < m; ++i) {
        const float even = unscale(y[0][i]), odd = unscale(y[1][i]);
        if constexpr (sizeof(Out) == 2) {
          word[i][j + pair] = PackPair<Out>(even, odd);
        } else {
          word[i][2 * pair] = __float_as_uint(even);
          word[i][2 * pair + 1] = __float_as_uint(odd);
        }
      }
    }
    if ((j + 2) % kStorePairs != 0) continue;
    Out* pixel = out + 2 * (j + 2 - kStorePairs);
#pragma unroll
    for (int i = 0; i < m; ++i) {
      if (i >= target.pixels) break;
      uint4 chunk;
      memcpy(&chunk, word[i], sizeof(chunk));
      *reinterpret_cast<uint4*>(pixel) = chunk;
      pixel += params.out_channels;
    }
  }
}

// The warpgroups exchange accumulators, 32 columns at a time: warpgroup 0 finishes columns 0 to 63,
// warpgroup 1 the others. `staging`: a slot of the filter that both have read.
template <typename T, class Tile, int kWarpgroup>
__device__ __forceinline__ void StoreRowTile(const RowParams& params, const RowTilePlace& place,
                                             const RowSums<Tile>& sums, uint32_t staging,
                                             const RowUnscale<T>& unscale) {
  constexpr uint32_t kHalf = Tile::kSlotBytes / 2;
  const int lane = Lane(), warp = threadIdx.x / 32 % 4;
  const uint32_t mine = staging + kWarpgroup * kHalf + (warp * 32 + lane) * 16;
  const uint32_t others = staging + (1 - kWarpgroup) * kHalf + (warp * 32 + lane) * 16;
#pragma unroll
  for (int round = 0; round < 2; ++round) {
    NamedBarrierSync(1, 256);  // all threads have read the slot, or the previous round's data
    const int given = (1 - kWarpgroup) * 2 + round, kept = kWarpgroup * 2 + round;
#pragma unroll
    for (int p = 0; p < Tile::kOwnPoints; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // row half i / 2, pairs of columns 2 (i % 2) and 2 (i % 2) + 1
        const float* from = &sums.point[p][given * 16 + i % 2 * 8 + i / 2 * 2];
        StoreShared(mine + (p * 4 + i) * 2048, {from[0], from[1], from[4], from[5]});
      }
    }
    NamedBarrierSync(1, 256);
    const int32_t column = place.n_tile * int32_t{RowFilter::kColumns} + kept * 32 + lane % 4 * 8;
    const int32_t channel = place.group * params.columns + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowTarget target(params, place.m_tile * kRowTilePositions + warp * 16 + lane / 4 + half * 8,
                       Tile::m);
      if (column >= params.columns) target.pixels = 0;
      const int first = kept * 16 + half * 2;
      if (params.out_is_f32) {
        StoreColumns<float, T, Tile, kWarpgroup>(params, sums, first, others + half * 4096, target,
                                                 channel, unscale);
      } else {
        StoreColumns<T, T, Tile, kWarpgroup>(params, sums, first, others + half * 4096, target,
                                             channel, unscale);
      }
    }
  }
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FUSED_ROW_STORE_SM90_CUH_
