// igemm_wgmma, cooperative: two or three consumer warpgroups share a tile, one above the other
// (sm_90a).
//
//     fprop   rows = output pixels, columns = K / groups, reduction = taps x C / groups
//     dgrad   rows = input pixels of one stride residue class, columns = C / groups,
//             reduction = taps x K / groups
//
// A k-block of the reduction is one tap and 128 bytes of channels: 64 in 16 bits, 32 in float32,
// which TMA rounds to TF32. Its activations are one im2col box of tile_m pixels x 128 bytes: TMA
// handles padding, row ends, image ends, strides, dilation and the end of the batch. Its filter is
// tile_n / 64 boxes of 64 x 128 bytes of (tap, C, K), MN-major for fprop and K-major for dgrad. A
// 1x1 convolution without stride and padding is a matrix product, loaded without im2col.
//
//     128 x 256     B: 256 columns         producer warpgroup: one thread issues the TMA loads
//     A: rows 0-63  | consumer 0 |         consumers: 64 rows each (256 x 128: 128 rows each)
//     rows 64-127   | consumer 1 |
//
// Persistent: CTA b processes tiles b, b + gridDim.x, ..., with the N index fastest. Shared memory
// of 128x256: 4 stages of (16 + 32) KB, 32 KB of staging, barriers. Registers: producer 24 to 40,
// consumers 232 or 240, three of them 160.
//
// Full(s): the producer announces a stage's bytes, consumers wait. Empty(s): each consumer
// warpgroup arrives when its wgmma has retired, the producer waits. While consumers store a tile,
// the producer fills the ring for the next. The setup overlaps the end of the previous kernel.
//
// Bound by the tensor cores, which run at the GPU's power limit on large layers. The tensor cores
// idle while a tile is stored, so pingpong is faster for short reductions.
//
// Refused, with a reason (geometry.cc): channels whose pitch is not a multiple of 16 bytes, groups
// whose channels are not a multiple of a k-block's, more than eight residue classes, windows beyond
// the fields of a tensor map, strides above 8.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_COOPERATIVE_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_COOPERATIVE_SM90_CUH_

#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_wgmma/mainloop_sm90.cuh"
#include "cuda/igemm_wgmma/ring_form_sm90.cuh"
#include "cuda/igemm_wgmma/store_tile_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/igemm_wgmma/wgmma_tile_sm90.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/lane.cuh"

namespace jaxconv::igemm_wgmma {

// Prefetches the residual of a warp's part of a tile to L2 before the tile is multiplied, because
// nothing hides the latency of the store. `m_first`: the warp's first row.
template <Op kOp, typename T, class Tile, class Epilogue>
__device__ __forceinline__ void PrefetchResidual(const Params& params, const TilePlace& place,
                                                 const ResidueClass& of, int32_t m_first) {
  if constexpr (!Epilogue::kPlain) {
    if (params.epilogue.residual == nullptr || params.slice_elements > 0) return;
    constexpr int kColumns = 128 / sizeof(T), kLines = Tile::kTileN / kColumns;  // lines of a row
    const int32_t n_first = place.n_tile * Tile::kTileN;
    const T* const residual =
        static_cast<const T*>(params.epilogue.residual) + place.OutputOffset(params, n_first);
#pragma unroll 1
    for (int i = Lane(); i < Tile::kBlocks * 16 * kLines; i += 32) {
      const int row = i / kLines, column = i % kLines * kColumns;
      const int32_t m = OutputRow<kOp>(params, of, m_first + row / 16 * 64 + row % 16);
      if (m < 0 || n_first + column >= params.gemm_n) continue;
      PrefetchToL2(residual + int64_t{m} * params.out_channels + column);
    }
  }
}

// The consumers. The mainloop has the warpgroup's number as a constant, so that the compiler sees
// that all threads have the same descriptors and keeps them in uniform registers. Moving them there
// before every wgmma halves the throughput of narrow tiles. All warpgroups store by the same code,
// because a CTA that stores one tile waits longer for instructions than for memory.
template <Op kOp, typename T, class Tile, class Epilogue>
__device__ __forceinline__ void ConsumeCooperative(const Params& params, uint32_t ring,
                                                   const Barriers<Tile>& barriers, int number) {
  const Release release;
  RingPlace<Tile::kStages> stage;
  const int32_t stride = gridDim.x;
  for (int32_t index = blockIdx.x; index < params.tiles; index += stride) {
    const TilePlace place(params, index);
    const ResidueClass& of = params.residue_class[place.residue_class];
    const int32_t k_blocks = KBlocksOf<kOp, Tile>(params, place);
    const int32_t row = place.m_tile * Tile::kTileM + number * Tile::kRowsOfWarpgroup;
    auto store = [&](const typename Tile::Accumulators& results) {
      StoreTile(TileStore<kOp, T, Tile>{params, place, of, results, row,
                                        ring + Tile::kStagingAt +
                                            (threadIdx.x / 32 - 4) * Tile::kStagingBytes},
                MakeEpilogue<Epilogue>(params.epilogue, params.slice_elements > 0));
    };
    if (k_blocks == 0) {
      if constexpr (kStoresZeros<kOp, Tile>) {
        // A separate call: merging these zeros with the accumulators below would spill them.
        if (HasRows<Tile>(of, place)) store({});
      }
      continue;
    }
    PrefetchResidual<kOp, T, Tile, Epilogue>(params, place, of, row + threadIdx.x / 32 % 4 * 16);
    typename Tile::Accumulators acc;
    uint32_t last;
    if (number == 0) {
      last = MultiplyKBlocks<kOp, T, Tile>(k_blocks, 0, ring, barriers, release, &stage, acc);
      WgmmaWait<0>();
    } else if (Tile::kWarpgroups == 2 || number == 1) {
      last = MultiplyKBlocks<kOp, T, Tile>(k_blocks, Tile::kRowsOfWarpgroup, ring, barriers,
                                           release, &stage, acc);
      WgmmaWait<0>();
    } else {
      last = MultiplyKBlocks<kOp, T, Tile>(k_blocks, 2 * Tile::kRowsOfWarpgroup, ring, barriers,
                                           release, &stage, acc);
      WgmmaWait<0>();
    }
    release(barriers.Empty(last));
    store(acc);
  }
}

template <Op kOp, DType kType, int kWarpgroups, int kBlocks, int kN0, int kN1, int kStages>
struct Cooperative
    : RingForm<kOp, kType, WgmmaTile<kWarpgroups, false, kBlocks, kN0, kN1, kStages>> {
  template <class Tag, bool /*kCounts*/>
  static __device__ __forceinline__ void Consume(const Params& params, uint32_t ring,
                                                 const Barriers<typename Tag::Tile>& barriers,
                                                 int warpgroup) {
    ConsumeCooperative<kOp, typename Tag::T, typename Tag::Tile, typename Tag::Epilogue>(
        params, ring, barriers, warpgroup - 1);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_COOPERATIVE_SM90_CUH_
