// The mainloop of the forms whose stages hold the activations and the filter of one k-block
// (cooperative, pingpong, swap-AB): the producer's loads and the consumers' products (sm_90a).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_MAINLOOP_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_MAINLOOP_SM90_CUH_

#include <cstdint>

#include "cuda/common/ring_sm90.cuh"
#include "cuda/igemm_wgmma/loads_sm90.cuh"
#include "cuda/igemm_wgmma/params.h"
#include "cuda/igemm_wgmma/tensor_maps.h"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// Whether a residue class without taps (channel0 > 0) is stored as zeros without any load: strided
// dgrad of a small filter has many such tiles. In fprop they are rare, and the second call of the
// store costs short launches 3 %. fprop, filter-row and swap-AB therefore multiply a k-block of
// zeros.
template <Op kOp, class Tile>
inline constexpr bool kStoresZeros = kOp == Op::kDgrad && !Tile::kFilterRow && !Tile::kSwapAb;

// Whether a tile has rows: where residue classes differ in size, tiles of the smaller ones are
// empty.
template <class Tile>
__device__ __forceinline__ bool HasRows(const ResidueClass& of, const TilePlace& place) {
  return place.m_tile * Tile::kTileM < of.rows;
}

// The number of loads of a tile's activations. 0: the outputs, if any, are zeros.
template <Op kOp, class Tile>
__device__ __forceinline__ int32_t KBlocksOf(const Params& params, const TilePlace& place) {
  const ResidueClass& of = params.residue_class[place.residue_class];
  if (!HasRows<Tile>(of, place)) return 0;
  if (kStoresZeros<kOp, Tile> && of.channel0 > 0) return 0;
  return min(params.k_blocks_per_slice, of.k_blocks - place.slice * params.k_blocks_per_slice);
}

// The producer's view of a tile.
template <Op kOp, typename T, class Tile>
struct ProducedTile {
  const Params& params;
  const Maps& maps;
  const ResidueClass& of;
  const int32_t residue_class;
  const PixelPlace pixel;
  const int32_t n_first;
  const int boxes;  // of the filter
  const int32_t first, k_blocks;
  const int32_t tap_of_batch, a_channel, b_channel;
  KBlock<Tile::kFilterRow> k_block;

  // The reduction from k-block `from` on.
  __device__ __forceinline__ ProducedTile(const Params& params, const Maps& maps,
                                          const TilePlace& place, int32_t from)
      : params(params),
        maps(maps),
        of(params.residue_class[place.residue_class]),
        residue_class(place.residue_class),
        pixel(params, of, place.m_tile * Tile::kTileM, of.rows, place.batch),
        n_first(place.n_tile * Tile::kTileN),
        boxes(FilterBoxes<Tile>(params, n_first)),
        first(from),
        k_blocks(min(params.k_blocks_per_slice, of.k_blocks - first)),
        tap_of_batch(place.batch * params.filter_taps),
        a_channel(place.group * params.a_group + of.channel0),
        b_channel(place.group * params.b_group),
        k_block(of, first) {}
  // A slice of the reduction.
  __device__ __forceinline__ ProducedTile(const Params& params, const Maps& maps,
                                          const TilePlace& place)
      : ProducedTile(params, maps, place, place.slice * params.k_blocks_per_slice) {}

  __device__ __forceinline__ void LoadA(uint32_t shared, uint32_t barrier) const {
    LoadActivations<T>(params, of, k_block, shared, &maps.a[residue_class], barrier, a_channel,
                       pixel);
  }
  // Loads the filter under a tap of the k-block's filter row, counted from the row's first; 3xTF32:
  // `small` selects the small part.
  __device__ __forceinline__ void LoadB(uint32_t shared, uint32_t barrier, int32_t t0 = 0,
                                        bool small = false) const {
    const int32_t tap = tap_of_batch + k_block.Tap(of) + t0 * of.filter_step[0];
    LoadFilter<kOp, T, Tile>(shared, &maps.b, barrier, boxes, n_first,
                             of.channel0 + k_block.channel_block * kKBlockChannels<T>, b_channel,
                             small ? tap + params.filter_taps * params.batches.divisor : tap);
  }
  // Prefetches to L2 the first pixels and one tap of the filter, a different one in each CTA. This
  // is safe while the previous kernel still writes them: L2 is the point of coherence.
  __device__ __forceinline__ void Prefetch() const {
    LoadActivations<T, BoxTarget::kL2>(params, of, k_block, 0, &maps.a[residue_class], 0, a_channel,
                                       pixel);
    LoadFilter<kOp, T, Tile, BoxTarget::kL2>(
        0, &maps.b, 0, boxes, n_first, of.channel0 + k_block.channel_block * kKBlockChannels<T>,
        b_channel, tap_of_batch + blockIdx.x % params.filter_taps);
  }
};

// The producer, one thread. kParts: parts of the filter, which follow each other in a stage.
template <Op kOp, typename T, class Tile, int kParts = 1>
__device__ __forceinline__ void ProduceStages(const Params& params, const Maps& maps, uint32_t ring,
                                              const Barriers<Tile>& barriers) {
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const ResidueClass& of = params.residue_class[place.residue_class];
    if (!HasRows<Tile>(of, place)) continue;
    if (kStoresZeros<kOp, Tile> && of.channel0 > 0) continue;
    ProducedTile<kOp, T, Tile> tile(params, maps, place);
    if (index == blockIdx.x) tile.Prefetch();
    // This late, because nothing above reads memory that the previous kernel may write.
    WaitForPrecedingGrids();
    for (int32_t i = 0; i < tile.k_blocks; ++i) {
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, Tile::kBytesA + kParts * tile.boxes * kBoxBytes);
      tile.LoadA(shared, barrier);
      stage.Next();
      tile.LoadB(shared + Tile::kBytesA, barrier);
      if constexpr (kParts == 2) {
        tile.LoadB(shared + Tile::kBytesA + Tile::kBytesB, barrier, 0, /*small=*/true);
      }
      tile.k_block.Next(of);
    }
  }
}

// A consumer warpgroup's mainloop over the rows of A from `first_row` on: issues the wgmma of every
// k-block and returns the slot of the last one, which is still in flight. A stage is freed one
// k-block late, so that one wgmma is always in flight.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ uint32_t MultiplyKBlocks(int32_t k_blocks, uint32_t first_row,
                                                    uint32_t ring, const Barriers<Tile>& barriers,
                                                    const Release& release,
                                                    RingPlace<Tile::kStages>* stage,
                                                    typename Tile::Accumulators& acc) {
  uint32_t last = 0;
  for (int32_t i = 0; i < k_blocks; ++i) {
    BarrierWait(barriers.Full(stage->slot), stage->parity);
    const uint32_t a = ring + stage->slot * Tile::kStageBytes;
    const uint32_t b = a + Tile::kBytesA;
    Tile::template Multiply<T, kOp == Op::kWgrad, kMnMajorFilter<kOp, T>>(acc, a + first_row * 128,
                                                                          b, i > 0);
    WgmmaWait<1>();
    if (i > 0) release(barriers.Empty(last));
    last = stage->slot;
    stage->Next();
  }
  return last;
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_MAINLOOP_SM90_CUH_
