// igemm_wgmma, pointwise: 1x1 convolutions, which are bound by memory; two consumer warpgroups in
// pingpong (sm_90a). The map from convolution to GEMM is that of cooperative_sm90.cuh; TMA applies
// a stride.
//
// Weight-stationary (all tiles but 128x128): the filter's k-blocks for a CTA's range of output
// channels stay in shared memory, so L2 delivers activations alone. Tiles may be scheduled
// dynamically, by an atomic counter for each range, because SMs progress at different speeds:
//
//     producer    asks for the next tile's index while it loads a tile, writes the index beside
//                 the stage at which the tile begins, and past the last tile params.tiles
//     consumers   read it there, by turns; the one that meets the end tells the other
//
// Shared memory of 64x256: 8 stages of 8 KB, 4 k-blocks of 32 KB of the filter, 32 KB of staging;
// c128 (at most 128 input channels): 16 stages, 2 k-blocks; 256x64 swap-AB: 4 stages of 32 KB, 4
// k-blocks of 8 KB, 64 KB of staging, one tile for each consumer, stored by TMA; 128x128: 6 stages
// of (16 + 16) KB, 32 KB. Registers: producer 40, consumers 232.
//
// Fused results are stored from slots, which first hold the residual if there is one
// (slot_store_sm90.cuh); the ring of k-blocks is then shorter.
//
// Full(s), Empty(s), named barriers: as in pingpong_sm90.cuh. Stationary(k): k-block k of the
// filter has arrived, waited for in a consumer's first tile. Refused, beside what
// cooperative_sm90.cuh refuses: filters of more than one tap, strided dgrad; weight-stationary:
// filters that do not fit, groups, batches.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_POINTWISE_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_POINTWISE_SM90_CUH_

#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/igemm_wgmma/launch_sm90.cuh"
#include "cuda/igemm_wgmma/mainloop_sm90.cuh"
#include "cuda/igemm_wgmma/slot_store_sm90.cuh"
#include "cuda/igemm_wgmma/statistics_sm90.cuh"
#include "cuda/igemm_wgmma/store_swap_ab_sm90.cuh"
#include "cuda/igemm_wgmma/store_tile_sm90.cuh"
#include "cuda/igemm_wgmma/swap_ab_tile_sm90.cuh"
#include "cuda/igemm_wgmma/wgmma_tile_sm90.cuh"
#include "cuda/ptx/mma.cuh"

namespace jaxconv::igemm_wgmma {

// Extends Barriers by one barrier for each consumer, which the other consumer completes at the end
// of the tiles, and by one word for each stage, the index of the tile that begins there.
//
// Arrivals have release semantics, waits and tests acquire semantics at CTA scope, of the accesses of
// their own thread. The producer writes a stage's word between its wait for Empty(s) and its arrival at
// Full(s). A thread of each warp of a consumer reads it, and arrives at Empty(s) itself.
template <class Tile>
struct PointwiseBarriers : Barriers<Tile> {
  static constexpr int kReaders = 4;  // arrivals that free a stage: one for each warp of a consumer
  using Barriers<Tile>::kCount;
  static constexpr int kWords = kCount + 2 + (Tile::kStages + 1) / 2;
  // The other consumer completes this barrier's first phase at the end, before it arrives at the
  // named barrier that precedes this consumer's test. Each consumer needs its own barrier: with a
  // shared one, a consumer's first warp could complete it before the last warp has tested, and that
  // warp would leave without its arrival.
  __device__ __forceinline__ uint32_t Ended(int consumer) const {
    return this->first + (kCount + consumer) * 8;
  }
  __device__ __forceinline__ uint32_t TileAt(uint32_t stage) const {
    return this->first + (kCount + 2) * 8 + stage * 4;
  }

  __device__ __forceinline__ void Init() const {
    BarrierInit(Ended(0), 1);
    BarrierInit(Ended(1), 1);
    Barriers<Tile>::Init(kReaders);
  }
};

// The producer's next tile: round-robin, or the next tile in the CTA's range of columns that no CTA
// has taken. With a stationary filter a CTA stays in its range.
template <class Tile, class Epilogue>
struct TileOrder {
  int32_t index = blockIdx.x;
  int32_t next = 0, turn = 0;

  // An atomic takes a microsecond, so it is issued while a tile is loaded. It must follow the end
  // of the previous kernel, which resets the counters. Tiles whose sums are joined
  // (statistics_sm90.cuh) are assigned round-robin.
  __device__ __forceinline__ void Ask(const Params& params) {
    const int32_t joined =
        Epilogue::kPlain ? 0 : params.epilogue.joined_tiles * params.n_tiles.divisor;
    next = blockIdx.x + ++turn * gridDim.x;
    if (params.counters == nullptr || (!Epilogue::kPlain && next < joined)) return;
    const int32_t ranges = Tile::kStationary > 0 ? params.n_tiles.divisor : 1;
    const int32_t range = blockIdx.x % ranges;
    next = max(int32_t(gridDim.x), joined) + range + atomicAdd(params.counters + range, 1) * ranges;
  }
  __device__ __forceinline__ void Next() { index = next; }
};

// Slots serve 16-bit results that lie in the output's rows; other results use the staging.
template <Op kOp, typename T, class Tile, class Epilogue>
inline constexpr bool kHasSlots =
    !Epilogue::kPlain && kOp == Op::kFprop && sizeof(T) == 2 && !Tile::kSwapAb;

// Calls run(SlotsOf<...>) with the kind of slots that the results overwrite. Each kind has its own
// loop, because their rings differ.
template <Op kOp, typename T, class Tile, class Epilogue, class Run>
__device__ __forceinline__ void WithSlots(const Params& params, const Run& run) {
  if constexpr (kHasSlots<kOp, T, Tile, Epilogue>) {
    const EpilogueParams& with = params.epilogue;
    if (Clamps(with) && with.moments == nullptr && params.dense_rows &&
        params.groups.divisor == 1 && params.batches.divisor == 1) {
      if (with.residual != nullptr) {
        run(SlotsOf<Slots::kResidual>());
        return;
      }
      // For a ring that also holds the filter, shortening it costs more than the staging does.
      if constexpr (Tile::kStationary > 0) {
        run(SlotsOf<Slots::kEmpty>());
        return;
      }
    }
  }
  run(SlotsOf<Slots::kNone>());
}

// The position of a tile.
template <Slots kSlots>
__device__ __forceinline__ TilePlace PointwisePlace(const Params& params, int32_t index) {
  if constexpr (kSlots != Slots::kNone) return TilePlace::OfRows(params, index);
  return TilePlace(params, index);
}

// The number of k-block stages.
template <class Tile, Slots kSlots>
inline constexpr int kKBlockStages =
    kSlots == Slots::kNone ? Tile::kStages : SlotRing<Tile>::kKBlockStages;

// The producer, one thread.
template <Op kOp, typename T, class Tile, class Epilogue, Slots kSlots>
__device__ __forceinline__ void ProducePointwise(const Params& params, const Maps& maps,
                                                 uint32_t ring,
                                                 const PointwiseBarriers<Tile>& barriers,
                                                 const SlotRing<Tile>& slots) {
  const std::conditional_t<kSlots == Slots::kNone, NoQueue, TileQueue<Tile>> queue{slots};
  RingPlace<kKBlockStages<Tile, kSlots>> stage;
  TileOrder<Tile, Epilogue> order;
  for (; order.index < params.tiles; order.Next()) {
    const int32_t index = order.index;
    queue.Push(order.turn, index);
    ProducedTile<kOp, T, Tile> tile(params, maps, PointwisePlace<kSlots>(params, index));
    if (index == blockIdx.x) tile.Prefetch();
    // This late, because nothing above reads memory that the previous kernel may write.
    WaitForPrecedingGrids();
    order.Ask(params);
    for (int32_t i = 0; i < tile.k_blocks; ++i) {
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      if (i == 0) StoreWord(barriers.TileAt(stage.slot), index);
      BarrierArriveExpect(barrier,
                          Tile::kBytesA + (Tile::kStationary > 0 ? 0 : tile.boxes * kBoxBytes));
      tile.LoadA(shared, barrier);
      stage.Next();
      if constexpr (Tile::kStationary == 0) {
        tile.LoadB(shared + Tile::kBytesA, barrier);
      } else if (index == blockIdx.x) {
        // The grid is a multiple of n_tiles: all tiles of a CTA have the same columns. There is one
        // tap: without this loop the compiler makes two copies of the k-block loop.
        for (int32_t t = 0; t < tile.of.taps[0]; ++t) {
          const uint32_t at = i * tile.of.taps[0] + t;
          BarrierArriveExpect(barriers.Stationary(at), tile.boxes * kBoxBytes);
          tile.LoadB(ring + Tile::kFilterAt + at * Tile::kBytesB, barriers.Stationary(at), t);
        }
      }
      if constexpr (kSlots != Slots::kNone) {
        ++tile.k_block.channel_block;  // one tap: registers are too few to advance three axes
      } else {
        tile.k_block.Next(tile.of);
      }
    }
  }
  BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
  StoreWord(barriers.TileAt(stage.slot), params.tiles);
  BarrierArrive(barriers.Full(stage.slot));
  queue.Push(order.turn, params.tiles);
}

// A consumer warpgroup. All tiles have the same number of k-blocks. It reads a tile's index before
// the product that frees the stage.
template <Op kOp, typename T, class Tile, class Epilogue, bool kWholeRows, Slots kSlots,
          int kWarpgroup>
__device__ __forceinline__ void ConsumePointwise(const Params& params, const Maps& maps,
                                                 uint32_t ring,
                                                 const PointwiseBarriers<Tile>& barriers,
                                                 const SlotRing<Tile>& slots) {
  constexpr bool kBoxes = Tile::kSwapAb;  // 16-bit tiles stored by TMA
  const ResidueClass& of = params.residue_class[0];
  const int32_t k_blocks = of.k_blocks;
  const bool signals = threadIdx.x % 32 == 0;
  RingPlace<kKBlockStages<Tile, kSlots>> stage;
  constexpr bool kCounts = kSlots == Slots::kNone && kHasMoments<kOp, T, Tile, Epilogue>;
  std::conditional_t<kSlots == Slots::kNone, NoSlots, SlotStore<T, Tile, kSlots, kWarpgroup>> store(
      params, &maps.out, slots);
  ConsumerSums<kCounts, T, Tile> sums(ring + Tile::kStagingAt +
                                      kWarpgroup * 4 * Tile::kStagingBytes);
  SwapAbTerms<Epilogue> terms;
  if constexpr (Tile::kSwapAb) terms.Load(params, TilePlace(params, blockIdx.x));
  if (kWarpgroup == 1) {
    NamedBarrierArrive(1, 256);  // consumer 0 has the first turn
    stage.Skip(k_blocks);
  }
  for (bool first = true;; first = false) {
    NamedBarrierSync(1 + kWarpgroup, 256);
    if (BarrierTest(barriers.Ended(kWarpgroup), 0)) break;
    BarrierWait(barriers.Full(stage.slot), stage.parity);
    // Valid in lane 0, which arrives at Empty(s); before that, the other lanes learn whether the
    // tiles have ended.
    int32_t index = 0;
    if (signals) index = static_cast<int32_t>(LoadWord(barriers.TileAt(stage.slot)));
    if (__any_sync(0xffffffff, index >= params.tiles)) {
      if (threadIdx.x % 128 == 0) BarrierArrive(barriers.Ended(1 - kWarpgroup));
      NamedBarrierArrive(2 - kWarpgroup, 256);
      break;
    }
    typename Tile::Accumulators acc;
    uint32_t last = 0;
    for (int32_t i = 0; i < k_blocks; ++i) {
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      const uint32_t a = ring + stage.slot * Tile::kStageBytes;
      uint32_t b = a + Tile::kBytesA;
      if constexpr (Tile::kStationary > 0) {
        if (first) BarrierWait(barriers.Stationary(i), 0);
        b = ring + Tile::kFilterAt + i * Tile::kBytesB;
      }
      Tile::template Multiply<T, false, kMnMajorFilter<kOp, T>>(acc, a, b, i > 0);
      WgmmaWait<1>();
      if (i > 0 && signals) BarrierArrive(barriers.Empty(last));
      last = stage.slot;
      stage.Next();
    }
    NamedBarrierArrive(2 - kWarpgroup, 256);
    if constexpr (kSlots != Slots::kNone) store.Begin(__shfl_sync(0xffffffff, index, 0));
    WgmmaWait<0>();
    if (signals) BarrierArrive(barriers.Empty(last));
    index = __shfl_sync(0xffffffff, index, 0);
    const TilePlace place = PointwisePlace<kSlots>(params, index);
    const Epilogue epilogue(params.epilogue);
    if constexpr (kSlots != Slots::kNone) {
      store.Store(place, acc);
      FinishTile<Tile>(params, place, of, epilogue);
    } else if constexpr (Tile::kSwapAb) {
      const uint32_t staging = ring + Tile::kStagingAt + kWarpgroup * 4 * Tile::kStagingBytes;
      const SwapAbStore<kOp, T, Tile, kWarpgroup> tile{params, place, of, acc, staging};
      auto store_boxes = [&](const auto& finish) {
        tile.Boxes(finish, &maps.out);
        FinishTile<Tile>(params, place, of, epilogue);
      };
      if constexpr (!Epilogue::kPlain) {
        if (kCounts && params.epilogue.moments != nullptr) {
          if constexpr (kCounts) {
            store_boxes(Round<T>());
            CountBoxes<T, Tile>(place, of, staging, &sums);
            sums.template EndTile<kWarpgroup>(params, place);
          }
        } else if (Clamps(params.epilogue) && params.epilogue.residual == nullptr) {
          const PairBounds<T> bounds(params.epilogue.activation);
          store_boxes(Clamp<T, SwapAbTerms<Epilogue>, false>{terms, bounds});
        } else {
          StoreSwapAbTile(tile, MakeEpilogue<Epilogue>(params.epilogue, false), terms);
        }
      } else if (!params.out_is_f32) {
        store_boxes(Round<T>());
      } else {
        StoreSwapAbTile(tile, epilogue, terms);
      }
    } else {
      const uint32_t of_warpgroup = ring + Tile::kStagingAt + kWarpgroup * 4 * Tile::kStagingBytes;
      const uint32_t staging =
          ring + Tile::kStagingAt + (threadIdx.x / 32 - 4) * Tile::kStagingBytes;
      const TileStore<kOp, T, Tile> tile{params, place, of, acc, place.m_tile * Tile::kTileM,
                                         staging};
      if (kCounts && params.epilogue.moments != nullptr) {
        if constexpr (kCounts) {
          StoreAndCount<3 + kWarpgroup, T, Tile>(params, place, of, acc, of_warpgroup, &sums);
          sums.template EndTile<kWarpgroup>(params, place);
        }
      } else if constexpr (kHasSlots<kOp, T, Tile, Epilogue> && Tile::kStationary > 0) {
        // Clamping epilogues use slots.
        StageTerms<T, Tile, Epilogue>(params, place, staging);
        tile.Activated();
        FinishTile<Tile>(params, place, of, epilogue);
      } else {
        StageTerms<T, Tile, Epilogue>(params, place, staging);
        StoreTile<kWholeRows>(tile, epilogue);
      }
    }
    stage.Skip(k_blocks);
  }
  if constexpr (kBoxes) WaitForStoresToRead();
}

template <class Tag>
__global__ void __launch_bounds__(Tag::kThreads, 1)
    PointwiseKernel(const __grid_constant__ Params params, const __grid_constant__ Maps maps) {
  using Tile = typename Tag::Tile;
  using T = typename ElementOf<Tag::kType>::Type;
  using Epilogue = typename Tag::Epilogue;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  constexpr bool kHas = kHasSlots<Tag::kOp, T, Tile, Epilogue>;
  constexpr int kWords = PointwiseBarriers<Tile>::kWords;
  __shared__ __align__(8) uint64_t barrier_words[kWords + (kHas ? SlotRing<Tile>::kWords : 0)];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const PointwiseBarriers<Tile> barriers{SharedAddress(barrier_words)};
  const SlotRing<Tile> slots{barriers.first + kWords * 8, ring};
  if (threadIdx.x == 0) {
    if constexpr (kHas) slots.Init();
    barriers.Init();
    PrefetchTensorMap(&maps.a[0]);
    PrefetchTensorMap(&maps.b);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    LowerRegisters<Tile::kProducerRegisters>();
    auto warp = [] { return __shfl_sync(0xffffffff, Thread() / 32, 0); };
    WithSlots<Tag::kOp, T, Tile, Epilogue>(params, [&](auto over) {
      if (warp() == 0 && ElectOne()) {
        ProducePointwise<Tag::kOp, T, Tile, Epilogue, over.value>(params, maps, ring, barriers,
                                                                  slots);
      }
      if constexpr (over.value != Slots::kNone) {
        if (warp() == 1 && ElectOne()) FillSlots<Tile, over.value>(params, &maps.residual, slots);
      }
    });
  } else {
    RaiseRegisters<Tile::kConsumerRegisters>();
    WaitForInputs();
    WithSlots<Tag::kOp, T, Tile, Epilogue>(params, [&](auto over) {
      if (warpgroup == 1) {
        ConsumePointwise<Tag::kOp, T, Tile, Epilogue, Tag::kWholeRows, over.value, 0>(
            params, maps, ring, barriers, slots);
      } else {
        ConsumePointwise<Tag::kOp, T, Tile, Epilogue, Tag::kWholeRows, over.value, 1>(
            params, maps, ring, barriers, slots);
      }
    });
  }
}

// kWholeRows: stores results in whole rows of 256 columns; for reductions of one or two k-blocks.
template <Op kOp_, DType kType_, class Tile_, bool kWholeRows_>
struct PointwiseForm : Tile_ {
  static constexpr Op kOp = kOp_;
  static constexpr DType kType = kType_;
  static constexpr bool kWholeRows = kWholeRows_;
  using Tile = Tile_;
  using Epilogue = PlainEpilogue;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchWithMaps<PointwiseKernel<Tag>, Tag, Maps>(
        plan, operands, stream, /*overlaps=*/true,
        [](const LaunchParams& launch, const Params& params, const void* a, const void* b,
           Maps* maps) {
          JAXCONV_RETURN_IF_ERROR(EncodeActivations(launch, kType, a, Tile::kPixels, maps));
          // Rows of the output, 64 by 64 channels.
          DenseTensor out;
          out.dtype = kType;
          out.rank = 2;
          out.extent[0] = params.out_channels;
          out.extent[1] = params.residue_class[0].rows;
          const int32_t box[2] = {kKBlockChannels<typename ElementOf<kType>::Type>, kStoredPixels};
          using T = typename ElementOf<kType>::Type;
          constexpr bool kSlots = kHasSlots<kOp, T, Tile, typename Tag::Epilogue>;
          if ((Tile::kSwapAb && !params.out_is_f32) || kSlots) {
            const int32_t stored[2] = {box[0], kSlots ? kSlotStoredRows : kStoredPixels};
            out.address = params.out;
            JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(out, stored, &maps->out));
          }
          if (kSlots && params.epilogue.residual != nullptr) {
            out.address = params.epilogue.residual;
            JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(out, box, &maps->residual));
          }
          return EncodeFilter(launch, kType, b, maps);
        });
  }
};

template <Op kOp, DType kType, int kBlocks, int kN, int kStages, int kStationary, bool kWholeRows>
struct Pointwise
    : PointwiseForm<kOp, kType, WgmmaTile<2, true, kBlocks, kN, 0, kStages, false, 0, kStationary>,
                    kWholeRows> {};

template <Op kOp, DType kType, int kPixels, int kStages, int kStationary>
struct PointwiseSwapAb
    : PointwiseForm<kOp, kType, SwapAbTile<kPixels, kStages, false, 0, kStationary, 8192>, false> {
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_POINTWISE_SM90_CUH_
