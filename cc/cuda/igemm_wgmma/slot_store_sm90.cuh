// Stores fused results through slots of shared memory (pointwise, sm_90a): TMA loads the residual
// to a slot, the consumer overwrites it with the results, and TMA stores the slot.
//
// The throughput of the residual depends on its bytes in flight. It therefore has a ring apart from
// that of the k-blocks, so that no product holds a slot, and a thread that fills it:
//
//     filling thread      waits for Empty(slot), loads 64 rows by 64 columns, TMA arrives at Full(slot);
//                         without a residual it arrives itself
//     a consumer's warp   waits for Full(slot), adds its sixteen rows to the sums, writes the results
//                         over them, stores them by TMA, and arrives at Empty(slot) when TMA has read
//                         them
//
// The slots take the space of some k-block stages and of most of the staging: 64x256 has 5 slots of
// 8 KB and 6 stages of k-blocks, c128 13 and 6, 128x128 7 and 5. The rest of the staging holds
// scale and bias.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_SLOT_STORE_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_SLOT_STORE_SM90_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/igemm_wgmma/finish_sm90.cuh"
#include "cuda/igemm_wgmma/staging_sm90.cuh"
#include "cuda/igemm_wgmma/tensor_maps.h"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// What the slots hold before a tile's results.
enum class Slots { kNone, kEmpty, kResidual };
template <Slots kSlots>
using SlotsOf = std::integral_constant<Slots, kSlots>;
// The rows that TMA stores at once: one warp's.
inline constexpr int kSlotStoredRows = 16;

// The slots, their mbarriers, and a queue of tiles from the scheduling thread to the filling
// thread.
template <class Tile>
struct SlotRing {
  static constexpr int kSlotBytes = 64 * 128;
  static constexpr int kKBlockStages = Tile::kStationary > 0 ? 6 : Tile::kStages - 1;
  static constexpr int kOfRing = (Tile::kStages - kKBlockStages) * Tile::kStageBytes / kSlotBytes;
  static constexpr int kTermsBytes = kSlotBytes;
  static constexpr int kSlots =
      kOfRing + (Tile::kWarpgroups * 4 * Tile::kStagingBytes - kTermsBytes) / kSlotBytes;
  static constexpr int kOfTile = Tile::kTileM * Tile::kTileN * 2 / kSlotBytes;
  static constexpr int kQueue = 4;
  static constexpr int kWords = 2 * kSlots + 2 * kQueue + kQueue / 2;

  uint32_t first, ring;

  __device__ __forceinline__ uint32_t Full(uint32_t slot) const { return first + slot * 8; }
  __device__ __forceinline__ uint32_t Empty(uint32_t slot) const {
    return first + (kSlots + slot) * 8;
  }
  __device__ __forceinline__ uint32_t FullQueue(uint32_t place) const {
    return first + (2 * kSlots + place) * 8;
  }
  __device__ __forceinline__ uint32_t EmptyQueue(uint32_t place) const {
    return first + (2 * kSlots + kQueue + place) * 8;
  }
  __device__ __forceinline__ uint32_t Queued(uint32_t place) const {
    return first + (2 * kSlots + 2 * kQueue) * 8 + place * 4;
  }
  __device__ __forceinline__ uint32_t Slot(uint32_t slot) const {
    return ring + slot * kSlotBytes +
           (slot < kOfRing ? kKBlockStages * Tile::kStageBytes
                           : Tile::kStagingAt - kOfRing * kSlotBytes);
  }
  // With a stationary filter all of a CTA's tiles have the same columns: one copy for each
  // consumer. Otherwise one copy for each warp, so that no warp waits for another.
  __device__ __forceinline__ uint32_t Terms(int consumer, int warp) const {
    constexpr int kBytes = Tile::kTileN * 8;
    static_assert((Tile::kStationary > 0 ? 2 : 8) * kBytes <= kTermsBytes);
    return ring + Tile::kStagingAt + Tile::kWarpgroups * 4 * Tile::kStagingBytes - kTermsBytes +
           (Tile::kStationary > 0 ? consumer : consumer * 4 + warp) * kBytes;
  }

  // One thread, before BarrierInitFence.
  __device__ __forceinline__ void Init() const {
    for (int s = 0; s < kSlots; ++s) {
      BarrierInit(Full(s), 1);
      BarrierInit(Empty(s), 4);
    }
    for (int p = 0; p < kQueue; ++p) {
      BarrierInit(FullQueue(p), 1);
      BarrierInit(EmptyQueue(p), 1);
    }
  }
};

// For kernels without slots: no thread waits for tile indices.
struct NoQueue {
  template <class Ring>
  __device__ __forceinline__ explicit NoQueue(const Ring&) {}
  __device__ __forceinline__ void Push(int32_t, int32_t) const {}
};

// Pushes a CTA's tiles; called by the scheduling thread.
template <class Tile>
struct TileQueue {
  const SlotRing<Tile>& ring;

  __device__ __forceinline__ void Push(int32_t turn, int32_t index) const {
    const int32_t place = ComputedHere(turn) % SlotRing<Tile>::kQueue;
    BarrierWait(ring.EmptyQueue(place), turn / SlotRing<Tile>::kQueue % 2 ^ 1);
    StoreWord(ring.Queued(place), index);
    BarrierArrive(ring.FullQueue(place));
  }
};

// The filling thread.
template <class Tile, Slots kSlots>
__device__ __forceinline__ void FillSlots(const Params& params, const CUtensorMap* residual,
                                          const SlotRing<Tile>& ring) {
  RingPlace<SlotRing<Tile>::kSlots> slot;
  RingPlace<SlotRing<Tile>::kQueue> queued;
  WaitForPrecedingGrids();
  for (;; queued.Next()) {
    BarrierWait(ring.FullQueue(queued.slot), queued.parity);
    const auto index = static_cast<int32_t>(LoadWord(ring.Queued(queued.slot)));
    BarrierArrive(ring.EmptyQueue(queued.slot));
    if (index >= params.tiles) return;
    const TilePlace place = TilePlace::OfRows(params, index);
    for (int32_t c = 0; c < Tile::kTileN; c += 64) {
      for (int32_t block = 0; block < Tile::kBlocks; ++block) {
        BarrierWait(ring.Empty(slot.slot), slot.parity ^ 1);
        if constexpr (kSlots == Slots::kResidual) {
          BarrierArriveExpect(ring.Full(slot.slot), SlotRing<Tile>::kSlotBytes);
          CopyTile2d(ring.Slot(slot.slot), residual, ring.Full(slot.slot),
                     place.n_tile * Tile::kTileN + c, place.m_tile * Tile::kTileM + block * 64);
        } else {
          BarrierArrive(ring.Full(slot.slot));
        }
        slot.Next();
      }
    }
  }
}

struct NoSlots {
  template <class Ring>
  __device__ __forceinline__ NoSlots(const Params&, const CUtensorMap*, const Ring&) {}
};

// A consumer's part: stores its tiles. The activation is a clamp.
template <typename T, class Tile, Slots kSlots, int kWarpgroup>
struct SlotStore {
  using Ring = SlotRing<Tile>;
  const Params& params;
  const CUtensorMap* const out;  // boxes of kSlotStoredRows
  const Ring& ring;
  RingPlace<Ring::kSlots> slot;

  __device__ __forceinline__ SlotStore(const Params& params, const CUtensorMap* out,
                                       const Ring& ring)
      : params(params), out(out), ring(ring) {
    if (kWarpgroup == 1) slot.Skip(Ring::kOfTile);
    if constexpr (Tile::kStationary > 0) {
      if (Warp() == 0) LoadTerms(blockIdx.x);
      NamedBarrierSync(3 + kWarpgroup, 128);
    }
  }
  static __device__ __forceinline__ int Warp() { return Thread() / 32 % 4; }

  // Called while the tile's last product is computed.
  __device__ __forceinline__ void Begin(int32_t index) const {
    if constexpr (Tile::kStationary == 0) {
      __syncwarp();  // the previous tile's terms have been read
      LoadTerms(index);
    }
  }
  __device__ __forceinline__ void LoadTerms(int32_t index) const {
    const TilePlace place = TilePlace::OfRows(params, index);
    StagedTerms<Tile::kTileN>{ring.Terms(kWarpgroup, Warp())}.Load(params, place,
                                                                   place.n_tile * Tile::kTileN);
  }

  __device__ __forceinline__ void Store(const TilePlace& place,
                                        const typename Tile::Accumulators& acc) {
    const uint32_t lane = Lane(), warp = Warp();
    const LaneTerms terms{ring.Terms(kWarpgroup, warp), lane};
    const int32_t channel = place.n_tile * Tile::kTileN;
    const int32_t row = place.m_tile * Tile::kTileM + warp * 16;
    const PairBounds<T> bounds(params.epilogue.activation);
    uint32_t before = 0;
    __syncwarp();  // the terms are loaded
#pragma unroll
    for (int c = 0; c < Tile::kTileN; c += 64) {
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        const RoundedRows<64> rows{ring.Slot(slot.slot) + warp * 2048, lane};
        const LoadedTerms loaded(terms, c);
        // In a short ring the other consumer may not have received the slot's previous fill. Until
        // it has, Full(slot) is in an earlier phase of the same parity.
        if constexpr (Ring::kSlots < 2 * Ring::kOfTile) {
          BarrierWait(ring.Empty(slot.slot), slot.parity ^ 1);
        }
        BarrierWait(ring.Full(slot.slot), slot.parity);
        StageFragments<4, /*kReadsAhead=*/true>(
            rows, Clamp<T, LoadedTerms, kSlots == Slots::kResidual>{loaded, bounds}, 0,
            acc.Columns(block, c));
        FenceForCopies();
        rows.Sync();
        if (ElectOne()) {
          StoreTile2d(out, rows.staging, channel + c, row + block * 64);
          CommitStores();
          if (c + block > 0) {
            WaitForStoresToRead<1>();
            BarrierArrive(before);
          }
        }
        before = ring.Empty(slot.slot);
        slot.Next();
      }
    }
    if (ElectOne()) {
      WaitForStoresToRead();
      BarrierArrive(before);
    }
    slot.Skip(Ring::kOfTile);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_SLOT_STORE_SM90_CUH_
