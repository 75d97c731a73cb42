// winograd, fused row: F(m, 3) along W inside an implicit GEMM on wgmma (sm_90a).
//
//     rows = tiles of m outputs along W, columns = output channels of a group,
//     reduction = 3 filter rows x input channels, one GEMM for each of the m + 2 points
//
// A CTA computes 64 positions by 128 channels at all points: consumer warpgroup 0 the first half of
// the points, warpgroup 1 the second. V is computed in registers from pixels in shared memory and
// is wgmma's operand A; it is never stored. Both CTAs of a cluster have the same channels, and each
// multicasts half of U.
//
//     stage of x     | residue 0: 65 positions x 128 bytes, pitch 72 | residue 1 | ... m - 1
//     slot of U      | point 0: 128 columns x 64 bytes | point 1 | ... m + 1      row_filter.h
//
// A stage holds 64 channels of the pixels under one filter row: TMA loads them with a stride of m,
// once for each residue of the pixel within its tile. Input j of the tile at position i is residue
// j % m of position i + j / m. An output row therefore has one position more than tiles, which is
// computed and dropped: 3 % of rows 112 wide, 12 % of rows 28 wide. ldmatrix of 8 positions by 16
// bytes of a residue is a fragment of A without bank conflicts, because the swizzle depends on the
// position.
//
// m = 4: 2 stages of 36 KB, 3 slots of 48 KB. Registers: producer 24, consumers 240, of which 192
// accumulators, 12 for V, 12 for pixels being loaded.
//
// Producer warp 0: U; warp 1: x. Full, Empty: stages, read by eight warps. FullFilter, EmptyFilter:
// slots; a slot is empty when the warpgroups of both CTAs have read it. While one warpgroup
// computes V for 16 channels, the other's products run. At the end of a tile the warpgroups
// exchange accumulators through the last slot, so that each has all points of 64 channels,
// transforms them and stores; the other slots and stages fill meanwhile. Both CTAs refill that slot
// after both have read it: after a proxy fence and a barrier of the warpgroup, its threads 0 and 1
// signal one CTA each.
//
// Refused (fused_row_plan.cc): what the family refuses, groups whose channels are not a multiple of
// 64, rows beyond the fields of a tensor map.
#ifndef JAXCONV_CUDA_WINOGRAD_FUSED_ROW_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_FUSED_ROW_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/ptx/cluster_sm90.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/winograd/amax.cuh"
#include "cuda/winograd/fused_row_params.h"
#include "cuda/winograd/fused_row_plan.h"
#include "cuda/winograd/fused_row_store_sm90.cuh"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {

// The order of a tile's loads: filter rows fastest, then channels, so that later filter rows find
// the pixels of the first in L2.
template <class Tile>
__device__ __forceinline__ void ProducePixels(const RowParams& params, const CUtensorMap* map,
                                              uint32_t ring, const Barriers<Tile>& barriers) {
  RingPlace<Tile::kStages> stage;
  const int32_t stride = gridDim.x / kRowClusterCtas;
  for (int32_t index = ClusterId(); index < params.tiles; index += stride) {
    const RowTilePlace place(params, index);
    const RowPosition first(params, place.m_tile * kRowTilePositions);
    const int32_t w = params.lower_w + first.tile * Tile::m, h = params.lower_h + first.row;
    for (int32_t c = 0; c < params.reduction; c += kRowLoadChannels) {
#pragma unroll 1
      for (int32_t r = 0; r < kTaps; ++r) {
        BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
        const uint32_t barrier = barriers.Full(stage.slot);
        const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
        BarrierArriveExpect(barrier, Tile::m * Tile::kBoxBytes);
#pragma unroll
        for (int j = 0; j < Tile::m; ++j) {
          CopyIm2col2d(shared + j * Tile::kResidueBytes, map, barrier,
                       place.group * params.reduction + c, w, h, first.image, params.offset_w + j,
                       params.offset_h + r);
        }
        stage.Next();
      }
    }
  }
}

template <class Tile>
__device__ __forceinline__ void ProduceFilter(const RowParams& params, const CUtensorMap* map,
                                              uint32_t ring, const Barriers<Tile>& barriers) {
  constexpr int32_t kRows = Tile::kSlotBytes / kFilterRowBytes;  // of a slot
  RingPlace<Tile::kFilterSlots> slot;
  const int32_t stride = gridDim.x / kRowClusterCtas;
  const int32_t part = ClusterRank() * Tile::kFilterBoxRows;
  const uint32_t slots = ring + Tile::kFilterAt + part * kFilterRowBytes;
  for (int32_t index = ClusterId(); index < params.tiles; index += stride) {
    const RowTilePlace place(params, index);
    int32_t row = part + place.group * params.filter_group + place.n_tile * params.filter_columns;
    for (int32_t left = params.reduction_blocks; left > 0; left -= 2) {
#pragma unroll 1
      for (int32_t r = 0; r < kTaps; ++r) {
#pragma unroll 1
        for (int32_t i = 0; i < min(2, left); ++i) {
          BarrierWait(barriers.EmptyFilter(slot.slot), slot.parity ^ 1);
          const uint32_t barrier = barriers.FullFilter(slot.slot);
          BarrierArriveExpect(barrier, Tile::kSlotBytes);
          CopyTile2dToCluster(slots + slot.slot * Tile::kSlotBytes, map, barrier, 0,
                              row + i * (kTaps * kRows), (1 << kRowClusterCtas) - 1);
          slot.Next();
        }
        row += kRows;
      }
      row += kTaps * kRows;
    }
  }
}

template <typename T, class Tile, int kWarpgroup>
__device__ __forceinline__ void ConsumeRows(const RowParams& params, uint32_t ring,
                                            const Barriers<Tile>& barriers, float scale_x,
                                            float scale_w) {
  const ToFloat16<T> to_float16(scale_x);
  const RowUnscale<T> unscale(scale_x, scale_w);
  RingPlace<Tile::kStages> stage;
  RingPlace<Tile::kFilterSlots> slot;
  PixelReader<Tile, kWarpgroup> pixels(ring);
  const int32_t stride = gridDim.x / kRowClusterCtas;
  for (int32_t index = ClusterId(); index < params.tiles; index += stride) {
    RowSums<Tile> sums;
    MultiplyTile<T, Tile, kWarpgroup>(params, ring, barriers, to_float16, stage, slot, pixels,
                                      sums);
    StoreRowTile<T, Tile, kWarpgroup>(params, RowTilePlace(params, index), sums,
                                      ring + Tile::kFilterAt + slot.slot * Tile::kSlotBytes,
                                      unscale);
    // TMA copies will overwrite memory that ordinary stores wrote.
    FenceForCopies();
    NamedBarrierSync(2 + kWarpgroup, 128);
    ReleaseSlot(barriers, slot.slot);
    slot.Next();
  }
}

template <class Tag>
__global__ void __launch_bounds__(Tag::Tile::kThreads, 1)
    FusedRowKernel(const __grid_constant__ RowParams params,
                   const __grid_constant__ CUtensorMap map,
                   const __grid_constant__ CUtensorMap filter_map) {
  using Tile = typename Tag::Tile;
  using T = typename ElementOf<Tag::kType>::Type;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[Barriers<Tile>::kCount];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const Barriers<Tile> barriers{SharedAddress(barrier_words)};
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::kStages; ++s) {
      BarrierInit(barriers.Full(s), 1);
      BarrierInit(barriers.Empty(s), 8);
    }
    for (int s = 0; s < Tile::kFilterSlots; ++s) {
      BarrierInit(barriers.FullFilter(s), 1);
      BarrierInit(barriers.EmptyFilter(s), 2 * kRowClusterCtas);
    }
    BarrierInitFence();
    PrefetchTensorMap(&map);
    PrefetchTensorMap(&filter_map);
  }
  // Before copies and arrivals from the other CTA, the barriers must be initialised.
  ClusterArrive();
  ClusterWait();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    LowerRegisters<24>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp < 2 && ElectOne()) {
      WaitForPrecedingGrids();
      if (warp == 0) {
        ProduceFilter(params, &filter_map, ring, barriers);
      } else {
        ProducePixels(params, &map, ring, barriers);
      }
    }
    __syncwarp();
  } else {
    RaiseRegisters<240>();
    WaitForInputs();
    const float scale_x = WarpScale(params.x_scale), scale_w = WarpScale(params.w_scale);
    if (warpgroup == 1) {
      ConsumeRows<T, Tile, 0>(params, ring, barriers, scale_x, scale_w);
    } else {
      ConsumeRows<T, Tile, 1>(params, ring, barriers, scale_x, scale_w);
    }
  }
  // Until its end, the other CTA copies to this CTA's shared memory and arrives at its barriers.
  ClusterArrive();
  ClusterWait();
}

// The tensor map of the input. `upper`: from MakeRowParams.
inline Status EncodePixels(const LaunchParams& launch, const RowParams& params,
                           const int32_t* upper, const void* input, CUtensorMap* map) {
  const Geometry& g = launch.geometry;
  DenseTensor tensor;
  tensor.dtype = launch.dtype;
  tensor.rank = 4;
  tensor.address = input;
  tensor.extent[0] = g.in_channels();
  tensor.extent[1] = g.in_w;
  tensor.extent[2] = g.in_h;
  tensor.extent[3] = g.images;
  const int32_t lower[2] = {params.lower_w, params.lower_h}, step[2] = {launch.m, 1};
  return EncodeIm2colMap(tensor, lower, upper, step, kRowBoxPixels, map);
}

// The tensor map of the filter; a box is half a slot.
template <class Tile>
Status EncodeFilter(const RowParams& params, int64_t groups, const void* filter, CUtensorMap* map) {
  DenseTensor tensor;
  tensor.dtype = DType::kF16;
  tensor.rank = 2;
  tensor.address = filter;
  tensor.extent[0] = kFilterRowBytes / 2;
  tensor.extent[1] = groups * params.filter_group;
  const int32_t box[2] = {kFilterRowBytes / 2, Tile::kFilterBoxRows};
  return EncodeTiledMap(tensor, box, map, /*swizzled=*/false);
}

template <Op kOp_, DType kType_, int m>
struct FusedRow {
  static constexpr Op kOp = kOp_;
  static constexpr DType kType = kType_;
  using Tile = RowTile<m>;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<LaunchParams>();
    const StagePointers at = Locate(launch, operands);
    JAXCONV_RETURN_IF_ERROR(LaunchFilterStage(launch, at, stream));
    int32_t upper[2];
    RowParams params = MakeRowParams(launch, upper);
    params.out = at.output;
    params.x_scale = at.input_scale;
    params.w_scale = at.filter_scale;
    CUtensorMap map, filter_map;
    JAXCONV_RETURN_IF_ERROR(EncodePixels(launch, params, upper, at.input, &map));
    JAXCONV_RETURN_IF_ERROR(EncodeFilter<Tile>(params, launch.geometry.groups, at.u, &filter_map));
    LaunchConfig config;
    config.grid = static_cast<unsigned>(launch.ctas);
    config.threads = Tile::kThreads;
    config.shared_bytes = Tile::kSharedBytes;
    config.cluster = kRowClusterCtas;
    config.overlaps = true;
    return jaxconv::Launch<FusedRowKernel<Tag>>(plan.kernel->name, config, stream, params, map,
                                                filter_map);
  }
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FUSED_ROW_SM90_CUH_
