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
// Barriers: WgradFragmentsKernel. Persistent; split-K as in wgrad_sm90.cuh.
//
// Refused, beside what wgrad_sm90.cuh refuses: K / groups that is not a multiple of 32.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_MMA_SYNC_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_MMA_SYNC_SM90_CUH_

#include <cstdint>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/igemm_wgmma/wgrad_boxes_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_fragments_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_wgmma {

// kWarpsM x kWarpsN warps of kWarpM x kWarpN, two consumer warpgroups in all.
template <int kWarpsM_, int kWarpsN_, int kWarpM_, int kWarpN_, int kStages_>
struct MmaSyncTile
    : WgradBoxesTile<kWarpsM_ * kWarpM_, kWarpsN_ * kWarpN_, kStages_, /*kProducers=*/1> {
  using Base = WgradBoxesTile<kWarpsM_ * kWarpM_, kWarpsN_ * kWarpN_, kStages_, 1>;
  static_assert(kWarpsM_ * kWarpsN_ == Base::kConsumerWarps);
  static constexpr int kWarpsN = kWarpsN_, kWarpM = kWarpM_, kWarpN = kWarpN_;
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
        LoadPair((a[half] ^ (i % 2 * 64)) + stage + i / 2 * Base::kBoxBytes + step * 1024,
                 &to.a[i][2 * half], &to.a[i][2 * half + 1]);
      }
#pragma unroll
      for (int j = 0; j < kWarpN / 8; ++j) {
        to.b[j][half] =
            LoadWord((b[half] ^ (j % 4 * 32)) + stage + j / 4 * Base::kBoxBytes + step * 1024);
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

template <Op kOp, DType kType, int kWarpsM, int kWarpsN, int kWarpM, int kWarpN, int kStages>
struct WgradMmaSync
    : WgradBoxesForm<kOp, kType, MmaSyncTile<kWarpsM, kWarpsN, kWarpM, kWarpN, kStages>> {
  using Tile = MmaSyncTile<kWarpsM, kWarpsN, kWarpM, kWarpN, kStages>;

  template <class Tag>
  static __device__ __forceinline__ void Consume(const Params& params, uint32_t ring,
                                                 const Barriers<Tile>& barriers) {
    ConsumeMmaSyncStages<Tile, typename Tag::Epilogue>(params, ring, barriers);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_MMA_SYNC_SM90_CUH_
