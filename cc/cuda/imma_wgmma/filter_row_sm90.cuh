// imma_wgmma, filter-row reuse: one copy of activations serves all taps of a filter row; two
// consumer warpgroups in pingpong (sm_90a). The map from convolution to GEMM, the order of the
// filter's rows and the epilogue are those of int8_sm90.cuh.
//
// TMA loads the padded rows of the image: output pixels and the padding between two rows. The
// activations of tap s are those of tap 0, s * dilation pixels further on, so a descriptor that
// begins at a later row selects them.
//
//     stage          | unit 0: (tile_m + 8) x unit_bytes | unit 1 | ...     one filter row each
//     filter slots   | 128 bytes of tile_n packed rows | ...                a ring, or stationary
//
// A stage of 1, 2 or 4 units serves as many k-blocks of the filter as a filter row has taps.
// step_offset holds, for each 32 bytes of these k-blocks, the offset of its activations in the
// stage: packed rows run over the taps of a filter row first, then over the units. With units of
// 128 channels a k-block is a tap. A tap's last unit may then be partial: TMA fills in zeros, and
// its k-blocks, the last of a tile, have tail_steps instructions each.
//
// Rows of a tile whose pixel lies in the padding are computed and dropped: 3 % for maps 56 wide, 12
// % for maps 7 wide. In return L2 and TMA deliver a third of the activations (3x3).
//
// Shared memory of 128x128: 4 stages of 17 KB, 8 slots of 16 KB; of 256x64: 4 stages of 33 KB, 9
// slots of 8 KB. Registers: producer 40, consumers 232.
//
// Full(s), Empty(s): as in int8_sm90.cuh, for activations. FullFilter(f), EmptyFilter(f): the same
// for a slot. Stationary(f): k-block f of the filter has arrived, waited for in a consumer's first
// tile. Named barriers as in int8_sm90.cuh.
//
// Refused, beside what int8_sm90.cuh refuses: strides; filters with one tap in a row; filter rows
// that span more than 8 pixels; weight-stationary: groups, and filters with more k-blocks or
// channels than fit.
#ifndef JAXCONV_CUDA_IMMA_WGMMA_FILTER_ROW_SM90_CUH_
#define JAXCONV_CUDA_IMMA_WGMMA_FILTER_ROW_SM90_CUH_

#include <cstdint>

#include "cuda/imma_wgmma/launch_sm90.cuh"
#include "cuda/imma_wgmma/tile_sm90.cuh"

namespace jaxconv::imma_wgmma {

// Producer warps 1 to 3 load the activations.
template <class Tile>
__device__ __forceinline__ void ProduceRows(const Params& params, const Maps& maps, uint32_t ring,
                                            const Barriers<Tile>& barriers, int warp) {
  RingPlace<Tile::kStages> stage;
  const int32_t units_of_stage = params.units_of_k_block;
  if (warp > units_of_stage) return;
  const uint32_t unit_bytes = params.unit_bytes * Tile::kPixels;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const BasePixel pixel(params, place.m_tile * Tile::kTileM);
    if (index == blockIdx.x) WaitForPrecedingGrids();
    Unit unit;
    for (int32_t i = 0; i < params.k_blocks; ++i) {
      const int32_t count = min(units_of_stage, params.units - i * units_of_stage);
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      if (warp == 1) BarrierArriveExpect(barrier, count * unit_bytes);
      for (int32_t u = 0; u < count; ++u) {
        if (u % 3 == warp - 1) {
          LoadUnit(params, &maps.x, shared + u * unit_bytes, barrier, unit, pixel, place.group);
        }
        unit.Advance(params, params.one_unit);
      }
      stage.Next();
    }
  }
}

// Producer warp 0 loads the filter.
template <class Tile>
__device__ __forceinline__ void ProduceFilter(const Params& params, const Maps& maps, uint32_t ring,
                                              const Barriers<Tile>& barriers) {
  RingPlace<Tile::kFilterSlots == 0 ? 1 : Tile::kFilterSlots> slot;
  const uint32_t filter = ring + Tile::kFilterAt;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const int32_t filter_block = (place.group * params.columns + place.n_tile * Tile::kTileN) / 32;
    if (index == blockIdx.x) WaitForPrecedingGrids();
    Unit unit;
    int32_t k_block = 0;
    for (int32_t i = 0; i < params.k_blocks; ++i) {
      const int32_t taps =
          i + 1 < params.k_blocks ? params.row_taps : (params.last_steps + kSteps - 1) / kSteps;
      for (int32_t s = 0; s < taps; ++s, ++k_block) {
        const int32_t from = params.tap_bytes == 0
                                 ? k_block * kKBlockBytes
                                 : (unit.Tap(params) * params.row_taps + s) * params.tap_bytes +
                                       unit.at.channels * kKBlockBytes;
        if constexpr (Tile::kStationary > 0) {
          // A few at a time, because the first activations queue behind earlier requests.
          constexpr int kAtOnce = 3;
          if (k_block >= kAtOnce) BarrierWait(barriers.Stationary(k_block - kAtOnce), 0);
          BarrierArriveExpect(barriers.Stationary(k_block), Tile::kBytesB);
          CopyTile5d(filter + k_block * Tile::kBytesB, &maps.filter, barriers.Stationary(k_block),
                     from, 0, 0, 0, filter_block);
        } else {
          BarrierWait(barriers.EmptyFilter(slot.slot), slot.parity ^ 1);
          BarrierArriveExpect(barriers.FullFilter(slot.slot), Tile::kBytesB);
          CopyTile5d(filter + slot.slot * Tile::kBytesB, &maps.filter,
                     barriers.FullFilter(slot.slot), from, 0, 0, 0, filter_block);
          slot.Next();
        }
      }
      if (params.tap_bytes > 0) unit.Advance(params, params.one_unit);  // one unit in each stage
    }
    if constexpr (Tile::kStationary > 0) return;
  }
}

// A consumer warpgroup.
template <typename T, class Tile>
__device__ __forceinline__ void ConsumeRows(const Params& params, uint32_t ring,
                                            const Barriers<Tile>& barriers, int warpgroup) {
  const Release release;
  RingPlace<Tile::kStages> stage;
  RingPlace<Tile::kFilterSlots == 0 ? 1 : Tile::kFilterSlots> slot;
  constexpr bool kPingpong = Tile::kPingpong;
  // The other consumer's turn begins when the last products are issued, before those of the
  // previous k-block have retired. With a filter ring this gains nothing.
  constexpr bool kEarlyTurn = kPingpong && Tile::kStationary > 0;
  const int32_t stride = (kPingpong ? 2 : 1) * gridDim.x;
  const int32_t stages = params.k_blocks;
  const int32_t steps_of_stage = params.row_taps * kSteps;
  const int32_t filter_k_blocks =
      (stages - 1) * params.row_taps + (params.last_steps + kSteps - 1) / kSteps;
  const uint32_t filter = ring + Tile::kFilterAt;
  if (kPingpong && warpgroup == 1) {
    NamedBarrierArrive(1, 256);  // consumer 0 has the first turn
    stage.Skip(stages);
    slot.Skip(filter_k_blocks);
  }
  typename Tile::Results results(params, ring, warpgroup);
  bool first = true;
  int32_t index = blockIdx.x + (kPingpong ? warpgroup * gridDim.x : 0);
  results.Begin(index);
  for (; index < params.tiles; index += stride) {
    const TilePlace place(params, index);
    const auto output = results.Prepare(place);
    if constexpr (kPingpong) NamedBarrierSync(1 + warpgroup, 256);
    typename Tile::Sums sums;
    uint32_t last_stage = 0, last_slot = 0;
    int32_t k_block = 0;
    for (int32_t i = 0; i < stages; ++i) {
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      const bool full = i < params.full_k_blocks;
      const int32_t steps = full ? steps_of_stage : params.last_steps;
      const int32_t steps_of_k_block = full ? kSteps : params.tail_steps;
      for (int32_t step = 0; step < steps; step += kSteps, ++k_block) {
        uint32_t b_at = filter;
        if constexpr (Tile::kStationary > 0) {
          if (first) BarrierWait(barriers.Stationary(k_block), 0);
          b_at += k_block * Tile::kBytesB;
        } else {
          BarrierWait(barriers.FullFilter(slot.slot), slot.parity);
          b_at += slot.slot * Tile::kBytesB;
        }
        MultiplyKBlock<T, Tile>(params, sums, Tile::Pixels(params, shared, warpgroup),
                                Tile::Filter(b_at, warpgroup), params.step_offset + step,
                                min(steps - step, steps_of_k_block), k_block > 0);
        if constexpr (kEarlyTurn) {
          if (i + 1 == stages && step + kSteps >= steps) NamedBarrierArrive(2 - warpgroup, 256);
        }
        // Slots and stages are freed one k-block late, so that one wgmma is always in flight.
        WgmmaWait<1>();
        if constexpr (Tile::kStationary == 0) {
          if (k_block > 0) release(barriers.EmptyFilter(last_slot));
          last_slot = slot.slot;
          slot.Next();
        }
        if (step == 0 && i > 0) release(barriers.Empty(last_stage));
      }
      last_stage = stage.slot;
      stage.Next();
    }
    if constexpr (kPingpong && !kEarlyTurn) NamedBarrierArrive(2 - warpgroup, 256);
    WgmmaWait<0>();
    if constexpr (Tile::kStationary == 0) release(barriers.EmptyFilter(last_slot));
    release(barriers.Empty(last_stage));
    results.Store(place, index + stride, output, sums);
    first = false;
    if constexpr (kPingpong) {
      stage.Skip(stages);
      if constexpr (Tile::kStationary == 0) slot.Skip(filter_k_blocks);
    }
  }
}

template <DType kType, class Tile_>
struct FilterRowForm : Tile_, LaunchOf<kType> {
  using Tile = Tile_;

  static __device__ __forceinline__ void Produce(const Params& params, const Maps& maps,
                                                 uint32_t ring, const Barriers<Tile>& barriers,
                                                 int warp) {
    if (warp == 0) {
      ProduceFilter(params, maps, ring, barriers);
    } else {
      ProduceRows(params, maps, ring, barriers, warp);
    }
  }
  template <typename T>
  static __device__ __forceinline__ void Consume(const Params& params, uint32_t ring,
                                                 const Barriers<Tile>& barriers, int warpgroup) {
    ConsumeRows<T, Tile>(params, ring, barriers, warpgroup);
  }
};

template <Op kOp, DType kType, int kBlocks, int kTileN, int kStages, int kFilterSlots>
struct FilterRow
    : FilterRowForm<kType, Int8Tile<true, kBlocks, kTileN, kStages, true, kFilterSlots>> {};

}  // namespace jaxconv::imma_wgmma

#endif  // JAXCONV_CUDA_IMMA_WGMMA_FILTER_ROW_SM90_CUH_
