// igemm_wgmma, cluster: where tiles are few (small batches, small maps), the CTAs of a cluster
// share one tile, each sums a part of the reduction, and they add the parts through distributed
// shared memory (sm_90a). fprop and dgrad; the map from convolution to GEMM is that of
// cooperative_sm90.cuh.
//
//     cluster of 3, tile of 64 x 64, 18 k-blocks     afterwards, rows of 64 columns
//     rank 0 | k-blocks  0 ...  5 | 64 x 64 float    row 0, 3, 6 ...: rank 0 adds 0 + 1 + 2, stores
//     rank 1 | k-blocks  6 ... 11 | 64 x 64 float    row 1, 4, 7 ...: rank 1 adds 0 + 1 + 2, stores
//     rank 2 | k-blocks 12 ... 17 | 64 x 64 float    row 2, 5, 8 ...: rank 2 adds 0 + 1 + 2, stores
//
// No workspace, no second kernel, and a fixed order: the same bits in every run.
//
// Such a layer takes a few microseconds, so everything serves to start the loads early: a CTA has
// one tile; the four producer warps alternate k-blocks (issuing the two TMA copies of a k-block
// takes one warp 350 cycles, longer than the 64x64 tile's MMAs); and two CTAs fit on an SM, so that
// the next kernel's are set up while this one's finish. Shared memory: a ring of 6 stages of (8 +
// 8) KB, which afterwards holds the staging or the partial sums; barriers.
//
// Full(s), Empty(s): as in cooperative_sm90.cuh. Cluster barriers: the parts are written; the parts
// are read, and nobody needs this CTA's shared memory any more. Refused: what cooperative_sm90.cuh
// refuses.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_CLUSTER_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_CLUSTER_SM90_CUH_

#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_wgmma/launch_sm90.cuh"
#include "cuda/igemm_wgmma/mainloop_sm90.cuh"
#include "cuda/igemm_wgmma/store_tile_sm90.cuh"
#include "cuda/igemm_wgmma/wgmma_tile_sm90.cuh"
#include "cuda/ptx/cluster_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// Partial sums in shared memory, rows of float32: chunk c (16 bytes) of row r lies at c ^ r % 4 *
// 2, so that neither fragments nor rows conflict.
template <class Tile>
__device__ __forceinline__ uint32_t PartialChunk(uint32_t partial, int row, int chunk) {
  return partial + row * (Tile::kTileN * 4) + (chunk ^ (row % 4 * 2)) * 16;
}

// The part of a tile's reduction that is one CTA's; it may be empty.
struct ReductionPart {
  int32_t first, k_blocks;

  __device__ __forceinline__ ReductionPart(const Params& params, const ResidueClass& of,
                                           int32_t rank) {
    first = params.cluster.Div(rank * of.k_blocks);
    k_blocks = params.cluster.Div((rank + 1) * of.k_blocks) - first;
  }
};

// One thread of each producer warp: every fourth k-block.
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

// The consumer warpgroup: the CTA's part -> partial sums in place of the ring; of a cluster of one
// CTA, the output.
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
  if (params.cluster.divisor == 1) {
    StoreTile<kOp, T, Tile>(params, place, of, acc, place.m_tile * Tile::kTileM + warp * 16,
                            ring + warp * Tile::kStagingBytes, Epilogue(params.epilogue));
    return;
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

// This rank's rows of the tile, summed over all ranks in their order -> the output. A thread loads
// kRows rows, of at most kRanks ranks each, before it adds them: the additions are ordered, the
// loads need not be.
template <Op kOp, typename T, class Tile, class Epilogue, int kRows, int kRanks>
__device__ __forceinline__ void ReduceParts(const Params& params, const TilePlace& place,
                                            const ResidueClass& of, int32_t rank,
                                            uint32_t partial) {
  constexpr int kLanesOfRow = Tile::kTileN / 4;
  const int32_t ranks = params.cluster.divisor;
  const int chunk = threadIdx.x % kLanesOfRow;
  const int32_t n = place.n_tile * Tile::kTileN + chunk * 4;
  if (n >= params.gemm_n) return;
  int32_t dst[kRows];
  float4 quad[kRows][kRanks];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = (threadIdx.x + r * Tile::kThreads) / kLanesOfRow * ranks + rank;
    dst[r] =
        row < Tile::kTileM ? OutputRow<kOp>(params, of, place.m_tile * Tile::kTileM + row) : -1;
    const uint32_t at = PartialChunk<Tile>(partial, row, chunk);
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      if (dst[r] >= 0 && i < ranks) quad[r][i] = LoadCluster(AddressInCluster(at, i));
    }
  }
  const int64_t base = place.batch * params.out_batch + int64_t{place.group} * params.out_group + n;
  const Epilogue epilogue(params.epilogue);
  [[maybe_unused]] ChannelTerms<4> terms;
  [[maybe_unused]] Neighbours<T, 4> residual[kRows];
  if constexpr (!Epilogue::kPlain) {
    terms = epilogue.template Terms<4>(place.group * params.gemm_n + n);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (params.epilogue.residual == nullptr || dst[r] < 0) continue;
      residual[r] = epilogue.template Residual<T, 4>(base + int64_t{dst[r]} * params.out_channels);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (dst[r] < 0) continue;
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      if (i >= ranks) break;
      sum[0] += quad[r][i].x;
      sum[1] += quad[r][i].y;
      sum[2] += quad[r][i].z;
      sum[3] += quad[r][i].w;
    }
    const int64_t offset = base + int64_t{dst[r]} * params.out_channels;
    auto store = [&](auto* out) {
      if constexpr (!Epilogue::kPlain) {
        epilogue.Scale(terms, sum);
        epilogue.template Add<T>(sum, residual[r], offset);
        Activate(params.epilogue.activation, params.epilogue.negative_slope, sum);
      }
      StoreQuad(out + offset, sum);
    };
    if (Epilogue::kPlain && params.out_is_f32) {
      store(static_cast<float*>(params.out));
    } else {
      store(static_cast<T*>(params.out));
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
  if (warpgroup == 0) {
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (ElectOne()) {
      ProducePart<kOp, T, Tile>(params, maps, place, of, part, warp, ring, barriers);
    }
    __syncwarp();
  } else {
    WaitForInputs();
    ConsumePart<kOp, T, Tile, Epilogue>(params, place, of, part.k_blocks, ring, barriers);
  }
  if (params.cluster.divisor == 1) return;
  ClusterArrive();
  ClusterWait();
  // 256 threads take 16 of the tile's 64 rows at a time: 32 and more in two CTAs, 80 in five.
  static_assert(Tile::kTileM * Tile::kTileN == 64 * 64 && Tile::kThreads == 256);
  if (params.cluster.divisor <= 4) {
    ReduceParts<kOp, T, Tile, Epilogue, 2, 4>(params, place, of, rank, ring);
  } else {
    ReduceParts<kOp, T, Tile, Epilogue, 1, kMaxClusterCtas>(params, place, of, rank, ring);
  }
  __syncwarp();
  // The parts were read before the sums that are stored by now could be formed.
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
