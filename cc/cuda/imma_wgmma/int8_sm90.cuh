// imma_wgmma: 8-bit convolution on wgmma (sm_90a). int32 sums of s8 or u8 activations and an s8
// filter, then the epilogue of core/epilogue.h.
//
//     rows = output pixels, columns = K / groups, reduction = taps x C / groups
//
// A k-block is 128 bytes of the packed filter's rows (core/conv_problem.h). Its activations are 1,
// 2 or 4 units of 128, 64 or 32 channels, each an im2col box of tile_m pixels under one tap: TMA
// handles padding, row ends, image ends, strides and dilation. Units of less than 128 channels let
// a k-block hold several taps, so that 32 or 64 channels fill it. nchw32 has units of 32 channels:
// interleaved boxes that skip the other channel blocks.
//
//     stage    | unit 0: tile_m x unit_bytes | unit 1 | ... | filter: tile_n x 128 bytes |
//
// The filter's five-dimensional tensor map loads the 32 rows of a block of output channels in the
// order 0 1 8 9 16 17 24 25 2 3 .... A thread holds columns 8 j + 2 t and 8 j + 2 t + 1 of every
// instruction, hence the 8 neighbouring channels 8 t .. 8 t + 7, and stores them from registers
// without an exchange.
//
// Cooperative: two consumer warpgroups share a tile, one above the other. Pingpong: each has a tile
// of its own and they alternate on the tensor cores, so that one stores while the other multiplies.
// Persistent: CTA b processes tiles b, b + gridDim.x, ..., with the N index fastest. Shared memory
// of 128x256: 4 stages of (16 + 32) KB and 8 KB of scales and biases; of 128x128: 6 stages of (16 +
// 16) KB. Registers: producer 40, consumers 232.
//
// Full(s): the producer announces a stage's bytes, consumers wait. Empty(s): each consumer
// warpgroup that reads the stage arrives when its wgmma has retired, the producer waits. Named
// barriers 1 and 2 pass the tensor cores on in pingpong; 3 and 4 signal, each to one warpgroup,
// that its tile's scales and biases have arrived.
//
// Bound by the tensor cores on large layers, by the epilogue where the reduction is short, and by
// TMA in nchw32, whose boxes have rows of 32 bytes (docs/notes/imma_wgmma.md).
//
// Refused, with a reason (plan.cc): channels of a group that are not multiples of 32, dilated
// inputs, batched filters, windows beyond the fields of a tensor map.
#ifndef JAXCONV_CUDA_IMMA_WGMMA_INT8_SM90_CUH_
#define JAXCONV_CUDA_IMMA_WGMMA_INT8_SM90_CUH_

#include <cstdint>

#include "cuda/imma_wgmma/launch_sm90.cuh"
#include "cuda/imma_wgmma/tile_sm90.cuh"

namespace jaxconv::imma_wgmma {

// The producer: one thread of each of its warps, because a thread takes about 100 cycles to issue a
// copy. Warp 0 announces a stage and loads the filter; warps 1, 2, 3, 0 load units 0 to 3 of a
// k-block.
template <class Tile>
__device__ __forceinline__ void ProduceKBlocks(const Params& params, const Maps& maps,
                                               uint32_t ring, const Barriers<Tile>& barriers,
                                               int warp) {
  RingPlace<Tile::kStages> stage;
  const int32_t units_of_k_block = params.units_of_k_block;  // 1, 2 or 4
  const int32_t own = (warp + 3) % 4;
  if (warp > 0 && own >= units_of_k_block) return;
  // If units are k-blocks, warp 0 also advances its unit, to find the filter's position.
  const Unit first{params.first[own & (units_of_k_block - 1)]};
  const uint32_t own_at = own * params.unit_bytes * Tile::kTileM;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const BasePixel pixel(params, place.m_tile * Tile::kTileM);
    if (index == blockIdx.x) WaitForPrecedingGrids();
    const int32_t filter_block = (place.group * params.columns + place.n_tile * Tile::kTileN) / 32;
    Unit unit = first;
    int32_t left = params.units;
    for (int32_t i = 0; i < params.k_blocks; ++i) {
      // Units past the last are not loaded: their columns of the filter hold zeros.
      const int32_t count = min(units_of_k_block, left);
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      if (warp == 0) {
        BarrierArriveExpect(barrier, count * params.unit_bytes * Tile::kTileM + Tile::kBytesB);
        const int32_t from = params.tap_bytes == 0 ? i * kKBlockBytes
                                                   : unit.Tap(params) * params.tap_bytes +
                                                         unit.at.channels * kKBlockBytes;
        CopyTile5d(shared + Tile::kBytesA, &maps.filter, barrier, from, 0, 0, 0, filter_block);
      }
      if (own < count) {
        LoadUnit(params, &maps.x, shared + own_at, barrier, unit, pixel, place.group);
      }
      unit.Advance(params, params.stage_units);
      left -= units_of_k_block;
      stage.Next();
    }
  }
}

// A consumer warpgroup. Both run the same code, because the straight-line epilogue competes for the
// instruction cache.
template <typename T, class Tile>
__device__ __forceinline__ void ConsumeKBlocks(const Params& params, uint32_t ring,
                                               const Barriers<Tile>& barriers, int warpgroup) {
  constexpr bool kPingpong = Tile::kPingpong;
  const Release release;
  RingPlace<Tile::kStages> stage;
  const int32_t k_blocks = params.k_blocks;
  const int32_t tail_steps = min(params.last_steps, params.tail_steps);
  typename Tile::Results results(params, ring, warpgroup);
  if (kPingpong && warpgroup == 1) {
    NamedBarrierArrive(1, 256);  // consumer 0 has the first turn
    stage.Skip(k_blocks);
  }
  const int32_t stride = (kPingpong ? 2 : 1) * gridDim.x;
  int32_t index = blockIdx.x + (kPingpong ? warpgroup * gridDim.x : 0);
  results.Begin(index);
  for (; index < params.tiles; index += stride) {
    const TilePlace place(params, index);
    const auto output = results.Prepare(place);
    if constexpr (kPingpong) NamedBarrierSync(1 + warpgroup, 256);
    typename Tile::Sums sums;
    uint32_t last = 0;
    for (int32_t i = 0; i < k_blocks; ++i) {
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      MultiplyKBlock<T, Tile>(params, sums, Tile::Pixels(params, shared, warpgroup),
                              Tile::Filter(shared + Tile::kBytesA, warpgroup), params.step_offset,
                              i < params.full_k_blocks ? kSteps : tail_steps, i > 0);
      // A stage is freed one k-block late, so that one wgmma is always in flight.
      WgmmaWait<1>();
      if (i > 0) release(barriers.Empty(last));
      last = stage.slot;
      stage.Next();
    }
    if constexpr (kPingpong) NamedBarrierArrive(2 - warpgroup, 256);
    WgmmaWait<0>();
    release(barriers.Empty(last));
    results.Store(place, index + stride, output, sums);
    if constexpr (kPingpong) stage.Skip(k_blocks);
  }
}

template <DType kType, class Tile_>
struct Int8Form : Tile_, LaunchOf<kType> {
  using Tile = Tile_;

  static __device__ __forceinline__ void Produce(const Params& params, const Maps& maps,
                                                 uint32_t ring, const Barriers<Tile>& barriers,
                                                 int warp) {
    ProduceKBlocks(params, maps, ring, barriers, warp);
  }
  template <typename T>
  static __device__ __forceinline__ void Consume(const Params& params, uint32_t ring,
                                                 const Barriers<Tile>& barriers, int warpgroup) {
    ConsumeKBlocks<T, Tile>(params, ring, barriers, warpgroup);
  }
};

template <Op kOp, DType kType, int kBlocks, int kTileN, int kStages>
struct Cooperative : Int8Form<kType, Int8Tile<false, kBlocks, kTileN, kStages>> {};

template <Op kOp, DType kType, int kBlocks, int kTileN, int kStages>
struct Pingpong : Int8Form<kType, Int8Tile<true, kBlocks, kTileN, kStages>> {};

}  // namespace jaxconv::imma_wgmma

#endif  // JAXCONV_CUDA_IMMA_WGMMA_INT8_SM90_CUH_
