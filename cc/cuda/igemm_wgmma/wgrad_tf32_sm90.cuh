// igemm_wgmma, wgrad of float32 operands in TF32, by wgmma (sm_90a).
//
//     rows = blocks of 32 channels under taps, columns = K / groups, reduction = output pixels
//
// wgmma takes TF32 operands K-major only, but A in registers in any order. TMA loads both operands
// MN-major, a row of 32 channels for each pixel. x is read into registers, and dy is transposed in
// shared memory (wgrad_fragments_sm90.cuh). The boxes are those of wgrad_boxes_sm90.cuh:
//
//     producers    two threads, which take turns at k-blocks of 32 pixels: boxes of x under their
//                  taps, and of dy
//     transposers  a warpgroup: dy -> rows along the reduction, in place; a warp reads a whole box
//                  before it writes
//     consumers    two warpgroups of kBlocks x 64 rows. Each loads its fragments of x and multiplies;
//                  one loads while the other keeps the tensor cores busy
//
// Barriers: WgradFragmentsKernel. Shared memory of 256x128: barriers and the lists of boxes in 1 KB, 4
// stages of (32 + 16) KB. Registers: producers and transposers 64, consumers 192, of which 128
// accumulators and 32 fragments. Persistent; split-K and refusals as in wgrad_mma_sync_sm90.cuh.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_TF32_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_TF32_SM90_CUH_

#include <cstdint>

#include "cuda/igemm_wgmma/wgrad_boxes_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_fragments_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

template <int kBlocks_, int kN_, int kStages_>
struct WgradTf32Tile
    : WgradBoxesTile<2 * kBlocks_ * 64, kN_, kStages_, /*kProducers=*/2, /*kTransposers=*/4> {
  using Base = WgradBoxesTile<2 * kBlocks_ * 64, kN_, kStages_, 2, 4>;
  static constexpr int kBlocks = kBlocks_, kN = kN_;
  static constexpr int kRowsAt = Base::kBytesA;  // the transposed dy, in place
  static constexpr int kProducerRegisters = 64, kConsumerRegisters = 192;
};

template <class Tile, class Epilogue>
__device__ __forceinline__ void ConsumeTf32Columns(const Params& params, uint32_t ring,
                                                   const Barriers<Tile>& barriers) {
  constexpr int kSteps = Tile::kPixels / 8;
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128 - 2, 0);
  const int warp = threadIdx.x / 32 % 4;
  uint32_t of_lane[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    of_lane[half] = ring + Tile::kRingAt +
                    (warpgroup * Tile::kBlocks * 2 + warp / 2) * Tile::kBoxBytes +
                    ChannelPairOffset(warp % 2, threadIdx.x % 4 * 2 + half);
  }
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const int32_t k_blocks = RunOfKBlocks{params}(place);
    float acc[Tile::kBlocks][Tile::kN / 2] = {};
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
      const uint32_t at = stage.slot * Tile::kStageBytes;
      const uint64_t b = KMajorDescriptor(ring + Tile::kRingAt + at + Tile::kRowsAt);
      uint32_t a[kSteps][Tile::kBlocks][4];
      BarrierWait(barriers.Full(stage.slot), stage.parity);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            LoadPair(of_lane[half] + at + i * 2 * Tile::kBoxBytes + step * 1024,
                     &a[step][i][2 * half], &a[step][i][2 * half + 1]);
          }
        }
      }
      BarrierWait(barriers.FullFilter(stage.slot), stage.parity);
      WgmmaFence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < Tile::kBlocks; ++i) {
          WgmmaFromRegisters<Tile::kN>(acc[i], a[step][i], b + step * (32 >> 4), 1);
        }
      }
      WgmmaCommit();
      WgmmaWait<0>();
      __syncwarp();
      if (threadIdx.x % 32 == 0) BarrierArrive(barriers.Empty(stage.slot));
      stage.Next();
    }
    const auto epilogue = MakeEpilogue<Epilogue>(params.epilogue, params.slice_elements > 0);
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) {
      StoreWgradFragment<Tile::kN, /*kWide=*/true>(
          params, place, acc[i], place.n_tile * Tile::kTileN,
          place.m_tile * Tile::kTileM + (warpgroup * Tile::kBlocks + i) * 64 + warp * 16, epilogue);
    }
    FinishTile<Tile>(params, place, params.residue_class[0], epilogue);
  }
}

template <Op kOp, DType kType, int kBlocks, int kN, int kStages>
struct WgradTf32 : WgradBoxesForm<kOp, kType, WgradTf32Tile<kBlocks, kN, kStages>> {
  using Tile = WgradTf32Tile<kBlocks, kN, kStages>;

  static __device__ __forceinline__ void Transpose(const Params& params, uint32_t ring,
                                                   const Barriers<Tile>& barriers) {
    TransposeColumns<Tile, Tile::kPixels / 8>(params, ring, barriers, RunOfKBlocks{params},
                                              StoreColumn());
  }
  template <class Tag>
  static __device__ __forceinline__ void Consume(const Params& params, uint32_t ring,
                                                 const Barriers<Tile>& barriers) {
    ConsumeTf32Columns<Tile, typename Tag::Epilogue>(params, ring, barriers);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_TF32_SM90_CUH_
