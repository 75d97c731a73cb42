// The products of the Winograd domain on wgmma, persistent (sm_90a):
//
//     M[point][tile, k] = float16( u_scale[point][k] * sum over c of V[point][tile, c] U[point][k, c] )
//
// A CTA has 128 x 128 of M at a time. Two consumer warpgroups, each with tiles of its own, alternate on
// the tensor cores: one scales, rounds and stores while the other multiplies. The producer runs ahead
// into the next tile's stages. A tile takes 64 bytes for every cycle of the tensor cores, and L2 gives
// an SM about 45: so the two CTAs of a cluster, which have neighbouring rows, bring half of U each to
// both, 48 bytes a cycle. Cluster c processes tiles c, c + clusters, ...; columns fastest, then rows,
// then points, so that what is under way has few points, whose V and U are read from DRAM once.
//
// A stage is 128 rows of V and of U by 128 channels, 16 KB each, with the swizzle of 128 bytes. TMA
// fills up with zeros where tiles or channels end; past a point's last output channel it reads the
// next point's rows of U, whose columns are not stored. Shared memory: 6 stages, 192 KB. Registers:
// producer 40, consumers 232, of them 128 accumulators.
//
// The box of U brings 32 rows in the order 0 1 8 9 16 17 24 25 2 3 ..., so that a thread, which holds
// columns 8 j + 2 t and the next, has the eight neighbouring channels 8 t .. 8 t + 7 and stores 16 bytes.
//
// Full(s): the producer announces a stage's bytes, its own and those that the other CTA sends. Empty(s):
// one consumer warpgroup of each CTA arrives at both CTAs' when its wgmma has retired, one k-block late
// so that one is always under way. Named barriers 1 and 2 hand the tensor cores over.
#ifndef JAXCONV_CUDA_WINOGRAD_INT8_PRODUCTS_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_INT8_PRODUCTS_SM90_CUH_

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "core/status.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/requantize_words.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/ptx/cluster_sm90.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"
#include "cuda/winograd_int8/params.h"

namespace jaxconv::winograd_int8 {

struct ProductsTile {
  static constexpr int kRows = kProductsRows;  // of V, and of U
  static constexpr int kChannels = kProductsChannels;
  static constexpr int kThreads = 3 * 128;
  static constexpr int kStages = 6, kFilterSlots = 0, kStationary = 0;
  static constexpr int kOperandBytes = kRows * kChannels, kStageBytes = 2 * kOperandBytes;
  // 1024 more to align the ring.
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;
};

struct ProductsMaps {
  CUtensorMap v, u;  // (c, tile, point); (c, 2 rows, 4 steps of 8 rows, 4 steps of 2, 32 rows)
};

// Where a tile of M begins.
struct ProductsPlace {
  int32_t column, row, point;
  __device__ __forceinline__ ProductsPlace(const ProductsParams& params, int32_t index,
                                           int32_t rank) {
    params.n_tiles.Divmod(index, &index, &column);
    params.m_tiles.Divmod(index, &point, &row);
    column *= ProductsTile::kRows;
    row = (row * kProductsCtas + rank) * ProductsTile::kRows;
  }
};

__device__ __forceinline__ void ProduceProducts(const ProductsParams& params,
                                                const ProductsMaps& maps, int32_t rank,
                                                uint32_t ring,
                                                const Barriers<ProductsTile>& barriers) {
  using Tile = ProductsTile;
  RingPlace<Tile::kStages> stage;
  constexpr int kBlocks = Tile::kRows / 32 / kProductsCtas;  // of U, that the CTA brings to all
  const uint32_t u_at = ring + Tile::kOperandBytes + rank * (Tile::kOperandBytes / kProductsCtas);
  const int32_t stride = gridDim.x / kProductsCtas;
  for (int32_t index = ClusterId(); index < params.tiles; index += stride) {
    const ProductsPlace place(params, index, rank);
    const int32_t block = (place.point * params.columns + place.column) / 32 + rank * kBlocks;
    for (int32_t i = 0; i < params.k_blocks; ++i) {
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t at = stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, Tile::kStageBytes);
      CopyTile3d(ring + at, &maps.v, barrier, i * Tile::kChannels, place.row, place.point);
      CopyTile5dToCluster(u_at + at, &maps.u, barrier, i * Tile::kChannels, 0, 0, 0, block,
                          (1 << kProductsCtas) - 1);
      stage.Next();
    }
  }
}

// The accumulators of 64 rows -> M; `row`: the thread's first.
__device__ __forceinline__ void StoreProducts(const ProductsParams& params,
                                              const ProductsPlace& place, int32_t row,
                                              const int32_t (&acc)[64]) {
  const int32_t column = place.column + Lane() % 4 * 8;
  const float* const scales = params.u_scale + int64_t{place.point} * params.columns + column;
  __half* const to = static_cast<__half*>(params.m) + place.point * params.m_point +
                     int64_t{row} * params.columns + column;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    if (column + group * 32 >= params.columns) break;
    float scale[8];
    requantize_internal::LoadFloats(scales + group * 32, scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= params.rows) continue;
      __half2 pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t* sums = &acc[group * 16 + j * 4 + half * 2];
        pairs[j] = __floats2half2_rn(static_cast<float>(sums[0]) * scale[2 * j],
                                     static_cast<float>(sums[1]) * scale[2 * j + 1]);
      }
      uint4 words;
      memcpy(&words, pairs, sizeof(words));
      *reinterpret_cast<uint4*>(to + half * 8 * params.columns + group * 32) = words;
    }
  }
}

__device__ __forceinline__ void ConsumeProducts(const ProductsParams& params, int32_t rank,
                                                uint32_t ring,
                                                const Barriers<ProductsTile>& barriers,
                                                int warpgroup) {
  using Tile = ProductsTile;
  // Thread r tells rank r.
  auto release = [&](uint32_t slot) {
    const int32_t to = threadIdx.x % 128;
    if (to < kProductsCtas) BarrierArriveInCluster(AddressInCluster(barriers.Empty(slot), to));
  };
  RingPlace<Tile::kStages> stage;
  if (warpgroup == 1) {
    NamedBarrierArrive(1, 256);  // consumer 0 has the first turn
    stage.Skip(params.k_blocks);
  }
  const int32_t stride = gridDim.x / kProductsCtas;
  for (int32_t index = ClusterId() + warpgroup * stride; index < params.tiles;
       index += 2 * stride) {
    NamedBarrierSync(1 + warpgroup, 256);
    int32_t acc[2][64];
    uint32_t last = 0;
    for (int32_t i = 0; i < params.k_blocks; ++i) {
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      const uint32_t v = ring + stage.slot * Tile::kStageBytes;
      const uint64_t a[2] = {KMajorDescriptor(v), KMajorDescriptor(v + 64 * Tile::kChannels)};
      const uint64_t b = KMajorDescriptor(v + Tile::kOperandBytes);
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < Tile::kChannels / 32; ++k) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          WgmmaInt8(int8_t{}, int8_t{}, acc[block], a[block] + k * 2, b + k * 2, i > 0 || k > 0);
        }
      }
      WgmmaCommit();
      WgmmaWait<1>();
      if (i > 0) release(last);
      last = stage.slot;
      stage.Next();
    }
    NamedBarrierArrive(2 - warpgroup, 256);
    WgmmaWait<0>();
    release(last);
    const ProductsPlace place(params, index, rank);
    const int32_t row = place.row + threadIdx.x / 32 % 4 * 16 + Lane() / 4;
    StoreProducts(params, place, row, acc[0]);
    StoreProducts(params, place, row + 64, acc[1]);
    stage.Skip(params.k_blocks);  // the other's tile
  }
}

template <class Tag>
__global__ void __launch_bounds__(ProductsTile::kThreads, 1)
    ProductsKernel(const __grid_constant__ ProductsParams params,
                   const __grid_constant__ ProductsMaps maps) {
  using Tile = ProductsTile;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[Barriers<Tile>::kCount];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const Barriers<Tile> barriers{SharedAddress(barrier_words)};
  if (threadIdx.x == 0) {
    barriers.Init(kProductsCtas);
    PrefetchTensorMap(&maps.v);
    PrefetchTensorMap(&maps.u);
  }
  // Copies and arrivals from the other CTA find the barriers ready.
  ClusterArrive();
  ClusterWait();
  const int32_t rank = ClusterRank();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    LowerRegisters<40>();
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && ElectOne()) {
      ProduceProducts(params, maps, rank, ring, barriers);
    }
    __syncwarp();
  } else {
    RaiseRegisters<232>();
    ConsumeProducts(params, rank, ring, barriers, warpgroup - 1);
  }
  // The other CTA copies into this one's shared memory, and arrives there, to the end.
  ClusterArrive();
  ClusterWait();
}

// v, u: V and U in the workspace.
template <class Tag>
Status LaunchProducts(const char* name, const ProductsParams& params, const int8_t* v,
                      const int8_t* u, int32_t channels, int32_t ctas, void* stream) {
  using Tile = ProductsTile;
  const int64_t c = channels, points = params.points;
  ProductsMaps maps;
  const DenseTensor of_v = {DType::kS8, 3, v, {c, params.rows, points}, {1, c, params.rows * c}};
  const int32_t v_box[3] = {Tile::kChannels, Tile::kRows, 1};
  JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(of_v, v_box, &maps.v));
  const DenseTensor of_u = {
      DType::kS8, 5, u, {c, 2, 4, 4, points * params.columns / 32}, {1, c, 8 * c, 2 * c, 32 * c}};
  const int32_t u_box[5] = {Tile::kChannels, 2, 4, 4, Tile::kRows / 32 / kProductsCtas};
  JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(of_u, u_box, &maps.u));
  LaunchConfig config;
  config.grid = static_cast<unsigned>(ctas);
  config.threads = Tile::kThreads;
  config.shared_bytes = Tile::kSharedBytes;
  config.cluster = kProductsCtas;
  return Launch<ProductsKernel<Tag>>(name, config, stream, params, maps);
}

}  // namespace jaxconv::winograd_int8

#endif  // JAXCONV_CUDA_WINOGRAD_INT8_PRODUCTS_SM90_CUH_
