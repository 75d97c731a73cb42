// igemm_wgmma where tiles are few (small batches, small maps): the CTAs of a cluster share one
// tile, each sums a part of the reduction, and they add the parts up through each other's shared
// memory. fprop and dgrad; the map to a product is igemm_wgmma_sm90.cuh's, tile by tile.
//
//     cluster of 3, tile of 64 x 64, 18 steps     afterwards, rows of 64 columns
//     rank 0 | steps  0 ...  5 | 64 x 64 float    row 0, 3, 6 ...: rank 0 adds 0 + 1 + 2, stores
//     rank 1 | steps  6 ... 11 | 64 x 64 float    row 1, 4, 7 ...: rank 1 adds 0 + 1 + 2, stores
//     rank 2 | steps 12 ... 17 | 64 x 64 float    row 2, 5, 8 ...: rank 2 adds 0 + 1 + 2, stores
//
// No workspace, no second kernel, and always the same order: the same bits in every run.
//
// Such a layer takes a few microseconds, so everything is arranged to have the loads under way
// soon: a CTA has one tile, the four warps of the producer warpgroup take turns at the steps (one
// needs 350 clocks for a step's two copies, more than a 64 x 64 tile multiplies), and the ring is
// small enough for two CTAs an SM, so that the next kernel's are set up while this one's finish.
// Shared memory: ring of 96 KB, which afterwards holds the partial sums; barriers.
//
// Full(s), Empty(s): as in igemm_wgmma_sm90.cuh. Cluster barriers: parts are written; parts are
// read, nobody needs this CTA's shared memory any more.
#ifndef JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_CLUSTER_SM90_CUH_
#define JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_CLUSTER_SM90_CUH_

#include "cuda/device/epilogue.cuh"
#include "cuda/kernels/igemm_wgmma_sm90.cuh"
#include "cuda/kernels/overlapping_launch.cuh"
#include "cuda/ptx/cluster_sm90.cuh"
#include "cuda/ptx/grid_dependency_sm90.cuh"

namespace jaxconv {

//  math warpgroups, pingpong, 64-row blocks of each, columns (twice), stages
template <>
struct WgmmaTileOf<WgmmaTileId::k64x64Cluster> : WgmmaTile<1, false, 1, 64, 0, 6> {};

// The ring, and the way from the dynamic segment's start to a multiple of 1024.
template <class Tile>
inline constexpr int kWgmmaClusterSharedBytes = Tile::kStages * Tile::kStageBytes + 1024;

// Partial sums in shared memory, rows of float32: chunk c (16 bytes) of row r lies at c ^ r % 4 *
// 2, so that neither fragments nor rows conflict.
template <class Tile>
__device__ __forceinline__ uint32_t PartialChunk(uint32_t partial, int row, int chunk) {
  return partial + row * (Tile::kTileN * 4) + (chunk ^ (row % 4 * 2)) * 16;
}

// The part of a tile's reduction that is one CTA's; it may be empty.
struct WgmmaPart {
  int32_t first, steps;

  __device__ __forceinline__ WgmmaPart(const IgemmWgmmaParams& params, const WgmmaPhase& phase,
                                       int32_t rank) {
    first = params.cluster.Div(rank * phase.steps);
    steps = params.cluster.Div((rank + 1) * phase.steps) - first;
  }
};

// One thread of each producer warp: every fourth step.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ void ProduceWgmmaPart(const IgemmWgmmaParams& params,
                                                 const WgmmaMaps& maps, const WgmmaTilePlace& place,
                                                 const WgmmaPhase& phase, const WgmmaPart& part,
                                                 int32_t warp, uint32_t ring,
                                                 const WgmmaBarriers<Tile>& barriers) {
  constexpr int kProducers = 4;
  const WgmmaPixel pixel(params, phase, place.m_tile * Tile::kTileM, phase.rows, place.batch);
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int boxes = WgmmaFilterBoxes<Tile>(params, n_first);
  const int32_t a_channel = place.group * params.a_group + phase.channel0;
  const int32_t b_channel = place.group * params.b_group;
  const int32_t tap_of_batch = place.batch * params.filter_taps;
  WgmmaStep<false> step(phase, part.first + warp);
  WaitForPrecedingGrids();
  LetNextGridStart();
  for (int32_t i = warp; i < part.steps; i += kProducers) {
    const uint32_t round = i / Tile::kStages, slot = i % Tile::kStages;
    const uint32_t barrier = barriers.Full(slot);
    const uint32_t shared = ring + slot * Tile::kStageBytes;
    BarrierWait(barriers.Empty(slot), round % 2 ^ 1);
    BarrierArriveExpect(barrier, Tile::kBytesA + boxes * 8192);
    CopyWgmmaFilter<kOp, T, Tile>(shared + Tile::kBytesA, &maps.b, barrier, boxes, n_first,
                                  phase.channel0 + step.slab * kWgmmaStepChannels<T>, b_channel,
                                  tap_of_batch + step.Tap(phase));
    CopyWgmmaPixels<T>(params, phase, step, shared, &maps.a[place.phase], barrier, a_channel,
                       pixel);
#pragma unroll
    for (int w = 0; w < kProducers; ++w) step.Next(phase);
  }
}

// The math warpgroup: the CTA's part -> partial sums in place of the ring; of a cluster of one CTA,
// the output.
template <Op kOp, typename T, class Tile, class Epilogue>
__device__ __forceinline__ void ConsumeWgmmaPart(const IgemmWgmmaParams& params,
                                                 const WgmmaTilePlace& place,
                                                 const WgmmaPhase& phase, int32_t steps,
                                                 uint32_t ring,
                                                 const WgmmaBarriers<Tile>& barriers) {
  const bool signals = threadIdx.x % 128 == 0;
  typename Tile::Accumulators acc;
#pragma unroll
  for (int i = 0; i < Tile::kN0 / 2; ++i) acc.first[0][i] = 0;
  RingPlace<Tile::kStages> stage;
  uint32_t last = 0;
  for (int32_t step = 0; step < steps; ++step) {
    BarrierWait(barriers.Full(stage.slot), stage.parity);
    const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
    Tile::template Multiply<T, false, kOp == Op::kFprop>(acc, shared, shared + Tile::kBytesA, true);
    WgmmaWait<1>();
    if (signals && step > 0) BarrierArrive(barriers.Empty(last));
    last = stage.slot;
    stage.Next();
  }
  WgmmaWait<0>();
  const int warp = threadIdx.x / 32 % 4;
  if (params.cluster.divisor == 1) {
    StoreWgmmaTile<kOp, T, Tile, Epilogue>(params, place, phase, acc,
                                           place.m_tile * Tile::kTileM + warp * 16,
                                           ring + warp * Tile::kStagingBytes);
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

// Every so-manieth row of the tile, from all ranks in their order -> the output. A thread has kRows
// rows, of at most kRanks ranks each, under way before it adds them: the additions are ordered, the
// loads need not be.
template <Op kOp, typename T, class Tile, class Epilogue, int kRows, int kRanks>
__device__ __forceinline__ void ReduceWgmmaParts(const IgemmWgmmaParams& params,
                                                 const WgmmaTilePlace& place,
                                                 const WgmmaPhase& phase, int32_t rank,
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
    dst[r] = row < Tile::kTileM
                 ? WgmmaOutputRow<kOp>(params, phase, place.m_tile * Tile::kTileM + row)
                 : -1;
    const uint32_t at = PartialChunk<Tile>(partial, row, chunk);
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      if (dst[r] >= 0 && i < ranks) quad[r][i] = LoadCluster(AddressInCluster(at, i));
    }
  }
  const int64_t base = place.batch * params.out_batch + int64_t{place.group} * params.out_group + n;
  const Epilogue epilogue(params.epilogue);
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
      using Out = std::remove_pointer_t<decltype(out)>;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[e] = epilogue.template operator()<Out>(sum[e], offset + e,
                                                   place.group * params.gemm_n + n + e, true);
      }
      StoreQuad(out + offset, sum);
    };
    if (params.out_is_f32) {
      store(static_cast<float*>(params.out));
    } else {
      store(static_cast<T*>(params.out));
    }
  }
}

template <Op kOp, typename T, WgmmaTileId kTile, class Epilogue>
__global__ void __launch_bounds__(WgmmaTileOf<kTile>::kThreads, 2)
    IgemmWgmmaCluster(const __grid_constant__ IgemmWgmmaParams params,
                      const __grid_constant__ WgmmaMaps maps) {
  using Tile = WgmmaTileOf<kTile>;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[WgmmaBarriers<Tile>::kCount];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const WgmmaBarriers<Tile> barriers{SharedAddress(barrier_words)};
  const WgmmaTilePlace place(params, ClusterId());
  const WgmmaPhase& phase = params.phase[place.phase];
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::kStages; ++s) {
      BarrierInit(barriers.Full(s), 1);
      BarrierInit(barriers.Empty(s), 1);
    }
    BarrierInitFence();
  } else if (threadIdx.x == 32) {
    PrefetchTensorMap(&maps.a[place.phase]);
    PrefetchTensorMap(&maps.b);
  }
  __syncthreads();
  // Of phases of different sizes, the smaller leave tiles empty: for the whole cluster.
  if (place.m_tile * Tile::kTileM >= phase.rows) return;
  const int32_t rank = ClusterRank();
  const WgmmaPart part(params, phase, rank);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (ElectOne()) {
      ProduceWgmmaPart<kOp, T, Tile>(params, maps, place, phase, part, warp, ring, barriers);
    }
    __syncwarp();
  } else {
    WaitForPrecedingGrids();
    LetNextGridStart();
    ConsumeWgmmaPart<kOp, T, Tile, Epilogue>(params, place, phase, part.steps, ring, barriers);
  }
  if (params.cluster.divisor == 1) return;
  ClusterArrive();
  ClusterWait();
  // 256 threads take 16 of the tile's 64 rows at a time: 32 and more in two CTAs, 80 in five.
  static_assert(Tile::kTileM * Tile::kTileN == 64 * 64 && Tile::kThreads == 256);
  if (params.cluster.divisor <= 4) {
    ReduceWgmmaParts<kOp, T, Tile, Epilogue, 2, 4>(params, place, phase, rank, ring);
  } else {
    ReduceWgmmaParts<kOp, T, Tile, Epilogue, 1, kMaxWgmmaCluster>(params, place, phase, rank, ring);
  }
  __syncwarp();
  // The parts were read before the sums that are stored by now could be formed.
  ClusterArriveRelaxed();
  ClusterWait();
}

template <Op kOp, DType kType, WgmmaTileId kTile, class Epilogue = PlainEpilogue>
Status LaunchIgemmWgmmaClusterWith(const IgemmWgmmaParams& params, const WgmmaOperands& operands,
                                   void* stream) {
  using Tile = WgmmaTileOf<kTile>;
  WgmmaMaps maps{};
  const Status encoded = EncodeWgmmaMaps<kOp, kType, kTile>(params, operands, &maps);
  if (!encoded.ok()) return encoded;
  auto kernel = IgemmWgmmaCluster<kOp, typename ElementOf<kType>::Type, kTile, Epilogue>;
  OverlappingLaunch launch;
  launch.cluster = params.cluster.divisor;
  launch.grid = params.tiles * launch.cluster;
  launch.threads = Tile::kThreads;
  launch.shared_bytes = kWgmmaClusterSharedBytes<Tile>;
  return Launch(kernel, launch, stream, params, maps);
}

template <Op kOp, DType kType, WgmmaTileId kTile>
Status LaunchIgemmWgmmaCluster(const IgemmWgmmaParams& params, const WgmmaOperands& operands,
                               void* stream) {
  return LaunchIgemmWgmmaClusterWith<kOp, kType, kTile>(params, operands, stream);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_CLUSTER_SM90_CUH_
