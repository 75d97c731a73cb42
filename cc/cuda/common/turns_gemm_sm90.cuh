// Persistent matrix products on wgmma, in pingpong, by clusters of two CTAs (sm_90a).
//
//                            time         ->
//     consumer warpgroup 0   | multiply 0 | store 0    | multiply 2 ...
//     consumer warpgroup 1                | multiply 1 | store 1 ...
//     producer               | loads of 0 | of 1       | of 2 ...
//
// The two consumer warpgroups have separate tiles and alternate on the tensor cores: one stores
// while the other multiplies. The producer loads the next tile's stages ahead. Cluster c processes
// tiles c, c + clusters, ...
//
// Full(s): the producer announces a stage's bytes, its own and those that the other CTA sends.
// Empty(s): when its wgmma has retired, a consumer warpgroup of each CTA arrives at both CTAs'
// barrier, one k-block late, so that one wgmma is always in flight. Named barriers 1 and 2 hand the
// tensor cores from one consumer to the other. Registers: producer 40, consumers 232.
//
// A Gemm has
//
//     Tile       kStages, kStageBytes and the other members that Barriers needs; kThreads = 384
//     Params     tiles: of a cluster; k_blocks: stages of a tile
//     Maps       tensor maps, and Prefetch(maps)
//     Loads      (params, maps, rank, ring); Begin(tile); Load(k_block, first byte of the stage in
//                the ring, barrier): all copies of a stage that this CTA issues
//     Sums       a thread's accumulators, an array
//     Multiply(sums, stage's address, accumulate): the wgmmas of a stage
//     Stores     (params); Store(tile, rank, sums)
#ifndef JAXCONV_CUDA_COMMON_TURNS_GEMM_SM90_CUH_
#define JAXCONV_CUDA_COMMON_TURNS_GEMM_SM90_CUH_

#include <cstdint>

#include "cuda/common/ring_sm90.cuh"
#include "cuda/ptx/cluster_sm90.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv {

inline constexpr int kTurnsCtas = 2;  // of a cluster

namespace turns_internal {

template <class Gemm>
__device__ __forceinline__ void Produce(const typename Gemm::Params& params,
                                        const typename Gemm::Maps& maps, int32_t rank,
                                        uint32_t ring,
                                        const Barriers<typename Gemm::Tile>& barriers) {
  using Tile = typename Gemm::Tile;
  RingPlace<Tile::kStages> stage;
  typename Gemm::Loads loads(params, maps, rank, ring);
  const int32_t stride = gridDim.x / kTurnsCtas;
  for (int32_t tile = ClusterId(); tile < params.tiles; tile += stride) {
    loads.Begin(tile);
    for (int32_t i = 0; i < params.k_blocks; ++i) {
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      BarrierArriveExpect(barrier, Tile::kStageBytes);
      loads.Load(i, stage.slot * Tile::kStageBytes, barrier);
      stage.Next();
    }
  }
}

template <int kWarpgroup, class Gemm>
__device__ __forceinline__ void Consume(const typename Gemm::Params& params, int32_t rank,
                                        uint32_t ring,
                                        const Barriers<typename Gemm::Tile>& barriers) {
  using Tile = typename Gemm::Tile;
  RingPlace<Tile::kStages> stage;
  // Thread r tells rank r.
  auto release = [&](uint32_t slot) {
    const int32_t to = threadIdx.x % 128;
    if (to < kTurnsCtas) BarrierArriveInCluster(AddressInCluster(barriers.Empty(slot), to));
  };
  if (kWarpgroup == 1) NamedBarrierArrive(1, 256);  // consumer 0 has the first turn
  const typename Gemm::Stores stores(params);
  const int32_t stride = gridDim.x / kTurnsCtas;
  for (int32_t tile = ClusterId() + kWarpgroup * stride; tile < params.tiles; tile += 2 * stride) {
    if (tile >= stride) stage.Skip(params.k_blocks);  // the other consumer's previous tile
    NamedBarrierSync(1 + kWarpgroup, 256);
    typename Gemm::Sums sums;
    uint32_t last = 0;
    for (int32_t i = 0; i < params.k_blocks; ++i) {
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      WgmmaFence();
      Gemm::Multiply(sums, ring + stage.slot * Tile::kStageBytes, i > 0);
      WgmmaCommit();
      WgmmaWait<1>();
      if (i > 0) release(last);
      last = stage.slot;
      stage.Next();
    }
    NamedBarrierArrive(2 - kWarpgroup, 256);
    WgmmaWait<0>();
    release(last);
    stores.Store(tile, rank, sums);
  }
}

}  // namespace turns_internal

// A kernel's body. `dynamic`: its dynamic shared memory, the ring and 1024 bytes to align it;
// `barrier_words`: Barriers<Tile>::kCount. `waits`: the kernel overlaps its neighbours in the
// stream.
template <class Gemm, bool kWaits>
__device__ __forceinline__ void RunTurnsGemm(const typename Gemm::Params& params,
                                             const typename Gemm::Maps& maps,
                                             unsigned char* dynamic, uint64_t* barrier_words) {
  using Tile = typename Gemm::Tile;
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const Barriers<Tile> barriers{SharedAddress(barrier_words)};
  if (threadIdx.x == 0) {
    barriers.Init(kTurnsCtas);
    Gemm::Prefetch(maps);
  }
  // Before copies and arrivals from the other CTA, the barriers must be initialised.
  ClusterArrive();
  ClusterWait();
  if constexpr (kWaits) WaitForInputs();
  const int32_t rank = ClusterRank();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    LowerRegisters<40>();
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && ElectOne()) {
      turns_internal::Produce<Gemm>(params, maps, rank, ring, barriers);
    }
    __syncwarp();
  } else {
    RaiseRegisters<232>();
    if (warpgroup == 1) {
      turns_internal::Consume<0, Gemm>(params, rank, ring, barriers);
    } else {
      turns_internal::Consume<1, Gemm>(params, rank, ring, barriers);
    }
  }
  // Until its end, the other CTA copies to this CTA's shared memory and arrives at its barriers.
  ClusterArrive();
  ClusterWait();
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_TURNS_GEMM_SM90_CUH_
