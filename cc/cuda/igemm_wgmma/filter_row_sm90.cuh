// igemm_wgmma, filter-row: one load of activations serves all taps of a filter row; two consumer
// warpgroups in pingpong (sm_90a). The map from convolution to GEMM is that of
// cooperative_sm90.cuh.
//
// The pixels of a tile are consecutive pixels of the padded image. The operand of the next tap
// begins one pixel (with dilation: `dilation` pixels) further on in the same load, so a stage holds
// tile_m + kMaxSpan pixels.
//
//     rows of the stage   p  p+1  p+2 ...  p+127 p+128 p+129
//     tap 0              [-----------------]
//     tap 1                  [------------------]
//     tap 2                       [-------------------]
//
// A descriptor may start at any row of the swizzled stage, with base offset 0: the swizzle is a
// function of the shared-memory address. Outputs in the padding are computed and dropped. Adjacent
// rows share their padding: the zeros after one row serve as the zeros before the next.
//
// The filter has its own ring of slots, one k-block each. Tiles are pixels by channels
// (*_pingpong_filter_row), or swap-AB (*_swap_ab_filter_row). L2 delivers activations R times
// instead of R S times, so the tensor cores are the bound. The kernel also runs the instances of
// weight_stationary_sm90.cuh, whose filter has no ring.
//
// Shared memory of 128x128: 3 stages of 17 KB, 8 filter slots of 16 KB, 32 KB of staging; 224x64
// swap-AB: 4 of 29 KB, 10 of 8 KB, 16 KB. Registers as in pingpong_sm90.cuh.
//
// Full(s), Empty(s): stages, as in pingpong_sm90.cuh; the last tap frees a stage. FullFilter,
// EmptyFilter: filter slots. Beside what cooperative_sm90.cuh refuses: filters of one tap along the
// last axis, a stride there, taps that reach over more than kMaxSpan pixels.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_FILTER_ROW_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_FILTER_ROW_SM90_CUH_

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_wgmma/mainloop_sm90.cuh"
#include "cuda/igemm_wgmma/pingpong_sm90.cuh"
#include "cuda/igemm_wgmma/ring_form_sm90.cuh"
#include "cuda/igemm_wgmma/swap_ab_tile_sm90.cuh"
#include "cuda/igemm_wgmma/wgmma_tile_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// The ring of filter slots; weight-stationary kernels have none.
template <class Tile>
using FilterSlot = RingPlace<(Tile::kFilterSlots > 0 ? Tile::kFilterSlots : 1)>;

// The producer, one thread.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ void ProduceFilterRows(const Params& params, const Maps& maps,
                                                  uint32_t ring, const Barriers<Tile>& barriers) {
  RingPlace<Tile::kStages> stage;
  FilterSlot<Tile> slot;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const ResidueClass& of = params.residue_class[place.residue_class];
    if (!HasRows<Tile>(of, place)) continue;
    ProducedTile<kOp, T, Tile> tile(params, maps, place);
    if (index == blockIdx.x) tile.Prefetch();
    // This late, because nothing above reads memory that the previous kernel may write.
    WaitForPrecedingGrids();
    for (int32_t i = 0; i < tile.k_blocks; ++i) {
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, Tile::kBytesA);
      tile.LoadA(shared, barrier);
      stage.Next();
      if constexpr (Tile::kStationary == 0) {
        for (int32_t t = 0; t < of.taps[0]; ++t) {
          BarrierWait(barriers.EmptyFilter(slot.slot), slot.parity ^ 1);
          BarrierArriveExpect(barriers.FullFilter(slot.slot), tile.boxes * kBoxBytes);
          tile.LoadB(ring + Tile::kFilterAt + slot.slot * Tile::kBytesB,
                     barriers.FullFilter(slot.slot), t);
          slot.Next();
        }
      } else if (index == blockIdx.x) {
        // A stationary filter is loaded tap by tap with the first tile's activations, so that the
        // first product waits for one tap only.
        for (int32_t t = 0; t < of.taps[0]; ++t) {
          const uint32_t at = i * of.taps[0] + t;
          BarrierArriveExpect(barriers.Stationary(at), tile.boxes * kBoxBytes);
          tile.LoadB(ring + Tile::kFilterAt + at * Tile::kBytesB, barriers.Stationary(at), t);
        }
      }
      tile.k_block.Next(of);
    }
  }
}

// A consumer warpgroup; it takes turns as in ConsumePingpong.
template <Op kOp, typename T, class Tile, class Epilogue, bool kCounts, int kWarpgroup>
__device__ __forceinline__ void ConsumeFilterRows(const Params& params, uint32_t ring,
                                                  const Barriers<Tile>& barriers) {
  constexpr bool kStationary = Tile::kStationary > 0;
  const Release release;
  RingPlace<Tile::kStages> stage;
  FilterSlot<Tile> slot;
  const uint32_t staging = ring + Tile::kStagingAt + kWarpgroup * 4 * Tile::kStagingBytes;
  ConsumerSums<kCounts, T, Tile> sums(staging);
  if (kWarpgroup == 1) NamedBarrierArrive(1, 256);  // consumer 0 has the first turn
  bool first_tile = true;
  SwapAbTerms<Epilogue> terms;
  const int32_t stride = gridDim.x;
  for (int32_t index = blockIdx.x + kWarpgroup * stride; index < params.tiles;
       index += 2 * stride) {
    if (index >= stride) {  // the other consumer's previous tile
      const TilePlace other(params, index - stride);
      const int32_t k_blocks = KBlocksOf<kOp, Tile>(params, other);
      stage.Skip(k_blocks);
      if constexpr (!kStationary) {
        slot.Skip(k_blocks * params.residue_class[other.residue_class].taps[0]);
      }
    }
    const TilePlace place(params, index);
    const ResidueClass& of = params.residue_class[place.residue_class];
    const int32_t k_blocks = KBlocksOf<kOp, Tile>(params, place), taps = of.taps[0];
    if constexpr (Tile::kSwapAb && !kCounts) {
      if (!kStationary || first_tile) terms.Load(params, place);
    } else if constexpr (!kCounts) {
      StageTerms<T, Tile, Epilogue>(params, place,
                                    staging + Thread() / 32 % 4 * Tile::kStagingBytes);
    }
    NamedBarrierSync(1 + kWarpgroup, 256);
    if (k_blocks == 0) {
      NamedBarrierArrive(2 - kWarpgroup, 256);
      continue;
    }
    typename Tile::Accumulators acc;
    const uint32_t tap0 = of.offset0[0], tap_step = of.offset_step[0];
    uint32_t last = 0, last_filter = 0, stationary = 0;
    for (int32_t i = 0; i < k_blocks; ++i) {
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      uint32_t a = ring + stage.slot * Tile::kStageBytes + tap0 * 128;
      for (int32_t t = 0; t < taps; ++t) {
        const uint32_t b = kStationary ? stationary : slot.slot;
        if constexpr (!kStationary) {
          BarrierWait(barriers.FullFilter(b), slot.parity);
        } else if (first_tile) {
          BarrierWait(barriers.Stationary(b), 0);
        }
        Tile::template Multiply<T, false, kMnMajorFilter<kOp, T>>(
            acc, a, ring + Tile::kFilterAt + b * Tile::kBytesB, i > 0 || t > 0);
        // A stationary filter frees no slot, so three taps may be in flight between rows.
        if (!kStationary || t == 0) {
          WgmmaWait<1>();
        } else {
          WgmmaWait<2>();
        }
        if (i > 0 || t > 0) {
          if constexpr (!kStationary) release(barriers.EmptyFilter(last_filter));
          // The last tap of the previous row has retired.
          if (t == 0) release(barriers.Empty(last));
        }
        a += tap_step * 128;
        ++stationary;
        last_filter = slot.slot;
        if constexpr (!kStationary) slot.Next();
      }
      last = stage.slot;
      stage.Next();
    }
    NamedBarrierArrive(2 - kWarpgroup, 256);
    WgmmaWait<0>();
    if constexpr (!kStationary) release(barriers.EmptyFilter(last_filter));
    release(barriers.Empty(last));
    first_tile = false;
    if constexpr (kCounts) {
      StoreCountedTile<kOp, T, Tile, kWarpgroup>(params, place, of, acc, staging, &sums);
    } else {
      StorePingpongTile<kOp, T, Tile, Epilogue, kWarpgroup>(params, place, of, acc, ring, terms);
    }
  }
}

template <Op kOp, DType kType, class Tile>
struct FilterRowForm : RingForm<kOp, kType, Tile> {
  static __device__ __forceinline__ void Produce(const Params& params, const Maps& maps,
                                                 uint32_t ring, const Barriers<Tile>& barriers) {
    ProduceFilterRows<kOp, typename ElementOf<kType>::Type>(params, maps, ring, barriers);
  }
  template <class Tag, bool kCounts>
  static __device__ __forceinline__ void Consume(const Params& params, uint32_t ring,
                                                 const Barriers<Tile>& barriers, int warpgroup) {
    if (warpgroup == 1) {
      ConsumeFilterRows<kOp, typename Tag::T, Tile, typename Tag::Epilogue, kCounts, 0>(
          params, ring, barriers);
    } else {
      ConsumeFilterRows<kOp, typename Tag::T, Tile, typename Tag::Epilogue, kCounts, 1>(
          params, ring, barriers);
    }
  }
};

template <Op kOp, DType kType, int kBlocks, int kN, int kStages, int kFilterSlots>
struct FilterRow
    : FilterRowForm<kOp, kType, WgmmaTile<2, true, kBlocks, kN, 0, kStages, true, kFilterSlots>> {};

template <Op kOp, DType kType, int kPixels, int kStages, int kFilterSlots>
struct SwapAbFilterRow
    : FilterRowForm<kOp, kType, SwapAbTile<kPixels, kStages, true, kFilterSlots>> {};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_FILTER_ROW_SM90_CUH_
