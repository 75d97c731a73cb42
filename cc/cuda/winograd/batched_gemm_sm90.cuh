// The products of the Winograd domain on wgmma, fed by TMA (sm_90a):
//
//     M[point][tile, k] = sum over c of V[point][tile, c] U[point][k, c]     for each group
//
// The GEMMs of batched_gemm.cuh, which explains the mapping and the order of CTAs.
//
//            c ->                                   a CTA: 128 x 128 of M, 64 of c a stage
//     V  [ 128 tiles x 64 ] \                       consumer warpgroup 0: rows 0-63
//                             >  M [128 x 128]      consumer warpgroup 1: rows 64-127
//     U  [ 128 k     x 64 ] /                       a ninth warp: one thread issues the loads
//
// A stage is a box of V and one of U, 16 KB each, both K-major with the swizzle of 128 bytes.
// Point, group and row are dimensions of the tensor maps, so TMA fills in zeros past the last tile,
// output channel and reduction index. Shared memory: 3 stages, 96 KB, so that two CTAs share an SM
// and one stores while the other multiplies: M has 4 bytes for every C multiply-adds. Registers:
// 112 a thread, of which 64 accumulators.
//
// Full(s): the producer announces a stage's bytes, consumers wait. Empty(s): each consumer
// warpgroup arrives when its wgmma has retired, one k-block late, so that one wgmma is always in
// flight.
//
// Accumulators go to M from registers: four lanes write the 32 bytes of a sector, so every sector
// is whole. Refused: nothing beyond what the family refuses.
#ifndef JAXCONV_CUDA_WINOGRAD_BATCHED_GEMM_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_BATCHED_GEMM_SM90_CUH_

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/fast_divmod.h"
#include "core/status.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {

struct WgmmaGemmTile {
  static constexpr int kTileM = 128, kTileN = 128, kTileK = 64;
  static constexpr int kWarpgroups = 2;  // consumer warpgroups
  static constexpr int kThreads = kWarpgroups * 128 + 32;
  static constexpr int kStages = 3, kFilterSlots = 0, kStationary = 0;
  static constexpr int kBytesOfV = kTileM * kTileK * 2, kBytesOfU = kTileN * kTileK * 2;
  static constexpr int kStageBytes = kBytesOfV + kBytesOfU;
  // 1024 more to align the ring.
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;
  static constexpr int kCtasPerSm = 2;
};

struct WgmmaGemmParams {
  float* m = nullptr;
  int32_t rows = 0, cols = 0;  // of a group's GEMM
  int32_t k_blocks = 0;
  int32_t m_row = 0;    // elements: the channels of all groups
  int64_t m_point = 0;  // elements from a point to the next
  FastDivmod n_tiles, m_tiles, groups;
};

struct WgmmaGemmMaps {
  CUtensorMap v, u;  // (c, group, tile, point), (c, k, group, point)
};

// A CTA's tile of M.
struct WgmmaGemmPlace {
  int32_t row, col, group, point;

  __device__ __forceinline__ explicit WgmmaGemmPlace(const WgmmaGemmParams& params) {
    int32_t index;
    params.n_tiles.Divmod(blockIdx.x, &index, &col);
    params.m_tiles.Divmod(index, &index, &row);
    params.groups.Divmod(index, &point, &group);
    row *= WgmmaGemmTile::kTileM;
    col *= WgmmaGemmTile::kTileN;
  }
};

__device__ __forceinline__ void ProduceGemm(const WgmmaGemmParams& params,
                                            const WgmmaGemmMaps& maps, const WgmmaGemmPlace& place,
                                            uint32_t ring,
                                            const Barriers<WgmmaGemmTile>& barriers) {
  using Tile = WgmmaGemmTile;
  RingPlace<Tile::kStages> stage;
  for (int32_t i = 0; i < params.k_blocks; ++i) {
    BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
    const uint32_t barrier = barriers.Full(stage.slot);
    const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
    BarrierArriveExpect(barrier, Tile::kStageBytes);
    CopyTile4d(shared, &maps.v, barrier, i * Tile::kTileK, place.group, place.row, place.point);
    CopyTile4d(shared + Tile::kBytesOfV, &maps.u, barrier, i * Tile::kTileK, place.col, place.group,
               place.point);
    stage.Next();
  }
}

template <int kWarpgroup>
__device__ __forceinline__ void ConsumeGemm(const WgmmaGemmParams& params,
                                            const WgmmaGemmPlace& place, uint32_t ring,
                                            const Barriers<WgmmaGemmTile>& barriers) {
  using Tile = WgmmaGemmTile;
  const Release release;
  RingPlace<Tile::kStages> stage;
  float acc[Tile::kTileN / 2];
  uint32_t last = 0;
  for (int32_t i = 0; i < params.k_blocks; ++i) {
    BarrierWait(barriers.Full(stage.slot), stage.parity);
    const uint32_t v = ring + stage.slot * Tile::kStageBytes;
    const uint64_t a = KMajorDescriptor(v + kWarpgroup * 64 * 128);
    const uint64_t b = KMajorDescriptor(v + Tile::kBytesOfV);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < Tile::kTileK / 16; ++k) {
      Wgmma<Tile::kTileN, __half, false, false>(acc, a + k * 2, b + k * 2, i > 0 || k > 0);
    }
    WgmmaCommit();
    WgmmaWait<1>();
    if (i > 0) release(barriers.Empty(last));
    last = stage.slot;
    stage.Next();
  }
  WgmmaWait<0>();
  const int lane = Lane();
  const int32_t row = place.row + kWarpgroup * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int32_t col = place.col + lane % 4 * 2;
  float* to = params.m + place.point * params.m_point + int64_t{row} * params.m_row +
              place.group * params.cols + col;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + half * 8 >= params.rows) break;
#pragma unroll
    for (int j = 0; j < Tile::kTileN / 8; ++j) {
      if (col + j * 8 >= params.cols) break;
      *reinterpret_cast<float2*>(to + j * 8) =
          make_float2(acc[j * 4 + half * 2], acc[j * 4 + half * 2 + 1]);
    }
    to += int64_t{8} * params.m_row;
  }
}

template <class Tag>
__global__ void __launch_bounds__(WgmmaGemmTile::kThreads, WgmmaGemmTile::kCtasPerSm)
    WgmmaGemmKernel(const __grid_constant__ WgmmaGemmParams params,
                    const __grid_constant__ WgmmaGemmMaps maps) {
  using Tile = WgmmaGemmTile;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[Barriers<Tile>::kCount];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const Barriers<Tile> barriers{SharedAddress(barrier_words)};
  if (threadIdx.x == 0) {
    barriers.Init(Tile::kWarpgroups);
    PrefetchTensorMap(&maps.v);
    PrefetchTensorMap(&maps.u);
  }
  __syncthreads();
  const WgmmaGemmPlace place(params);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ConsumeGemm<0>(params, place, ring, barriers);
  } else if (warpgroup == 1) {
    ConsumeGemm<1>(params, place, ring, barriers);
  } else if (ElectOne()) {
    ProduceGemm(params, maps, place, ring, barriers);
  }
}

inline Status EncodeGemmMaps(const Products& products, WgmmaGemmMaps* maps) {
  using Tile = WgmmaGemmTile;
  const Geometry& g = products.geometry;
  DenseTensor v;
  v.dtype = DType::kF16;
  v.rank = 4;
  v.address = products.v;
  DenseTensor u = v;
  u.address = products.u;
  const int64_t v_extent[4] = {g.red, g.groups, products.tiles, products.points};
  const int64_t u_extent[4] = {g.red, g.cols, g.groups, products.points};
  const int64_t v_stride[4] = {1, g.red, g.in_channels(), products.v_point};
  const int64_t u_stride[4] = {1, g.red, int64_t{g.cols} * g.red, products.u_point};
  for (int i = 0; i < 4; ++i) {
    v.extent[i] = v_extent[i];
    v.stride[i] = v_stride[i];
    u.extent[i] = u_extent[i];
    u.stride[i] = u_stride[i];
  }
  const int32_t v_box[4] = {Tile::kTileK, 1, Tile::kTileM, 1};
  const int32_t u_box[4] = {Tile::kTileK, Tile::kTileN, 1, 1};
  JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(v, v_box, &maps->v));
  return EncodeTiledMap(u, u_box, &maps->u);
}

// Enqueues the products of a chunk.
template <class Tag>
Status LaunchWgmmaGemm(const char* name, const Products& products, void* stream) {
  using Tile = WgmmaGemmTile;
  const Geometry& g = products.geometry;
  WgmmaGemmMaps maps;
  JAXCONV_RETURN_IF_ERROR(EncodeGemmMaps(products, &maps));
  WgmmaGemmParams params;
  params.m = products.m;
  params.rows = products.tiles;
  params.cols = g.cols;
  params.k_blocks = (g.red + Tile::kTileK - 1) / Tile::kTileK;
  params.m_row = g.out_channels();
  params.m_point = products.m_point;
  const int64_t n_tiles = (g.cols + Tile::kTileN - 1) / Tile::kTileN;
  const int64_t m_tiles = (products.tiles + Tile::kTileM - 1) / Tile::kTileM;
  params.n_tiles = FastDivmod(n_tiles);
  params.m_tiles = FastDivmod(m_tiles);
  params.groups = FastDivmod(g.groups);
  LaunchConfig config;
  config.grid = static_cast<unsigned>(n_tiles * m_tiles * g.groups * products.points);
  config.threads = Tile::kThreads;
  config.shared_bytes = Tile::kSharedBytes;
  return Launch<WgmmaGemmKernel<Tag>>(name, config, stream, params, maps);
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_BATCHED_GEMM_SM90_CUH_
