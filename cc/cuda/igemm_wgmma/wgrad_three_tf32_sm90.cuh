// igemm_wgmma, wgrad of float32 operands as three TF32 products (common/split_tf32.cuh), by wgmma
// (sm_90a).
//
//     rows = blocks of 32 channels under taps, columns = K / groups, reduction = output pixels
//
// Both operands are MN-major: a row of shared memory is 32 channels of one pixel. The producer is
// that of wgrad_boxes_sm90.cuh, the order of rows and reduction that of wgrad_fragments_sm90.cuh.
// wgmma takes A from registers, in any order, and B from shared memory, K-major only:
//
//     producer    one thread. A k-block is 32 pixels: boxes of x under their taps, and of dy
//     splitters   a warpgroup. A thread reads a column of dy, splits it, and writes both parts as rows
//                 along the reduction, without bank conflicts either way
//     consumers   two warpgroups of 64 rows. Each loads its fragments of x, splits them, and multiplies;
//                 one loads and adds while the other keeps the tensor cores busy
//
// The products of a k-block are added to the sums by FADD.
//
// Barriers: WgradFragmentsKernel, whose transposers are the splitters. Shared memory of 128x128: a
// list of boxes, 3 stages of (16 + 16 + 32) KB. Registers: producer and splitters 64, consumers 192.
//
// Refused: as in wgrad_mma_sync_sm90.cuh.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_THREE_TF32_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_THREE_TF32_SM90_CUH_

#include <cstdint>

#include "cuda/common/split_tf32.cuh"
#include "cuda/igemm_wgmma/wgrad_boxes_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_fragments_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

template <int kN_, int kStages_>
struct WgradThreeTf32Tile : WgradBoxesTile<128, kN_, kStages_, /*kProducers=*/1,
                                           /*kTransposers=*/4, /*kRowsBytes=*/2 * kN_ * 128> {
  using Base = WgradBoxesTile<128, kN_, kStages_, 1, 4, 2 * kN_ * 128>;
  static constexpr int kN = kN_;
  static constexpr int kBytesPart = kN * 128;  // bytes of B, as wgmma reads it
  static constexpr int kRowsAt = Base::kBytesA + Base::kBytesB;
  static constexpr int kProducerRegisters = 64, kConsumerRegisters = 192;
};

// Splits words; words that are not finite or too large for the short form take the long form.
template <int kWords>
__device__ __forceinline__ void SplitWordsOf(const uint32_t (&words)[kWords],
                                             uint32_t (&big)[kWords], uint32_t (&small)[kWords]) {
  float zero[2] = {};  // or NaN
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    SplitTf32(words[i], &big[i], &small[i]);
    zero[i % 2] = fmaf(__uint_as_float(small[i]), 0.f, zero[i % 2]);
  }
  if (zero[0] + zero[1] != 0) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) SplitTf32Finite(words[i], &big[i], &small[i]);
  }
}

// Splits eight words of a column and stores both parts.
template <class Tile>
struct StoreSplitColumn {
  __device__ __forceinline__ void operator()(const uint32_t (&words)[8], uint32_t row,
                                             const uint32_t (&chunk)[2]) const {
    uint32_t big[8], small[8];
    SplitWordsOf(words, big, small);
    StoreColumn()(big, row, chunk);
    StoreColumn()(small, row + Tile::kBytesPart, chunk);
  }
};

template <class Tile, class Epilogue>
__device__ __forceinline__ void ConsumeThreeTf32Columns(const Params& params, uint32_t ring,
                                                        const Barriers<Tile>& barriers) {
  constexpr int kSteps = Tile::kPixels / 8;
  const int warp = threadIdx.x / 32 - 8;  // 0 to 7 over both warpgroups
  // A warp has 16 channels, half a box.
  uint32_t of_lane[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    of_lane[half] = ring + Tile::kRingAt + warp / 2 * Tile::kBoxBytes +
                    ChannelPairOffset(warp % 2, threadIdx.x % 4 * 2 + half);
  }
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const int32_t k_blocks = RunOfKBlocks{params}(place);
    float sums[Tile::kN / 2] = {};
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
      const uint32_t at = stage.slot * Tile::kStageBytes;
      uint32_t words[kSteps * 4], big[kSteps][4], small[kSteps][4];
      BarrierWait(barriers.Full(stage.slot), stage.parity);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          LoadPair(of_lane[half] + at + step * 1024, &words[step * 4 + 2 * half],
                   &words[step * 4 + 2 * half + 1]);
        }
      }
      uint32_t all_big[kSteps * 4], all_small[kSteps * 4];
      SplitWordsOf(words, all_big, all_small);
#pragma unroll
      for (int i = 0; i < kSteps * 4; ++i) {
        big[i / 4][i % 4] = all_big[i];
        small[i / 4][i % 4] = all_small[i];
      }
      BarrierWait(barriers.FullFilter(stage.slot), stage.parity);
      const uint32_t parts = ring + Tile::kRingAt + at + Tile::kRowsAt;
      const uint64_t b_big = KMajorDescriptor(parts);
      const uint64_t b_small = KMajorDescriptor(parts + Tile::kBytesPart);
      float part[Tile::kN / 2];
      WgmmaFence();
      auto products = [&](const uint32_t (&a)[kSteps][4], uint64_t b, bool first) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          WgmmaFromRegisters<Tile::kN>(part, a[step], b + step * (32 >> 4), !first || step > 0);
        }
      };
      products(small, b_big, true);
      products(big, b_small, false);
      products(big, b_big, false);
      WgmmaCommit();
      WgmmaWait<0>();
      // The warp has read its part of A.
      __syncwarp();
      if (threadIdx.x % 32 == 0) BarrierArrive(barriers.Empty(stage.slot));
      stage.Next();
#pragma unroll
      for (int j = 0; j < Tile::kN / 2; ++j) sums[j] += WgmmaResult(part[j]);
    }
    const auto epilogue = MakeEpilogue<Epilogue>(params.epilogue, params.slice_elements > 0);
    StoreWgradFragment<Tile::kN, /*kWide=*/true>(params, place, sums, place.n_tile * Tile::kTileN,
                                                 place.m_tile * Tile::kTileM + warp * 16, epilogue);
    FinishTile<Tile>(params, place, params.residue_class[0], epilogue);
  }
}

template <Op kOp, DType kType, int kN, int kStages>
struct WgradThreeTf32
    : WgradBoxesForm<kOp, kType, WgradThreeTf32Tile<kN, kStages>, /*kWholeF32=*/true> {
  using Tile = WgradThreeTf32Tile<kN, kStages>;

  static __device__ __forceinline__ void Transpose(const Params& params, uint32_t ring,
                                                   const Barriers<Tile>& barriers) {
    TransposeColumns<Tile, 1>(params, ring, barriers, RunOfKBlocks{params},
                              StoreSplitColumn<Tile>());
  }
  template <class Tag>
  static __device__ __forceinline__ void Consume(const Params& params, uint32_t ring,
                                                 const Barriers<Tile>& barriers) {
    ConsumeThreeTf32Columns<Tile, typename Tag::Epilogue>(params, ring, barriers);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_THREE_TF32_SM90_CUH_
