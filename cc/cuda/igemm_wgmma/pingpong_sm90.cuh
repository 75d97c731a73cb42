// igemm_wgmma, pingpong: two consumer warpgroups, each with a tile of its own, alternate on the
// tensor cores, so that one stores while the other multiplies (sm_90a).
//
//     fprop   rows = output pixels, columns = K / groups, reduction = taps x C / groups
//     dgrad   rows = input pixels of one stride residue class, columns = C / groups,
//             reduction = taps x K / groups
//
// A k-block of the reduction is one tap and 128 bytes of channels: one TMA im2col box of tile_m
// pixels, and tile_n / 64 boxes of the filter. cooperative_sm90.cuh explains the loads and lists
// what is refused.
//
//     time            ->
//     consumer 0      | multiply tile 0 | store 0        | multiply tile 2 | store 2 ...
//     consumer 1                        | multiply tile 1 | store 1        | multiply tile 3 ...
//     producer        | loads of tile 0 | of tile 1       | of tile 2 ...
//
// The instances are *_pingpong and *_pingpong_c48. The kernel also has the tiles of
// swap_ab_sm90.cuh and patches_sm90.cuh.
//
// Persistent: CTA b processes tiles b, b + gridDim.x, ..., consumer 0 the first, third, ... of
// them. Shared memory of 128x128: 6 stages of (16 + 16) KB, 32 KB of staging, barriers. Registers:
// producer 24 to 40, consumers 232 or 240.
//
// Full(s) and Empty(s) as in cooperative_sm90.cuh, with one consumer warpgroup a stage. Named
// barriers 1 and 2 pass the tensor cores on: a consumer waits at its own before its mainloop and
// arrives at the other's after it. Barriers 3 and 4 order the staging of a swap-AB tile.
//
// Bound by the tensor cores. Example: 64 images of 28x28, 128 to 128 channels, 3x3, take 22 us,
// 15.8 of them wgmma; the first load, the changes of turns and the last store take the rest.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_PINGPONG_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_PINGPONG_SM90_CUH_

#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_wgmma/mainloop_sm90.cuh"
#include "cuda/igemm_wgmma/ring_form_sm90.cuh"
#include "cuda/igemm_wgmma/statistics_sm90.cuh"
#include "cuda/igemm_wgmma/store_swap_ab_sm90.cuh"
#include "cuda/igemm_wgmma/store_tile_sm90.cuh"
#include "cuda/igemm_wgmma/swap_ab_tile_sm90.cuh"
#include "cuda/igemm_wgmma/wgmma_tile_sm90.cuh"
#include "cuda/ptx/lane.cuh"

namespace jaxconv::igemm_wgmma {

// Stores a consumer warpgroup's tile of either kind.
template <Op kOp, typename T, class Tile, class Epilogue, int kWarpgroup, class Terms>
__device__ __forceinline__ void StorePingpongTile(const Params& params, const TilePlace& place,
                                                  const ResidueClass& of,
                                                  const typename Tile::Accumulators& acc,
                                                  uint32_t ring, const Terms& terms) {
  const auto epilogue = MakeEpilogue<Epilogue>(params.epilogue, params.slice_elements > 0);
  if constexpr (Tile::kSwapAb) {
    StoreSwapAbTile(
        SwapAbStore<kOp, T, Tile, kWarpgroup>{
            params, place, of, acc, ring + Tile::kStagingAt + kWarpgroup * 4 * Tile::kStagingBytes},
        epilogue, terms);
  } else {
    StoreTile(TileStore<kOp, T, Tile>{params, place, of, acc, place.m_tile * Tile::kTileM,
                                      ring + Tile::kStagingAt +
                                          (threadIdx.x / 32 - 4) * Tile::kStagingBytes},
              epilogue);
  }
}

// The same for a result whose statistics are requested.
template <Op kOp, typename T, class Tile, int kWarpgroup, class Sums>
__device__ __forceinline__ void StoreCountedTile(const Params& params, const TilePlace& place,
                                                 const ResidueClass& of,
                                                 const typename Tile::Accumulators& acc,
                                                 uint32_t staging, Sums* sums) {
  if constexpr (Tile::kSwapAb) {
    StoreAndCountLines(SwapAbStore<kOp, T, Tile, kWarpgroup>{params, place, of, acc, staging},
                       sums);
  } else if constexpr (Tile::kAccumulators > 128) {
    StoreAndCountRows<kWarpgroup, T, Tile>(params, place, of, acc, staging, sums);
  } else {
    StoreAndCount<3 + kWarpgroup, T, Tile>(params, place, of, acc, staging, sums);
    sums->template EndTile<kWarpgroup>(params, place);
  }
}

// A consumer warpgroup. Its number is a template parameter for the reason given at
// ConsumeCooperative.
template <Op kOp, typename T, class Tile, class Epilogue, bool kCounts, int kWarpgroup>
__device__ __forceinline__ void ConsumePingpong(const Params& params, uint32_t ring,
                                                const Barriers<Tile>& barriers) {
  const Release release;
  RingPlace<Tile::kStages> stage;
  const uint32_t staging = ring + Tile::kStagingAt + kWarpgroup * 4 * Tile::kStagingBytes;
  ConsumerSums<kCounts, T, Tile> sums(staging);
  if (kWarpgroup == 1) NamedBarrierArrive(1, 256);  // consumer 0 has the first turn
  // A consumer strides over its own tiles. If it iterated over all tiles and counted turns, the
  // compiler would treat its descriptors as different in each thread.
  const int32_t stride = gridDim.x;
  for (int32_t index = blockIdx.x + kWarpgroup * stride; index < params.tiles;
       index += 2 * stride) {
    if (index >= stride) {  // the other consumer's previous tile
      const TilePlace other(params, index - stride);
      stage.Skip(KBlocksOf<kOp, Tile>(params, other));
    }
    const TilePlace place(params, index);
    const ResidueClass& of = params.residue_class[place.residue_class];
    const int32_t k_blocks = KBlocksOf<kOp, Tile>(params, place);
    SwapAbTerms<Epilogue> terms;
    if constexpr (Tile::kSwapAb && !kCounts) terms.Load(params, place);
    if constexpr (!kCounts) {
      // For the first tile, or for each if tiles have different columns.
      if (index < 2 * stride || params.n_tiles.divisor * params.groups.divisor > 1) {
        StageTerms<T, Tile, Epilogue>(params, place,
                                      staging + Thread() / 32 % 4 * Tile::kStagingBytes);
      }
    }
    NamedBarrierSync(1 + kWarpgroup, 256);
    auto store = [&](const typename Tile::Accumulators& results) {
      if constexpr (kCounts) {
        StoreCountedTile<kOp, T, Tile, kWarpgroup>(params, place, of, results, staging, &sums);
      } else {
        StorePingpongTile<kOp, T, Tile, Epilogue, kWarpgroup>(params, place, of, results, ring,
                                                              terms);
      }
    };
    if (k_blocks == 0) {
      NamedBarrierArrive(2 - kWarpgroup, 256);
      if constexpr (kStoresZeros<kOp, Tile>) {
        // A separate call: merging these zeros with the accumulators below would spill them.
        if (HasRows<Tile>(of, place)) store({});
      }
      continue;
    }
    typename Tile::Accumulators acc;
    const uint32_t last =
        MultiplyKBlocks<kOp, T, Tile>(k_blocks, 0, ring, barriers, release, &stage, acc);
    NamedBarrierArrive(2 - kWarpgroup, 256);
    WgmmaWait<0>();
    release(barriers.Empty(last));
    store(acc);
  }
}

template <Op kOp, DType kType, class Tile>
struct PingpongForm : RingForm<kOp, kType, Tile> {
  template <class Tag, bool kCounts>
  static __device__ __forceinline__ void Consume(const Params& params, uint32_t ring,
                                                 const Barriers<Tile>& barriers, int warpgroup) {
    if (warpgroup == 1) {
      ConsumePingpong<kOp, typename Tag::T, Tile, typename Tag::Epilogue, kCounts, 0>(params, ring,
                                                                                      barriers);
    } else {
      ConsumePingpong<kOp, typename Tag::T, Tile, typename Tag::Epilogue, kCounts, 1>(params, ring,
                                                                                      barriers);
    }
  }
};

template <Op kOp, DType kType, int kBlocks, int kN, int kStages, int kStagingBytes>
struct Pingpong
    : PingpongForm<kOp, kType,
                   WgmmaTile<2, true, kBlocks, kN, 0, kStages, false, 0, 0, kStagingBytes>> {};

// The same tiles for at most 48 channels: only three quarters of a k-block are multiplied.
template <Op kOp, DType kType, int kBlocks, int kN, int kStages, int kStagingBytes>
struct PingpongC48
    : PingpongForm<kOp, kType,
                   WgmmaTile<2, true, kBlocks, kN, 0, kStages, false, 0, 0, kStagingBytes, 3>> {};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_PINGPONG_SM90_CUH_
