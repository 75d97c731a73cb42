// Stores a tile of pixels by channels: a warpgroup's accumulators of a WgmmaTile -> a finish -> a
// staging -> a destination (finish_sm90.cuh, staging_sm90.cuh, destination_sm90.cuh; sm_90a).
//
//     results                    finish             staging                     TileStore::
//     16 bits, no epilogue       Round              RoundedRows or WholeRows    Sums
//     float32, no epilogue       none               FloatRows or none           Sums
//     16 bits, clamp             Clamp              RoundedRows                 Clamped
//     16 bits, other epilogue    ActivateFragments  RoundedRows                 Activated
//     float32, epilogue          StagedVectors      StagedRows                  Staged
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_STORE_TILE_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_STORE_TILE_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/finish_staged.cuh"
#include "cuda/common/pick_sums.cuh"
#include "cuda/igemm_wgmma/destination_sm90.cuh"
#include "cuda/igemm_wgmma/finish_sm90.cuh"
#include "cuda/igemm_wgmma/staging_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_wgmma {

// The parts in which a clamped tile passes through shared memory: 64 columns, or 32 if a warp's
// staging is 2 KB or if registers are too few for a loaded residual of 64. At most the last half of
// the staging holds the scale and bias of kPart columns.
template <class Tile, bool kAdds>
struct ClampedSteps {
  static constexpr int kTerms = Tile::kStagingBytes / 16;
  static constexpr int kPart = Tile::kTileN < kTerms ? Tile::kTileN : kTerms;
  static constexpr int kTermsAt = Tile::kStagingBytes - kPart * 8;
  static constexpr bool kWide = kTermsAt >= 2048 && !(kAdds && Tile::kAccumulators >= 160);
  static constexpr int kColumns = kWide ? 64 : 32;
  static_assert(kPart % kColumns == 0 && Tile::kTileN % kColumns == 0);
};

// Whether StageTerms has written the scale and bias of a pingpong tile to its warps' staging before
// the tile is stored.
template <typename T, class Tile>
__device__ constexpr bool TermsAreStaged() {
  if constexpr (sizeof(T) == 2 && Tile::kPingpong && !Tile::kSwapAb) {
    return ClampedSteps<Tile, false>::kPart == Tile::kTileN;
  }
  return false;
}

// Writes a tile's scale and bias to a warp's staging. If the consumer waits for its turn, this
// happens before the tile is multiplied and hides their latency from the store.
template <typename T, class Tile, class Epilogue>
__device__ __forceinline__ void StageTerms(const Params& params, const TilePlace& place,
                                           uint32_t staging) {
  if constexpr (!Epilogue::kPlain && TermsAreStaged<T, Tile>()) {
    StagedTerms<Tile::kTileN>{staging + ClampedSteps<Tile, false>::kTermsAt}.Load(
        params, place, place.n_tile * Tile::kTileN);
  }
}

// A warp's part of a tile.
template <Op kOp, typename T, class Tile>
struct TileStore {
  const Params& params;
  const TilePlace& place;
  const ResidueClass& of;
  const typename Tile::Accumulators& acc;
  const int32_t row;       // the warpgroup's first
  const uint32_t staging;  // the warp's
  const int32_t m_first = row + static_cast<int32_t>(threadIdx.x / 32 % 4 * 16);  // the warp's row
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int32_t columns = params.gemm_n - n_first;  // of the output from the tile's first on

  __device__ __forceinline__ int32_t DecodedRow(int block, uint32_t lane) const {
    return OutputRow<kOp>(params, of, m_first + block * 64 + Tile::PixelOf(lane % 16));
  }
  // `decoded`: the lane's DecodedRow.
  template <class Destination>
  static __device__ __forceinline__ void FindRows(int32_t decoded, Destination* to) {
    to->Find([&](int i) { return __shfl_sync(0xffffffff, decoded, to->staged.Row(i)); });
  }

  // Without an epilogue. kWholeRows: stores whole 16-bit rows of 256 columns.
  template <bool kWholeRows, bool kPartial>
  __device__ __forceinline__ void Sums() const {
    constexpr bool kStaged = Tile::kStagingBytes >= 4096, kTwoBuffers = kStaged;
    const uint32_t lane = Lane();
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) {
      const int32_t decoded = DecodedRow(i, lane);
      if constexpr (sizeof(T) == 4) {
        if constexpr (Tile::kPingpong || (kPartial && !kStaged)) {
          Fragments(i, lane, decoded);
        } else if constexpr (kPartial) {
          Rows<float, false>(FloatRows<64>(staging, lane), i, decoded);
        } else {
          Rows<float, kTwoBuffers>(FloatRows<32>(staging, lane), i, decoded);
        }
      } else if (kPartial || params.out_is_f32) {
        if constexpr (kStaged) {
          Rows<float, false>(FloatRows<64>(staging, lane), i, decoded);
        } else {
          Fragments(i, lane, decoded);
        }
      } else if constexpr (kWholeRows) {
        static_assert(Tile::kTileN == 256);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const WholeRows rows{staging, lane, half};
          RowVectors<T, WholeRows> to(params, place, n_first, rows);
          FindRows(decoded, &to);
          rows.Sync();
#pragma unroll
          for (int j = 0; j < 8; ++j) rows.Write<T>(j, acc.Columns(i, j * 32));
          rows.Sync();
          StoreVectors<8>(rows, params.out, to, 0);
        }
      } else {
        Rows<T, kTwoBuffers>(RoundedRows<64>{staging, lane}, i, decoded);
      }
    }
  }

  // Stores a block in steps of one or two buffers of 2 KB, or one of 4 KB. A warp barrier separates
  // the reads of a buffer from the next writes to it; with two buffers, the barrier of the other
  // buffer serves.
  template <typename Out, bool kTwoBuffers, class Staging>
  __device__ __forceinline__ void Rows(Staging rows, int i, int32_t decoded) const {
    RowVectors<Out, Staging> to(params, place, n_first, rows);
    FindRows(decoded, &to);
#pragma unroll
    for (int c = 0; c < Tile::kTileN; c += Staging::kColumns) {
      if (c >= columns) break;
      if (!kTwoBuffers || c == 0) rows.Sync();
      if (kTwoBuffers) rows.staging = staging + c / Staging::kColumns % 2 * 2048;
      if constexpr (sizeof(Out) == 4) {
        rows.Write(acc.Columns(i, c));
      } else {
        StageFragments<4>(rows, Round<T>(), 0, acc.Columns(i, c));
      }
      rows.Sync();
      auto* at = static_cast<Out*>(params.out);
      if constexpr (Tile::kPatches && sizeof(Out) == 2) {
        // Rows of a patch are whole vectors.
        at += int64_t{params.patch_row.Div(n_first + c + rows.Column())} * params.patch_skip;
      }
      StoreVectors<4>(rows, at, to, c);
    }
  }

  // Stores a block of float32 sums without a staging. A warp stores eight rows of 32 bytes (four
  // lanes, a whole sector). This leaves the throughput of shared memory to the other warpgroup's
  // operands.
  __device__ __forceinline__ void Fragments(int i, uint32_t lane, int32_t decoded) const {
    const int64_t base = place.OutputOffset(params, n_first);
    int64_t offset[2];  // of rows g and g + 8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t m = __shfl_sync(0xffffffff, decoded, lane / 4 + half * 8);
      offset[half] = m < 0 ? -1 : base + int64_t{m} * params.out_channels;
    }
#pragma unroll
    for (int c = 0; c < Tile::kTileN; c += 64) {
      if (c >= columns) break;
      const float* const sums = acc.Columns(i, c);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = static_cast<int>(c + 8 * j + lane % 4 * 2);
        if (column >= columns) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (offset[half] < 0) continue;
          *reinterpret_cast<float2*>(static_cast<float*>(params.out) + offset[half] + column) =
              make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
        }
      }
    }
  }

  // kAdds: there is a residual. It is read from global memory in rows, one step ahead, and passes
  // through the staging of the results.
  template <bool kAdds>
  __device__ __forceinline__ void Clamped() const {
    using Steps = ClampedSteps<Tile, kAdds>;
    using Rows = RoundedRows<Steps::kColumns>;
    constexpr int kColumns = Steps::kColumns, kPart = Steps::kPart, kChunks = kPart / kColumns;
    constexpr int kVectors = Rows::kVectors;
    // With 192 accumulators, no registers are left to load the next part's residual ahead.
    constexpr bool kAhead = Tile::kAccumulators <= 160;
    const uint32_t lane = Lane();
    const Rows rows{staging, lane};
    const StagedTerms<kPart> staged_terms{staging + Steps::kTermsAt};
    const LaneTerms terms{staged_terms.at, lane};
    const PairBounds<T> bounds(params.epilogue.activation);
    RowVectors<T, Rows> to(params, place, n_first, rows);
    uint4 ahead[kVectors] = {};
    auto load_residual = [&](int c) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (to.Stored(i, c)) ahead[i] = *to.At(params.epilogue.residual, i, c);
      }
    };
#pragma unroll
    for (int part = 0; part < Tile::kTileN; part += kPart) {
      if (part > 0 && part >= columns) break;
      // One after another, the blocks of the part.
#pragma unroll
      for (int step = 0; step < Tile::kBlocks * kChunks; ++step) {
        const int block = step / kChunks, c = part + step % kChunks * kColumns;
        if (c >= Tile::kTileN || c >= columns) continue;
        if (c == part) {
          FindRows(DecodedRow(block, lane), &to);
          if constexpr (kAdds && kAhead) load_residual(c);
        }
        rows.Sync();
        if constexpr (!TermsAreStaged<T, Tile>()) {
          if (step == 0) staged_terms.Load(params, place, n_first + part);
        }
        if constexpr (kAdds) {
          if (!kAhead) load_residual(c);
#pragma unroll
          for (int i = 0; i < kVectors; ++i) rows.WriteVector(i, ahead[i]);
          if (kAhead && c + kColumns < part + kPart && c + kColumns < Tile::kTileN) {
            load_residual(c + kColumns);
          }
        }
        if (kAdds || step == 0) rows.Sync();
        StageFragments<kColumns / 16>(rows, Clamp<T, LaneTerms, kAdds>{terms, bounds}, c - part,
                                      acc.Columns(block, c));
        rows.Sync();
        // As many vectors at once as the registers hold.
        StoreVectors<kAhead || !kAdds ? kVectors : 1>(rows, params.out, to, c);
      }
    }
  }

  // A loop handles 64 columns a turn (32 where registers or staging are short) and picks the sums by
  // uniform branches. A second result, the pre-activation t, takes a turn of its own.
  __device__ __forceinline__ void Activated() const {
    constexpr int kColumns = Tile::kStagingBytes >= 4096 && Tile::kAccumulators <= 128 ? 64 : 32;
    // Columns that are activated at once.
    constexpr int kAtOnce = Tile::kAccumulators > 160 ? 16 : kColumns,
                  kParts = Tile::kTileN / kAtOnce;
    using Steps = ClampedSteps<Tile, false>;
    using Rows = RoundedRows<kColumns>;
    constexpr int kPart = Steps::kPart;
    static_assert(kPart % kColumns == 0 && Tile::kTileN % kColumns == 0);
    const EpilogueParams& with = params.epilogue;
    const uint32_t lane = Lane();
    const Rows rows{staging, lane};
    const StagedTerms<kPart> staged_terms{staging + Steps::kTermsAt};
    const LaneTerms terms{staged_terms.at, lane};
    const int32_t end = min(columns, Tile::kTileN);
    RowVectors<T, Rows> to(params, place, n_first, rows);
#pragma unroll 1
    for (int32_t part = 0; part < end; part += kPart) {
      rows.Sync();  // the previous terms and rows have been read
      if constexpr (!TermsAreStaged<T, Tile>()) staged_terms.Load(params, place, n_first + part);
#pragma unroll 1
      for (int block = 0; block < Tile::kBlocks; ++block) {
        FindRows(DecodedRow(block, lane), &to);
        FusedTurns turns(with, (min(end - part, kPart) + kColumns - 1) / kColumns);
#pragma unroll 1
        for (; turns.More(); turns.Next()) {
          const int32_t c = part + turns.Part() * kColumns;
          const bool activates = turns.Activates();
          rows.Sync();
          if (with.residual != nullptr) {
#pragma unroll
            for (int i = 0; i < Rows::kVectors; ++i) {
              uint4 added{};
              if (to.Stored(i, c)) added = *to.At(with.residual, i, c);
              rows.WriteVector(i, added);
            }
            rows.Sync();
          }
#pragma unroll
          for (int first = 0; first < kColumns; first += kAtOnce) {
            float t[kAtOnce / 2];
            PickSums<0, Tile::kBlocks * kParts>(
                block * kParts + (c + first) / kAtOnce,
                [&](int i, int e) { return acc.Columns(i / kParts, i % kParts * kAtOnce)[e]; }, t);
            ActivateFragments<T>(with, activates, terms, c - part + first, t, rows, first / 16,
                                 [] {});
          }
          rows.Sync();
          StoreVectors<1>(rows, activates ? params.out : with.pre, to, c);
        }
      }
    }
  }

  // Passes through the staging 16 rows by 64 or 32 columns at a time. The loop is not unrolled, so
  // that the code has one copy of the epilogue; a uniform branch picks the accumulators.
  __device__ __forceinline__ void Staged() const {
    constexpr int kColumns = Tile::kStagingBytes < 4096 ? 32 : 64;
    static_assert(Tile::kStagingBytes >= 16 * kColumns * 4);
    // With 192 accumulators, 48 registers are left for everything else.
    constexpr bool kAhead = Tile::kAccumulators < 160;
    constexpr int kBytes = Tile::kAccumulators > 160 ? 8 : 16;
    using Rows = StagedRows<T, kColumns, kBytes>;
    const Rows rows{staging};
    const FusedEpilogue epilogue(params.epilogue);
    const int lane = Lane();
    const int64_t base = place.OutputOffset(params, n_first);
#pragma unroll 1
    for (int block = 0; block < Tile::kBlocks; ++block) {
      const int32_t decoded = DecodedRow(block, lane);
#pragma unroll 1
      for (int c = 0; c < Tile::kTileN && c < columns; c += kColumns) {
        const int column = c + Rows::Column(lane);
        const bool inside = column < columns;
        auto offset_of = [&](int i) -> int64_t {
          const int32_t m = __shfl_sync(0xffffffff, decoded, Rows::Row(lane, i));
          return m < 0 || !inside ? -1 : base + int64_t{m} * params.out_channels + column;
        };
        const StagedVectors<T, Rows::kVectors, kAhead, kAhead ? Rows::kVectors : 1, kBytes> vectors(
            epilogue, place.group * params.gemm_n + n_first + column, inside, offset_of);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
          for (int k = 0; k < Tile::kTileN; k += kColumns) {
            if (i == block && k == c) rows.Store(lane, acc.Columns(i, k));
          }
        }
        __syncwarp();
        vectors.Finish(epilogue, static_cast<T*>(params.out), offset_of, [&](int i, int q) {
          return rows.Quad(Rows::Row(lane, i), Rows::Column(lane) / 4 + q);
        });
      }
    }
  }
};

// Stores a warp's part of a finished tile.
template <bool kWholeRows = false, class Epilogue, Op kOp, typename T, class Tile>
__device__ __forceinline__ void StoreTile(const TileStore<kOp, T, Tile>& tile,
                                          const Epilogue& epilogue) {
  bool stored = false;
  if constexpr (!Epilogue::kPlain) {
    if (!epilogue.partial) {
      if constexpr (sizeof(T) == 4) {
        tile.Staged();
      } else if (!Clamps(tile.params.epilogue)) {
        tile.Activated();
      } else if (tile.params.epilogue.residual == nullptr) {
        tile.template Clamped<false>();
      } else {
        tile.template Clamped<true>();
      }
      stored = true;
    }
  }
  if (!stored) tile.template Sums<kWholeRows, !Epilogue::kPlain>();
  FinishTile<Tile>(tile.params, tile.place, tile.of, epilogue);
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_STORE_TILE_SM90_CUH_
