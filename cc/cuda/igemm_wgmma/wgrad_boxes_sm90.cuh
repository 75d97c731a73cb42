// What weight gradients of float32 operands share if their rows are blocks of 32 channels under taps
// (sm_90a): the tile's shared memory, the producer, the tensor maps.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_BOXES_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_BOXES_SM90_CUH_

#include <cstdint>

#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/igemm_wgmma/launch_sm90.cuh"
#include "cuda/igemm_wgmma/loads_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/igemm_wgmma/wgrad_fragments_sm90.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_wgmma {

// Shared memory: barriers and the producers' lists of boxes in 1 KB, then the stages. A stage holds
// the boxes of x, those of dy, and kRowsBytes for dy as kTransposers warps rewrite it.
template <int kTileM_, int kTileN_, int kStages_, int kProducers_, int kTransposers_ = 0,
          int kRowsBytes = 0>
struct WgradBoxesTile {
  static constexpr int kWarpgroups = 2;  // consumers
  static constexpr int kProducers = kProducers_, kTransposers = kTransposers_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_;
  static constexpr int kThreads = (kWarpgroups + (kTransposers > 0 ? 2 : 1)) * 128;
  static constexpr int kConsumerWarps = kWarpgroups * 4;
  static constexpr int kStages = kStages_;
  static constexpr int kFilterSlots = kTransposers > 0 ? kStages : 0, kStationary = 0;
  static constexpr int kPixels = 32;               // of a k-block
  static constexpr int kBoxBytes = kPixels * 128;  // of 32 channels
  static constexpr int kBytesA = kTileM / 32 * kBoxBytes, kBytesB = kTileN / 32 * kBoxBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB + kRowsBytes;
  static constexpr int kBoxesAt = 512;  // the lists of boxes; in front of them, barriers
  static constexpr int kBarrierBytes = kBoxesAt;
  static constexpr int kRingAt = 1024;
  // 1024 more to align the ring.
  static constexpr int kSharedBytes = kRingAt + kStages * kStageBytes + 1024;
  static_assert(kSharedBytes + 1024 <= 232448, "227 KB a CTA, barriers among them");
  static_assert(kStageBytes % 1024 == 0);
};

// Whether one copy brings all rows of a k-block of x: the blocks of 32 channels are then a dimension
// of the tensor map, as those of dy are.
__host__ __device__ inline bool LoadsAllRows(const Params& params) {
  return params.rank == 0 && params.row_channels % 32 == 0;
}

// A producer, one thread. A tile's rows are boxes from the list of taps x channel blocks. The boxes'
// coordinates lie in shared memory, because registers would spill. kProducers take turns at
// k-blocks; this one's next is `turn` k-blocks ahead.
template <class Tile>
__device__ __forceinline__ void ProduceWgradBoxes(const Params& params, const Maps& maps,
                                                  uint32_t ring, const Barriers<Tile>& barriers,
                                                  int turn) {
  constexpr int kBoxesA = Tile::kTileM / 32, kProducers = Tile::kProducers;
  static_assert(Tile::kBoxesAt + kProducers * kBoxesA * 16 <= Tile::kRingAt);
  const uint32_t list = ring + Tile::kBoxesAt + turn * kBoxesA * 16;
  const bool all_rows = LoadsAllRows(params);
  const ResidueClass& of = params.residue_class[0];
  const CUtensorMap* map_a = &maps.a[0];
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const int32_t k_block_of_dy = (place.group * params.b_group + place.n_tile * Tile::kTileN) / 32;
    const int boxes =
        min(kBoxesA, params.filter_taps * static_cast<int32_t>(params.channel_blocks.divisor) -
                         place.m_tile * kBoxesA);
    for (int i = 0; i < boxes; ++i) {
      int32_t tap, channel_block;
      params.channel_blocks.Divmod(place.m_tile * kBoxesA + i, &tap, &channel_block);
      const int32_t t1 = tap / of.taps[0];
      const uint32_t box[4] = {
          static_cast<uint32_t>(place.group * params.a_group + channel_block * 32),
          static_cast<uint32_t>(of.offset0[0] + (tap - t1 * of.taps[0]) * of.offset_step[0]),
          static_cast<uint32_t>(of.offset0[1] + t1 % of.taps[1] * of.offset_step[1]),
          static_cast<uint32_t>(of.offset0[2] + t1 / of.taps[1] * of.offset_step[2])};
      StoreChunk(list + i * 16, box);
    }
    const int32_t first = place.slice * params.k_blocks_per_slice;
    const int32_t k_blocks = min(params.k_blocks_per_slice, of.k_blocks - first);
    WaitForPrecedingGrids();
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
      if (turn > 0) {
        --turn;
        stage.Next();
        continue;
      }
      turn = kProducers - 1;
      const int32_t pixel = (first + k_block) * Tile::kPixels;
      const PixelPlace at(params, of, pixel, params.pixels, place.batch);
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + Tile::kRingAt + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, (all_rows ? kBoxesA : boxes) * Tile::kBoxBytes + Tile::kBytesB);
      CopyTile4d(shared + Tile::kBytesA, &maps.b, barrier, 0, pixel, k_block_of_dy, place.batch);
      if (all_rows) {
        CopyTile3d(shared, map_a, barrier, 0, at.x,
                   place.group * (params.a_group / 32) + place.m_tile * kBoxesA);
        stage.Next();
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < boxes; ++i) {
        const uint4 box = LoadChunk(list + i * 16);
        LoadBox(params.rank, shared + i * Tile::kBoxBytes, map_a, barrier,
                static_cast<int32_t>(box.x), at, box.y, box.z, box.w);
      }
      stage.Next();
    }
  }
}

// Launches with tensor maps of the boxes of x and of dy that the producer loads.
template <auto kKernel, class Tag, bool kWholeF32>
Status LaunchWgradBoxes(const Plan& plan, const Operands& operands, void* stream) {
  return LaunchWithMaps<kKernel, Tag, Maps>(
      plan, operands, stream, /*overlaps=*/true,
      [](const LaunchParams& launch, const Params& params, const void* a, const void* b,
         Maps* maps) {
        using Tile = typename Tag::Tile;
        if (LoadsAllRows(params)) {
          // x as (blocks of 32 channels, pixels, channels).
          DenseTensor x;
          x.dtype = Tag::kType;
          x.whole_f32 = kWholeF32;
          x.rank = 3;
          x.address = a;
          x.extent[0] = 32;
          x.extent[1] =
              launch.a_images * launch.a_extent[0] * launch.a_extent[1] * launch.a_extent[2];
          x.extent[2] = launch.a_channels / 32;
          x.stride[1] = launch.a_channels;
          x.stride[2] = 32;
          const int32_t box[3] = {32, Tile::kPixels, Tile::kTileM / 32};
          JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(x, box, &maps->a[0]));
        } else {
          JAXCONV_RETURN_IF_ERROR(
              EncodeActivations(launch, Tag::kType, a, Tile::kPixels, maps, kWholeF32));
        }
        // dy as (batch, blocks of 32 columns, pixels, columns): one copy loads a tile's boxes.
        DenseTensor dy;
        dy.dtype = Tag::kType;
        dy.whole_f32 = kWholeF32;
        dy.rank = 4;
        dy.address = b;
        dy.extent[0] = 32;
        dy.extent[1] = launch.b_rows;
        dy.extent[2] = launch.b_columns / 32;
        dy.extent[3] = launch.b_taps;
        dy.stride[1] = launch.b_columns;
        dy.stride[2] = 32;
        dy.stride[3] = launch.b_rows * launch.b_columns;
        const int32_t box[4] = {32, Tile::kPixels, Tile::kTileN / 32, 1};
        return EncodeTiledMap(dy, box, &maps->b);
      });
}

// A base of the tags. kWholeF32: TMA does not round float32 to TF32.
template <Op kOp, DType kType_, class Tile_, bool kWholeF32 = false>
struct WgradBoxesForm : Tile_ {
  static_assert(kOp == Op::kWgrad && kType_ == DType::kF32);
  static constexpr DType kType = kType_;
  using Tile = Tile_;
  using TensorMaps = Maps;
  using Epilogue = PlainEpilogue;

  static __device__ __forceinline__ void Prefetch(const Maps& maps) {
    PrefetchTensorMap(&maps.a[0]);
    PrefetchTensorMap(&maps.b);
  }
  static __device__ __forceinline__ void Produce(const Params& params, const Maps& maps,
                                                 uint32_t ring, const Barriers<Tile>& barriers,
                                                 int turn) {
    ProduceWgradBoxes(params, maps, ring, barriers, turn);
  }
  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchWgradBoxes<WgradFragmentsKernel<Tag>, Tag, kWholeF32>(plan, operands, stream);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_BOXES_SM90_CUH_
