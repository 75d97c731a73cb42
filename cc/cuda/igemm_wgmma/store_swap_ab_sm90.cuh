// Stores a swap-AB tile: a warpgroup's accumulators of a SwapAbTile -> a finish -> a staging -> a
// destination (finish_sm90.cuh, staging_sm90.cuh, destination_sm90.cuh; sm_90a).
//
//     results                    finish             staging       SwapAbStore::
//     16 bits, no epilogue       Round              PixelLines    Lines, Boxes
//     16 bits, clamp             Clamp              PixelLines    Lines, Boxes
//     16 bits, other epilogue    ActivateFragments  PixelLines    Activated
//     float32, no epilogue       none               FloatLines    Floats
//
// Pointwise tiles go to boxes of the output by TMA, all others to rows of 128 bytes.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_STORE_SWAP_AB_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_STORE_SWAP_AB_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/pick_sums.cuh"
#include "cuda/igemm_wgmma/destination_sm90.cuh"
#include "cuda/igemm_wgmma/finish_sm90.cuh"
#include "cuda/igemm_wgmma/staging_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/tma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// TMA stores boxes of this many pixels.
inline constexpr int kStoredPixels = 64;

// A warpgroup's tile. When it is stored, the previous tile's staging has been read: the warpgroup's
// threads have synchronised since, at their turn.
template <Op kOp, typename T, class Tile, int kWarpgroup>
struct SwapAbStore {
  static constexpr int kBarrier = 3 + kWarpgroup, kPixels = Tile::kTileM;
  static_assert(kPixels % 32 == 0);
  using Staging = PixelLines<kBarrier>;
  const Params& params;
  const TilePlace& place;
  const ResidueClass& of;
  const typename Tile::Accumulators& acc;
  const uint32_t staging;  // the warpgroup's
  const int32_t n_first = place.n_tile * Tile::kTileN;

  // Stores 32 pixels at a time. A residual is copied to the staging in rows, one turn ahead, and
  // read as fragments. `seen(first, vector, stored)` is called for every vector, also for those of
  // pixels outside the output.
  template <class Finish, class Seen = NothingSeen>
  __device__ __forceinline__ void Lines(const PixelRows<kOp, Tile>& row_of, const Finish& finish,
                                        Seen&& seen = {}) const {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const Staging lines(staging, lane, warp);
    RowVectors<T, Staging> to(params, place, n_first, lines);
    auto find_rows = [&](int p) { to.Find([&](int h) { return row_of(p / 16 + h, lane / 8); }); };
    auto copy_residual = [&](int p) {
      find_rows(p);
      CopyResidual(lines.Buffer(p / 32 % 2 * 4096), to);
    };
    if constexpr (Finish::kAdds) copy_residual(0);
#pragma unroll
    for (int p = 0; p < kPixels; p += 32) {
      const Staging buffer = lines.Buffer(p / 32 % 2 * 4096);
      if constexpr (Finish::kAdds) {
        CopyAsyncWait<0>();
        // All threads that arrive at this barrier have read the other buffer's results.
        buffer.Sync();
        if (p + 32 < kPixels) copy_residual(p + 32);
      }
      StageFragments<2>(buffer, finish, p, acc.of + p / 2);
      find_rows(p);
      buffer.Sync();
      StoreVectors<2>(buffer, params.out, to, 0, [&](int h, const uint4& vector) {
        seen(p == 0 && h == 0, vector, to.row[h] >= 0);
      });
    }
  }

  // Stages the whole tile with the tensor map's swizzle and stores it by TMA, which is faster and
  // leaves the warps free. `map`: (channels, rows).
  template <class Finish>
  __device__ __forceinline__ void Boxes(const Finish& finish, const CUtensorMap* map) const {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);
    const Staging lines(staging, lane, warp);
    if (warp == 0 && ElectOne()) WaitForStoresToRead();
    lines.Sync();
    StageFragments<kPixels / 16>(lines, finish, 0, acc.of);
    FenceForCopies();
    lines.Sync();
    if (warp == 0 && ElectOne()) {
#pragma unroll
      for (int p = 0; p < kPixels; p += kStoredPixels) {
        StoreTile2d(map, staging + p * 128, n_first, place.m_tile * kPixels + p);
      }
      CommitStores();
    }
  }

  // A loop of 32 pixels a turn that picks the sums by uniform branches; a second result, the
  // pre-activation t, takes a turn of its own.
  template <class Terms>
  __device__ __forceinline__ void Activated(const Terms& terms) const {
    const EpilogueParams& with = params.epilogue;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const Staging lines(staging, lane, warp);
    RowVectors<T, Staging> to(params, place, n_first, lines);
    uint32_t bytes = 0;
#pragma unroll 1
    for (FusedTurns turns(with, kPixels / 32); turns.More(); turns.Next()) {
      const int p = turns.Part() * 32;
      const bool activates = turns.Activates();
      const Staging buffer = lines.Buffer(bytes);
      const int32_t decoded = OutputRow<kOp>(
          params, of, place.m_tile * kPixels + p + lane / 4 % 2 * 16 + warp * 4 + lane % 4);
      to.Find([&](int h) { return __shfl_sync(0xffffffff, decoded, h * 4 + lane / 8); });
      if (with.residual != nullptr) CopyResidual(buffer, to);
      float t[16];
      PickSums<0, kPixels / 32>(p / 32, [&](int i, int e) { return acc.of[i * 16 + e]; }, t);
      ActivateFragments<T>(with, activates, terms, 0, t, buffer, 0, [&] {
        CopyAsyncWait<0>();
        buffer.Sync();
      });
      buffer.Sync();
      StoreVectors<1>(buffer, activates ? params.out : with.pre, to, 0);
      bytes ^= 4096;
    }
  }

  __device__ __forceinline__ void Floats(const PixelRows<kOp, Tile>& row_of) const {
    const uint32_t lane = threadIdx.x % 32;
    FloatLines<kBarrier> lines{staging, lane, threadIdx.x / 32 % 4};
    RowVectors<float, FloatLines<kBarrier>> to(params, place, n_first, lines);
#pragma unroll
    for (int i = 0; i < kPixels / 16; ++i) {
      lines.staging = staging + i % 2 * 4096;
      lines.Write(acc.of + i * 8);
      lines.Sync();
      to.Find([&](int v) { return row_of(i, v * 2 + lane / 16); });
      StoreVectors<1>(lines, params.out, to, 0);
    }
  }

  __device__ __forceinline__ void CopyResidual(const Staging& buffer,
                                               const RowVectors<T, Staging>& to) const {
    const void* const residual = params.epilogue.residual;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool valid = to.Stored(h, 0);
      CopyAsync<16>(buffer.Vector(h), valid ? to.At(residual, h, 0) : residual, valid);
    }
    CopyAsyncCommit();
  }
};

// Stores a finished tile. `terms`: the tile's SwapAbTerms.
template <class Epilogue, class Terms, Op kOp, typename T, class Tile, int kWarpgroup>
__device__ __forceinline__ void StoreSwapAbTile(const SwapAbStore<kOp, T, Tile, kWarpgroup>& tile,
                                                const Epilogue& epilogue, const Terms& terms) {
  const EpilogueParams& with = tile.params.epilogue;
  const PixelRows<kOp, Tile> row_of(tile.params, tile.of, tile.place);
  bool stored = false;
  if constexpr (!Epilogue::kPlain) {
    if (!epilogue.partial) {
      const PairBounds<T> bounds(with.activation);
      if (!Clamps(with)) {
        tile.Activated(terms);
      } else if (with.residual == nullptr) {
        tile.Lines(row_of, Clamp<T, Terms, false>{terms, bounds});
      } else {
        tile.Lines(row_of, Clamp<T, Terms, true>{terms, bounds});
      }
      stored = true;
    }
  } else if (!tile.params.out_is_f32) {
    tile.Lines(row_of, Round<T>());
    stored = true;
  }
  if (!stored) tile.Floats(row_of);
  FinishTile<Tile>(tile.params, tile.place, tile.of, epilogue);
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_STORE_SWAP_AB_SM90_CUH_
