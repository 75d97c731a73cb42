// igemm_wgmma, cluster: for few tiles (small batches, small maps), the CTAs of a cluster share one
// tile (sm_90a). Each CTA sums a part of the reduction, and they add the parts through distributed
// shared memory. fprop and dgrad; the map from convolution to GEMM is that of cooperative_sm90.cuh.
//
//     cluster of 3, tile of 64 x 64, 18 k-blocks     afterwards, rows of 64 columns
//     rank 0 | k-blocks  0 ...  5 | 64 x 64 float    row 0, 3, 6 ...: rank 0 adds 0 + 1 + 2, stores
//     rank 1 | k-blocks  6 ... 11 | 64 x 64 float    row 1, 4, 7 ...: rank 1 adds 0 + 1 + 2, stores
//     rank 2 | k-blocks 12 ... 17 | 64 x 64 float    row 2, 5, 8 ...: rank 2 adds 0 + 1 + 2, stores
//
// This needs neither a workspace nor a second kernel, and its fixed order gives the same bits in
// every run.
//
// Such a layer takes a few microseconds, so the loads must start early: a CTA has one tile; the
// four producer warps alternate k-blocks (issuing the two TMA copies of a k-block takes one warp
// 350 cycles, longer than the 64x64 tile's MMAs); and two CTAs fit on an SM, so that the next
// kernel's CTAs are set up while this kernel's finish. Shared memory: a ring of 6 stages of (8 +
// 8) KB, which afterwards holds the staging or the partial sums; barriers.
//
// Full(s), Empty(s): as in cooperative_sm90.cuh. Cluster barriers: first, all parts are written;
// second, all parts are read, so no other CTA needs this CTA's shared memory. Refused: what
// cooperative_sm90.cuh refuses.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_CLUSTER_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_CLUSTER_SM90_CUH_

#include <type_traits>

#include "cuda/common/activation.cuh"
#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_wgmma/launch_sm90.cuh"
#include "cuda/igemm_wgmma/mainloop_sm90.cuh"
#include "cuda/igemm_wgmma/store_tile_sm90.cuh"
#include "cuda/igemm_wgmma/wgmma_tile_sm90.cuh"
#include "cuda/ptx/cluster_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// Partial sums in shared memory, rows of float32. Chunk c (16 bytes) of row r lies at c ^ r % 4 *
// 2, so that neither fragment stores nor row loads have bank conflicts.
template <class Tile>
__device__ __forceinline__ uint32_t PartialChunk(uint32_t partial, int row, int chunk) {
  return partial + row * (Tile::kTileN * 4) + (chunk ^ (row % 4 * 2)) * 16;
}

// One CTA's part of a tile's reduction; it may be empty.
struct ReductionPart {
  int32_t first, k_blocks;

  __device__ __forceinline__ ReductionPart(const Params& params, const ResidueClass& of,
                                           int32_t rank) {
    first = params.cluster.Div(rank * of.k_blocks);
    k_blocks = params.cluster.Div((rank + 1) * of.k_blocks) - first;
  }
};

// One thread of each producer warp, which loads every fourth k-block.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ void ProducePart(const Params& params, const Maps& maps,
                                            const TilePlace& place, const ResidueClass& of,
                                            const ReductionPart& part, int32_t warp, uint32_t ring,
                                            const Barriers<Tile>& barriers) {
  constexpr int kProducers = 4;
  ProducedTile<kOp, T, Tile> tile(params, maps, place, part.first + warp);
  WaitForInputs();
  for (int32_t i = warp; i < part.k_blocks; i += kProducers) {
    const uint32_t round = i / Tile::kStages, slot = i % Tile::kStages;
    const uint32_t barrier = barriers.Full(slot);
    const uint32_t shared = ring + slot * Tile::kStageBytes;
    BarrierWait(barriers.Empty(slot), round % 2 ^ 1);
    BarrierArriveExpect(barrier, Tile::kBytesA + tile.boxes * kBoxBytes);
    tile.LoadB(shared + Tile::kBytesA, barrier);
    tile.LoadA(shared, barrier);
#pragma unroll
    for (int w = 0; w < kProducers; ++w) tile.k_block.Next(of);
  }
}

// A thread's part of its CTA's output: four channels of at most kRows rows. A fused epilogue's
// terms and residual for these elements arrive while the products are computed.
template <Op kOp, typename T, class Tile, class Epilogue>
struct StoredPart {
  static constexpr int kLanesOfRow = Tile::kTileN / 4;
  // 256 threads store 16 of the tile's 64 rows at a time. Two CTAs store 32 rows each; more CTAs
  // cover at least 64 (five: 80). Without an epilogue a single CTA stores its tile from the
  // fragments.
  static_assert(Tile::kTileM * Tile::kTileN == 64 * 64 && Tile::kThreads == 256);
  static constexpr int kRows = Epilogue::kPlain ? 2 : 4;
  int32_t row[kRows], dst[kRows];  // row of the tile; row of the output, -1 for none
  int64_t base;                    // output offset of the channels
  ChannelTerms<4> terms;
  Neighbours<T, 4> residual[kRows];

  static __device__ __forceinline__ int Chunk() { return threadIdx.x % kLanesOfRow; }
  __device__ __forceinline__ int64_t Offset(const Params& params, int r) const {
    return base + int64_t{dst[r]} * params.out_channels;
  }
  __device__ __forceinline__ void Load(const Params& params, const TilePlace& place,
                                       const ResidueClass& of, int32_t rank) {
    const int32_t n = place.n_tile * Tile::kTileN + Chunk() * 4;
    const bool inside = n < params.gemm_n;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row[r] = (threadIdx.x + r * Tile::kThreads) / kLanesOfRow * params.cluster.divisor + rank;
      const bool stored = inside && row[r] < Tile::kTileM;
      dst[r] = stored ? OutputRow<kOp>(params, of, place.m_tile * Tile::kTileM + row[r]) : -1;
    }
    base = place.batch * params.out_batch + int64_t{place.group} * params.out_group + n;
    if constexpr (!Epilogue::kPlain) {
      const Epilogue epilogue(params.epilogue);
      if (inside) terms = epilogue.template Terms<4>(place.group * params.gemm_n + n);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (params.epilogue.residual == nullptr || dst[r] < 0) continue;
        residual[r] = epilogue.template Residual<T, 4>(Offset(params, r));
      }
    }
  }
};

// The consumer warpgroup: computes the CTA's part and writes the partial sums over the ring; a
// cluster of one CTA without an epilogue stores the output directly.
template <Op kOp, typename T, class Tile, class Epilogue>
__device__ __forceinline__ void ConsumePart(const Params& params, const TilePlace& place,
                                            const ResidueClass& of, int32_t k_blocks, uint32_t ring,
                                            const Barriers<Tile>& barriers) {
  const bool signals = threadIdx.x % 128 == 0;
  typename Tile::Accumulators acc;
#pragma unroll
  for (int i = 0; i < Tile::kN0 / 2; ++i) acc.first[0][i] = 0;
  RingPlace<Tile::kStages> stage;
  uint32_t last = 0;
  for (int32_t i = 0; i < k_blocks; ++i) {
    BarrierWait(barriers.Full(stage.slot), stage.parity);
    const uint32_t a = ring + stage.slot * Tile::kStageBytes;
    Tile::template Multiply<T, false, kMnMajorFilter<kOp, T>>(acc, a, a + Tile::kBytesA, true);
    WgmmaWait<1>();
    if (signals && i > 0) BarrierArrive(barriers.Empty(last));
    last = stage.slot;
    stage.Next();
  }
  WgmmaWait<0>();
  const int warp = threadIdx.x / 32 % 4;
  if constexpr (Epilogue::kPlain) {
    if (params.cluster.divisor == 1) {
      StoreTile(TileStore<kOp, T, Tile>{params, place, of, acc, place.m_tile * Tile::kTileM,
                                        ring + warp * Tile::kStagingBytes},
                Epilogue(params.epilogue));
      return;
    }
  }
  const int lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < Tile::kTileN / 8; ++j) {
    const float* quad = &acc.first[0][4 * j];
    StorePair(PartialChunk<Tile>(ring, row, 2 * j + t / 2) + t % 2 * 8, quad[0], quad[1]);
    StorePair(PartialChunk<Tile>(ring, row + 8, 2 * j + t / 2) + t % 2 * 8, quad[2], quad[3]);
  }
}

// Sums a thread's first kRows rows over at most kRanks ranks, in order of rank, and stores them.
// All parts are loaded before the ordered additions, so the loads overlap.
template <int kRows, int kRanks, typename T, class Tile, class Epilogue, class Part>
__device__ __forceinline__ void ReduceParts(const Params& params, const TilePlace& place,
                                            const ResidueClass& of, Part part, uint32_t partial) {
  const int32_t ranks = params.cluster.divisor;
  float4 quad[kRows][kRanks];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const uint32_t at = PartialChunk<Tile>(partial, part.row[r], Part::Chunk());
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      if (part.dst[r] >= 0 && i < ranks) quad[r][i] = LoadCluster(AddressInCluster(at, i));
    }
  }
  float sums[kRows][4] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (part.dst[r] < 0) continue;
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      if (i >= ranks) break;
      sums[r][0] += quad[r][i].x;
      sums[r][1] += quad[r][i].y;
      sums[r][2] += quad[r][i].z;
      sums[r][3] += quad[r][i].w;
    }
  }
  const Epilogue epilogue(params.epilogue);
  T* const out = static_cast<T*>(params.out);
  if constexpr (Epilogue::kPlain) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (part.dst[r] < 0) continue;
      const int64_t offset = part.Offset(params, r);
      if (params.out_is_f32) {
        StoreQuad(static_cast<float*>(params.out) + offset, sums[r]);
      } else {
        StoreQuad(out + offset, sums[r]);
      }
    }
  } else if (Clamps(params.epilogue)) {
    const PairBounds<T> bounds(params.epilogue.activation);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (part.dst[r] < 0) continue;
      epilogue.Scale(part.terms, sums[r]);
      if (params.epilogue.residual != nullptr) part.residual[r].AddTo(sums[r]);
      *reinterpret_cast<uint2*>(out + part.Offset(params, r)) =
          make_uint2(bounds.Clamp(PackPair<T>(sums[r][0], sums[r][1])),
                     bounds.Clamp(PackPair<T>(sums[r][2], sums[r][3])));
    }
  } else {
    // So that the activations are compiled once, each row moves to the first place.
#pragma unroll 1
    for (int turn = 0; turn < kRows; ++turn) {
      if (part.dst[0] >= 0) {
        const int64_t offset = part.Offset(params, 0);
        epilogue.Scale(part.terms, sums[0]);
        epilogue.template Add<T>(sums[0], part.residual[0], offset);
        Activate<T>(params.epilogue.activation, params.epilogue.negative_slope, sums[0]);
        StoreQuad(out + offset, sums[0]);
      }
#pragma unroll
      for (int r = 1; r < kRows; ++r) {
        part.dst[r - 1] = part.dst[r];
        part.residual[r - 1] = part.residual[r];
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[r - 1][e] = sums[r][e];
      }
    }
  }
  FinishTile<Tile>(params, place, of, epilogue);
}

template <class Tag>
__global__ void __launch_bounds__(Tag::kThreads, 2)
    ClusterKernel(const __grid_constant__ Params params, const __grid_constant__ Maps maps) {
  using Tile = typename Tag::Tile;
  using T = typename ElementOf<Tag::kType>::Type;
  using Epilogue = typename Tag::Epilogue;
  constexpr Op kOp = Tag::kOp;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[Barriers<Tile>::kCount];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const Barriers<Tile> barriers{SharedAddress(barrier_words)};
  const TilePlace place(params, ClusterId());
  const ResidueClass& of = params.residue_class[place.residue_class];
  if (threadIdx.x == 0) {
    barriers.Init(1);
  } else if (threadIdx.x == 32) {
    PrefetchTensorMap(&maps.a[place.residue_class]);
    PrefetchTensorMap(&maps.b);
  }
  __syncthreads();
  if (!HasRows<Tile>(of, place)) return;  // the whole cluster
  const int32_t rank = ClusterRank();
  const ReductionPart part(params, of, rank);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  StoredPart<kOp, T, Tile, Epilogue> stored;
  if (warpgroup == 0) {
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (ElectOne()) {
      ProducePart<kOp, T, Tile>(params, maps, place, of, part, warp, ring, barriers);
    }
    __syncwarp();
    if constexpr (!Epilogue::kPlain) WaitForInputs();  // in every thread that reads
    stored.Load(params, place, of, rank);
  } else {
    WaitForInputs();
    stored.Load(params, place, of, rank);
    ConsumePart<kOp, T, Tile, Epilogue>(params, place, of, part.k_blocks, ring, barriers);
  }
  if (params.cluster.divisor == 1) {
    if constexpr (!Epilogue::kPlain) {
      __syncthreads();
      ReduceParts<4, 1, T, Tile, Epilogue>(params, place, of, stored, ring);
    }
    return;
  }
  ClusterArrive();
  ClusterWait();
  if (params.cluster.divisor <= 4) {
    ReduceParts<2, 4, T, Tile, Epilogue>(params, place, of, stored, ring);
  } else {
    ReduceParts<1, kMaxClusterCtas, T, Tile, Epilogue>(params, place, of, stored, ring);
  }
  __syncwarp();
  // The parts have been read: their sums are already stored.
  ClusterArriveRelaxed();
  ClusterWait();
}

template <Op kOp_, DType kType_, int kN, int kStages>
struct Cluster : WgmmaTile<1, false, 1, kN, 0, kStages> {
  static constexpr Op kOp = kOp_;
  static constexpr DType kType = kType_;
  using Tile = WgmmaTile<1, false, 1, kN, 0, kStages>;
  using Epilogue = PlainEpilogue;
  // The staging lies in the ring.
  static constexpr int kSharedBytes = Tile::kStages * Tile::kStageBytes + 1024;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchForm<ClusterKernel<Tag>, Tag>(plan, operands, stream);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_CLUSTER_SM90_CUH_
