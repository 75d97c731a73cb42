// igemm_wgmma, wgrad of float32 operands in TF32: mma.sync on boxes that TMA loads (sm_90a).
//
//     rows = blocks of 32 channels under taps, columns = K / groups, reduction = output pixels
//
// wgmma reads TF32 operands K-major only, and both of wgrad's operands are MN-major: a row of
// shared memory is 32 channels of one pixel. mma.sync takes its fragments from registers, in any
// order: the store undoes a permutation of the rows, and a permutation of the reduction is harmless
// if both operands share it. Lane 4 g + t reads pixel 2 t for the first half of an instruction's
// reduction and 2 t + 1 for the second:
//
//     A: 8 bytes, channels 2 g and 2 g + 1, which are rows g and g + 8: the halves of a fragment
//     B: 4 bytes, column g
//
// Chunk c (16 bytes) of pixel p lies at c ^ p % 8: lanes that read together differ in 2 t, so there
// are no bank conflicts, and the registers have the order that the instruction takes.
//
//     producer warpgroup   one thread. A k-block is 32 pixels: for each 32 channels of the tile's
//                          rows one im2col box of x under its tap, and one box with all columns of
//                          dy
//     consumers            8 warps of 32x32, which all read every stage
//
// Shared memory: barriers and the producer's list of boxes in 1 KB, 8 stages of (16 + 8) KB.
// Registers: producer 56, consumers 224, of which 32 accumulators and two sets of fragments.
// Full(s), Empty(s): as in cooperative_sm90.cuh, with an arrival of every consumer warp. Persistent;
// split-K as in wgrad_sm90.cuh.
//
// Refused, beside what wgrad_sm90.cuh refuses: K / groups that is not a multiple of 32.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_MMA_SYNC_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_MMA_SYNC_SM90_CUH_

#include "cuda/common/epilogue.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/igemm_wgmma/launch_sm90.cuh"
#include "cuda/igemm_wgmma/loads_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/igemm_wgmma/wgrad_fragments_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_wgmma {

// kWarpsM x kWarpsN warps of kWarpM x kWarpN, two consumer warpgroups in all.
template <int kWarpsM_, int kWarpsN_, int kWarpM_, int kWarpN_, int kStages_>
struct MmaSyncTile {
  static constexpr int kWarpgroups = 2;
  static constexpr int kFilterSlots = 0, kStationary = 0;
  static constexpr int kWarpsN = kWarpsN_, kWarpM = kWarpM_, kWarpN = kWarpN_;
  static_assert(kWarpsM_ * kWarpsN_ == kWarpgroups * 4);
  static constexpr int kTileM = kWarpsM_ * kWarpM, kTileN = kWarpsN * kWarpN;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kStages = kStages_;
  static constexpr int kPixels = 32;               // of a k-block
  static constexpr int kBoxBytes = kPixels * 128;  // of 32 channels
  static constexpr int kBytesA = kTileM / 32 * kBoxBytes, kBytesB = kTileN / 32 * kBoxBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBoxesAt = 512;  // the producer's list of boxes; in front of it, barriers
  static constexpr int kRingAt = 1024;
  // 1024 more to align the ring.
  static constexpr int kSharedBytes = kRingAt + kStages * kStageBytes + 1024;
  static_assert(kSharedBytes + 1024 <= 232448, "227 KB a CTA, barriers among them");
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr int kInstructions = 4;  // along the reduction of a stage

  struct Accumulators {
    float value[kWarpM / 16][kWarpN / 8][4];
  };
  struct Fragments {
    uint32_t a[kWarpM / 16][4], b[kWarpN / 8][2];
  };

  // Where a lane's first elements of A or B lie in a box; later ones differ in the chunk's bits.
  static __device__ __forceinline__ uint32_t LaneOffset(int half, int bytes) {
    const int g = threadIdx.x % 32 / 4, pixel = threadIdx.x % 4 * 2 + half;
    return pixel * 128 + ((g * bytes / 16) ^ pixel) * 16 + g * bytes % 16;
  }

  // `a`, `b`: LaneOffset of both halves in the first boxes of this warp.
  static __device__ __forceinline__ void Read(const uint32_t (&a)[2], const uint32_t (&b)[2],
                                              uint32_t stage, int step, Fragments& to) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kWarpM / 16; ++i) {
        LoadPair((a[half] ^ (i % 2 * 64)) + stage + i / 2 * kBoxBytes + step * 1024,
                 &to.a[i][2 * half], &to.a[i][2 * half + 1]);
      }
#pragma unroll
      for (int j = 0; j < kWarpN / 8; ++j) {
        to.b[j][half] =
            LoadWord((b[half] ^ (j % 4 * 32)) + stage + j / 4 * kBoxBytes + step * 1024);
      }
    }
  }

  static __device__ __forceinline__ void Multiply(const Fragments& from, Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i) {
#pragma unroll
      for (int jj = 0; jj < kWarpN / 8; ++jj) {
        // In serpentine order, so that consecutive instructions share an operand.
        const int j = i % 2 == 0 ? jj : kWarpN / 8 - 1 - jj;
        MultiplyAdd<float>(acc.value[i][j], from.a[i], from.b[j][0], from.b[j][1]);
      }
    }
  }
};

// Whether one copy brings all rows of a k-block of x: the blocks of 32 channels are then a dimension
// of the tensor map, as those of dy are.
__host__ __device__ inline bool LoadsAllRows(const Params& params) {
  return params.rank == 0 && params.row_channels % 32 == 0;
}

// A producer, one thread. A tile's rows are boxes from the list of taps x channel blocks. The boxes'
// coordinates lie in shared memory, because registers would spill. kProducers take turns at
// k-blocks; this one's next is `turn` k-blocks ahead.
template <class Tile, int kProducers = 1>
__device__ __forceinline__ void ProduceMmaSyncStages(const Params& params, const Maps& maps,
                                                     uint32_t ring, const Barriers<Tile>& barriers,
                                                     int turn = 0) {
  constexpr int kBoxesA = Tile::kTileM / 32;
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

// The consumer warps; each works on every stage. They read the fragments of one instruction (8 of
// the reduction) while they multiply those of the previous one, across stage boundaries too.
template <class Tile, class Epilogue>
__device__ __forceinline__ void ConsumeMmaSyncStages(const Params& params, uint32_t ring,
                                                     const Barriers<Tile>& barriers) {
  const int warp = threadIdx.x / 32 - 4;
  const int32_t m_warp = warp / Tile::kWarpsN * Tile::kWarpM;
  const int32_t n_warp = warp % Tile::kWarpsN * Tile::kWarpN;
  uint32_t a[2], b[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    a[half] = ring + Tile::kRingAt + m_warp / 32 * Tile::kBoxBytes + Tile::LaneOffset(half, 8);
    b[half] = ring + Tile::kRingAt + Tile::kBytesA + n_warp / 32 * Tile::kBoxBytes +
              Tile::LaneOffset(half, 4);
  }
  const ResidueClass& of = params.residue_class[0];
  RingPlace<Tile::kStages> stage;
  typename Tile::Fragments fragments[2];
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const int32_t k_blocks =
        min(params.k_blocks_per_slice, of.k_blocks - place.slice * params.k_blocks_per_slice);
    typename Tile::Accumulators acc = {};
    BarrierWait(barriers.Full(stage.slot), stage.parity);
    uint32_t at = stage.slot * Tile::kStageBytes;
    Tile::Read(a, b, at, 0, fragments[0]);
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
#pragma unroll
      for (int s = 0; s < Tile::kInstructions; ++s) {
        if (s + 1 < Tile::kInstructions) {
          Tile::Read(a, b, at, s + 1, fragments[(s + 1) % 2]);
          Tile::Multiply(fragments[s % 2], acc);
        } else {
          const uint32_t empty = barriers.Empty(stage.slot);
          stage.Next();
          at = stage.slot * Tile::kStageBytes;
          if (k_block + 1 < k_blocks) {
            BarrierWait(barriers.Full(stage.slot), stage.parity);
            Tile::Read(a, b, at, 0, fragments[0]);
          }
          Tile::Multiply(fragments[s % 2], acc);
          // All fragments of the stage have been read: it is free.
          __syncwarp();
          if (threadIdx.x % 32 == 0) BarrierArrive(empty);
        }
      }
    }
    const auto epilogue = MakeEpilogue<Epilogue>(params.epilogue, params.slice_elements > 0);
#pragma unroll
    for (int i = 0; i < Tile::kWarpM / 16; ++i) {
      StoreWgradFragment<Tile::kWarpN, /*kWide=*/false>(
          params, place, acc.value[i][0], place.n_tile * Tile::kTileN + n_warp,
          place.m_tile * Tile::kTileM + m_warp + i * 16, epilogue);
    }
    FinishTile<Tile>(params, place, of, epilogue);
  }
}

template <class Tag>
__global__ void __launch_bounds__(Tag::kThreads, 1)
    WgradMmaSyncKernel(const __grid_constant__ Params params, const __grid_constant__ Maps maps) {
  using Tile = typename Tag::Tile;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  // Derived from the ring's base address: a second base address overflows the uniform registers.
  const Barriers<Tile> barriers{ring};
  static_assert(Barriers<Tile>::kCount * 8 <= Tile::kBoxesAt);
  if (threadIdx.x == 0) {
    barriers.Init(Tile::kWarpgroups * 4);
    PrefetchTensorMap(&maps.a[0]);
    PrefetchTensorMap(&maps.b);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    LowerRegisters<Tile::kProducerRegisters>();
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && ElectOne()) {
      ProduceMmaSyncStages(params, maps, ring, barriers);
    }
  } else {
    RaiseRegisters<Tile::kConsumerRegisters>();
    WaitForInputs();
    ConsumeMmaSyncStages<Tile, typename Tag::Epilogue>(params, ring, barriers);
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

template <Op kOp, DType kType_, int kWarpsM, int kWarpsN, int kWarpM, int kWarpN, int kStages>
struct WgradMmaSync : MmaSyncTile<kWarpsM, kWarpsN, kWarpM, kWarpN, kStages> {
  static_assert(kOp == Op::kWgrad && kType_ == DType::kF32);
  static constexpr DType kType = kType_;
  using Tile = MmaSyncTile<kWarpsM, kWarpsN, kWarpM, kWarpN, kStages>;
  using Epilogue = PlainEpilogue;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchWgradBoxes<WgradMmaSyncKernel<Tag>, Tag, /*kWholeF32=*/false>(plan, operands,
                                                                               stream);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_MMA_SYNC_SM90_CUH_
