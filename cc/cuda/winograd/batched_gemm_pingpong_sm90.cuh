// The products of the Winograd domain on wgmma, persistent, with U or V shared by the two CTAs of a
// cluster (sm_90a):
//
//     M[point][tile, k] = sum over c of V[point][tile, c] U[point][k, c]     for each group
//
// A CTA computes 128 rows (tiles) by 128 or 160 columns of M at a time, with C in blocks of 64, in
// pingpong (common/turns_gemm_sm90.cuh): M has 4 bytes for every C multiply-adds, so one consumer
// stores while the other multiplies. Columns are the fastest digit of a tile's index, then rows,
// groups and points. The tiles in flight therefore belong to few points, whose U and V are read
// from DRAM once.
//
// A tile of 128x128 needs 64 bytes for every cycle of the tensor cores; L2 delivers to an SM about
// 45. The CTAs of a cluster therefore have neighbouring tiles that share one operand, the columns
//     of U or
// the rows of V (whichever pairing leaves fewer unpaired tiles). Each CTA loads its part of the
// other operand and multicasts half of the shared one: 48 bytes a cycle, with 160 columns 42.
//
// A stage is 128 rows of V and 128 or 160 of U by 64 channels, 32 or 36 KB, both K-major with the
// swizzle of 128 bytes. TMA fills in zeros past the last tile and the end of the reduction, so a
// CTA past the last tile multiplies zeros. Past a group's last output channel it reads rows of U of
// the next group or point; those columns are not stored. Shared memory: 6 stages, 192 or 216 KB.
// Registers of a consumer: 128 or 160 accumulators.
//
// Accumulators go to M from registers. A lane has two neighbouring columns of every eight, so TMA
// loads sixteen rows of U in the order 0 1 4 5 8 9 12 13, 2 3 6 7 10 11 14 15. A lane then stores
// 16 bytes and four lanes a run of 64 bytes; M in float16 takes half, which is a sector. (With an
// exchange between lanes instead, the compiler serialises wgmma.) Refused: output channels of a
// group that are no multiple of 16.
#ifndef JAXCONV_CUDA_WINOGRAD_BATCHED_GEMM_PINGPONG_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_BATCHED_GEMM_PINGPONG_SM90_CUH_

#include <cuda.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/status.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/common/turns_gemm_sm90.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"
#include "cuda/winograd/amax.cuh"
#include "cuda/winograd/pingpong_gemm_params.h"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {

template <int kTileCols>
struct PingpongGemmTile {
  static constexpr int kRows = kPingpongGemmRows, kTileK = 64;  // rows of V
  static constexpr int kCols = kTileCols;                       // rows of U
  static constexpr int kThreads = 3 * 128;
  static constexpr int kStages = 6, kFilterSlots = 0, kStationary = 0;
  static constexpr int kBytesOfV = kRows * kTileK * 2, kBytesOfU = kCols * kTileK * 2;
  static constexpr int kStageBytes = kBytesOfV + kBytesOfU;
  // 1024 more to align the ring.
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;
};

// Boxes of the CTA's own operand hold all its rows; boxes of the operand that the cluster shares
// hold half of them.
struct PingpongGemmMaps {
  // V: (c, tile, group, point, 1). U: (c, 2 rows, 4 steps of 4 rows, 2 steps of 2, 16 rows of all).
  CUtensorMap own, common;
};

// The start of a box of 64 channels, without the channel coordinate.
struct PingpongGemmBox {
  int32_t at[4];

  PingpongGemmBox() = default;
  __device__ __forceinline__ PingpongGemmBox(const PingpongGemmParams& params,
                                             const PingpongGemmPlace& place, bool of_v,
                                             int32_t further) {
    const int32_t u_row = place.point * params.m_row + place.group * params.cols + place.col;
    at[0] = of_v ? place.row + further : 0;
    at[1] = of_v ? place.group : 0;
    at[2] = of_v ? place.point : 0;
    at[3] = of_v ? 0 : (u_row + further) / 16;
  }
};

// A CTA's loads, for turns_gemm_sm90.cuh.
template <class Tile>
struct PingpongGemmLoads {
  const PingpongGemmParams& params;
  const PingpongGemmMaps& maps;
  const int32_t rank;
  const bool own_is_v;
  const uint32_t own_at, common_at;
  PingpongGemmBox own, common;

  __device__ __forceinline__ PingpongGemmLoads(const PingpongGemmParams& params,
                                               const PingpongGemmMaps& maps, int32_t rank,
                                               uint32_t ring)
      : params(params),
        maps(maps),
        rank(rank),
        own_is_v(params.pairs_rows),
        own_at(ring + (own_is_v ? 0 : Tile::kBytesOfV)),
        common_at(ring + (own_is_v ? Tile::kBytesOfV : 0) +
                  rank * (own_is_v ? Tile::kBytesOfU : Tile::kBytesOfV) / kPingpongGemmCtas) {}

  __device__ __forceinline__ void Begin(int32_t tile) {
    const PingpongGemmPlace place(params, tile, rank);
    const int32_t half_rows = (own_is_v ? Tile::kCols : Tile::kRows) / kPingpongGemmCtas;
    own = PingpongGemmBox(params, place, own_is_v, 0);
    common = PingpongGemmBox(params, place, !own_is_v, rank * half_rows);
  }
  __device__ __forceinline__ void Load(int32_t k_block, uint32_t at, uint32_t barrier) const {
    const int32_t channel = k_block * Tile::kTileK;
    CopyTile5d(own_at + at, &maps.own, barrier, channel, own.at[0], own.at[1], own.at[2],
               own.at[3]);
    CopyTile5dToCluster(common_at + at, &maps.common, barrier, channel, common.at[0], common.at[1],
                        common.at[2], common.at[3], (1 << kPingpongGemmCtas) - 1);
  }
};

// Stores the accumulators of 64 rows to M; `row`: the lane's first row. Product: the element of M,
// float or __half.
template <int kCols, typename Product>
__device__ __forceinline__ void StoreProducts(const PingpongGemmParams& params,
                                              const PingpongGemmPlace& place, int32_t row,
                                              const float (&acc)[kCols / 2], float scale) {
  constexpr bool kHalf = std::is_same_v<Product, __half>;
  const int32_t col = place.col + Lane() % 4 * 4;
  Product* to;
  if constexpr (kHalf) {
    to = static_cast<Product*>(params.half_m);
  } else {
    to = params.m;
  }
  to +=
      place.point * params.m_point + int64_t{row} * params.m_row + place.group * params.cols + col;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool inside = row + half * 8 < params.rows;
#pragma unroll
    for (int j = 0; j < kCols / 8; j += 2) {
      const float* first = &acc[4 * j + 2 * half];
      if (!inside || col + j * 8 >= params.cols) continue;
      if constexpr (kHalf) {
        const __half2 quad[2] = {__floats2half2_rn(first[0] * scale, first[1] * scale),
                                 __floats2half2_rn(first[4] * scale, first[5] * scale)};
        uint2 words;
        memcpy(&words, quad, sizeof(words));
        *reinterpret_cast<uint2*>(to + j * 8) = words;
      } else {
        const float4 quad = make_float4(first[0], first[1], first[4], first[5]);
        *reinterpret_cast<float4*>(to + j * 8) = quad;
      }
    }
    to += int64_t{8} * params.m_row;
  }
}

template <typename Product, class TileOf>
struct PingpongGemm {
  using Tile = TileOf;
  using Params = PingpongGemmParams;
  using Maps = PingpongGemmMaps;
  using Loads = PingpongGemmLoads<Tile>;
  using Sums = float[2][Tile::kCols / 2];

  __device__ static __forceinline__ void Prefetch(const Maps& maps) {
    PrefetchTensorMap(&maps.own);
    PrefetchTensorMap(&maps.common);
  }
  __device__ static __forceinline__ void Multiply(Sums& sums, uint32_t v, bool accumulate) {
    const uint64_t a[2] = {KMajorDescriptor(v), KMajorDescriptor(v + 64 * 128)};
    const uint64_t b = KMajorDescriptor(v + Tile::kBytesOfV);
#pragma unroll
    for (int k = 0; k < Tile::kTileK / 16; ++k) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        Wgmma<Tile::kCols, __half, false, false>(sums[block], a[block] + k * 2, b + k * 2,
                                                 accumulate || k > 0);
      }
    }
  }

  struct Stores {
    const Params& params;
    float scale = 1.0f;  // of M

    __device__ __forceinline__ explicit Stores(const Params& params) : params(params) {
      if constexpr (std::is_same_v<Product, __half>) {
        scale = params.half_scale * RemainingScale(params.input_scale) *
                RemainingScale(params.filter_scale);
      }
    }
    __device__ __forceinline__ void Store(int32_t tile, int32_t rank, const Sums& sums) const {
      const PingpongGemmPlace place(params, tile, rank);
      const int32_t row = place.row + threadIdx.x / 32 % 4 * 16 + Lane() / 4;
      StoreProducts<Tile::kCols, Product>(params, place, row, sums[0], scale);
      StoreProducts<Tile::kCols, Product>(params, place, row + 64, sums[1], scale);
    }
  };
};

template <class Tag, typename Product, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    PingpongGemmKernel(const __grid_constant__ PingpongGemmParams params,
                       const __grid_constant__ PingpongGemmMaps maps) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[Barriers<Tile>::kCount];
  RunTurnsGemm<PingpongGemm<Product, Tile>, /*kWaits=*/true>(params, maps, dynamic, barrier_words);
}

template <class Tile>
Status EncodePingpongGemmMaps(const Products& products, const PingpongGemmParams& params,
                              PingpongGemmMaps* maps) {
  const Geometry& g = products.geometry;
  const int64_t red = g.red;
  const DenseTensor v = {DType::kF16,
                         5,
                         products.v,
                         {red, products.tiles, g.groups, products.points, 1},
                         {1, g.in_channels(), red, products.v_point, products.v_point}};
  const int64_t sixteens = int64_t{products.points} * g.out_channels() / 16;
  const DenseTensor u = {
      DType::kF16, 5, products.u, {red, 2, 4, 2, sixteens}, {1, red, 4 * red, 2 * red, 16 * red}};
  // `ctas`: the CTAs that share the operand.
  auto encode = [&](bool of_v, int32_t ctas, CUtensorMap* map) {
    const int32_t rows = (of_v ? Tile::kRows : Tile::kCols) / ctas;
    const int32_t v_box[5] = {Tile::kTileK, rows, 1, 1, 1};
    const int32_t u_box[5] = {Tile::kTileK, 2, 4, 2, rows / 16};
    return of_v ? EncodeTiledMap(v, v_box, map) : EncodeTiledMap(u, u_box, map);
  };
  JAXCONV_RETURN_IF_ERROR(encode(params.pairs_rows, 1, &maps->own));
  return encode(!params.pairs_rows, kPingpongGemmCtas, &maps->common);
}

// Enqueues the products of a chunk on at most `ctas` CTAs.
template <class Tag, typename Product, int kTileCols>
Status LaunchPingpongGemm(const char* name, const Products& products, int32_t ctas, void* stream) {
  using Tile = PingpongGemmTile<kTileCols>;
  const PingpongGemmParams params = MakePingpongGemmParams(products, kTileCols);
  PingpongGemmMaps maps;
  JAXCONV_RETURN_IF_ERROR(EncodePingpongGemmMaps<Tile>(products, params, &maps));
  LaunchConfig config;
  const int32_t clusters = std::min(params.tiles, std::max(1, ctas / kPingpongGemmCtas));
  config.grid = static_cast<unsigned>(clusters * kPingpongGemmCtas);
  config.threads = Tile::kThreads;
  config.shared_bytes = Tile::kSharedBytes;
  config.cluster = kPingpongGemmCtas;
  config.overlaps = true;
  return Launch<PingpongGemmKernel<Tag, Product, Tile>>(name, config, stream, params, maps);
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_BATCHED_GEMM_PINGPONG_SM90_CUH_
