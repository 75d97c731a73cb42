// A warpgroup's accumulators of a WgmmaTile -> the fused epilogue -> the output (sm_90a).
//
// 16-bit results go through the epilogue on the fragments. If the activation is a clamp and the
// pre-activation is not stored, the code is straight, without a branch (StoreClampedTile): a jump
// waits longer for the instruction cache than the store waits for memory. Every other epilogue is a
// loop over one copy of the code (StoreActivatedTile). 32-bit results pass through shared memory
// (StoreStagedTile).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/finish_staged.cuh"
#include "cuda/common/pick_sums.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/igemm_wgmma/fused_turns_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// A warp's sixteen rows of kColumns (32 or 64) 16-bit elements in shared memory, 1 or 2 KB. Neither
// fragment accesses (ldmatrix, stmatrix) nor 16-byte vectors have bank conflicts.
template <int kColumns>
struct RoundedRows {
  static constexpr int kLanesOfRow = kColumns / 8, kVectors = kLanesOfRow / 2;  // for each lane
  uint32_t staging;

  __device__ __forceinline__ uint32_t Chunk(int row, int chunk) const {
    return staging + row * (kColumns * 2) + (chunk ^ (kColumns == 64 ? row % 8 : row / 2 % 4)) * 16;
  }
  // The address a lane passes to ldmatrix and stmatrix for the fragments of columns 8 j to 8 j +
  // 15.
  __device__ __forceinline__ uint32_t Matrices(int lane, int j) const {
    return Chunk(lane % 16, j + lane / 16);
  }
  // The row and column of a lane's vector i.
  static __device__ __forceinline__ int Row(int lane, int i) {
    return i * (32 / kLanesOfRow) + lane / kLanesOfRow;
  }
  static __device__ __forceinline__ int Column(int lane) { return lane % kLanesOfRow * 8; }
  __device__ __forceinline__ uint32_t Vector(int lane, int i) const {
    return Chunk(Row(lane, i), lane % kLanesOfRow);
  }
};

// Scale and bias of kColumns columns in shared memory: 16 bytes for each pair of columns, two
// factors and two summands. Each warp has its own copy, so that no warp waits for another.
template <int kColumns>
struct StagedTerms {
  uint32_t at;

  // Loads columns [channel, channel + columns); the others get arbitrary values.
  __device__ __forceinline__ void Load(const FusedEpilogue& epilogue, int32_t channel,
                                       int columns) const {
#pragma unroll
    for (int first = 0; first < kColumns; first += 128) {
      const int column = first + Lane() * 4;
      if (column >= kColumns) continue;
      const ChannelTerms<4> terms = epilogue.Terms<4>(channel + (column < columns ? column : 0));
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        StoreShared(at + (column + e) * 8,
                    {terms.scale[e], terms.scale[e + 1], terms.bias[e], terms.bias[e + 1]});
      }
    }
  }
};

// The source of a tile's residual. StoreClampedTile asks for 16 rows by 64 or 32 columns at a time.
struct NoResidual {
  static constexpr bool kPresent = false;
};

// Reads the residual from global memory in rows, and passes it through the staging of the results.
template <typename T, class Rows>
struct LoadedResidual {
  static constexpr bool kPresent = true;
  const EpilogueParams& params;
  uint4 ahead[Rows::kVectors];

  // offset(i): the output offset of vector i.
  template <typename OffsetOf>
  __device__ __forceinline__ void Load(const int32_t (&row)[Rows::kVectors], bool inside,
                                       OffsetOf offset) {
#pragma unroll
    for (int i = 0; i < Rows::kVectors; ++i) {
      if (row[i] < 0 || !inside) continue;
      ahead[i] =
          *reinterpret_cast<const uint4*>(static_cast<const T*>(params.residual) + offset(i));
    }
  }
  __device__ __forceinline__ void Stage(const Rows& rows, int lane) const {
#pragma unroll
    for (int i = 0; i < Rows::kVectors; ++i) {
      StoreChunk(rows.Vector(lane, i), {ahead[i].x, ahead[i].y, ahead[i].z, ahead[i].w});
    }
  }
};

// The parts in which StoreClampedTile passes through shared memory: 64 columns, or 32 if a warp's
// staging is 2 KB or if registers are too few for a loaded residual of 64. At most the last half of
// the staging holds the scale and bias of kPart columns.
template <class Tile, bool kLoadsResidual>
struct ClampedSteps {
  static constexpr int kTerms = Tile::kStagingBytes / 16;
  static constexpr int kPart = Tile::kTileN < kTerms ? Tile::kTileN : kTerms;
  static constexpr int kTermsAt = Tile::kStagingBytes - kPart * 8;
  static constexpr bool kWide = kTermsAt >= 2048 && !(kLoadsResidual && Tile::kAccumulators >= 160);
  static constexpr int kColumns = kWide ? 64 : 32;
  static_assert(kPart % kColumns == 0 && Tile::kTileN % kColumns == 0);
  using Rows = RoundedRows<kColumns>;
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
    const int32_t n_first = place.n_tile * Tile::kTileN;
    StagedTerms<Tile::kTileN>{staging + ClampedSteps<Tile, false>::kTermsAt}.Load(
        FusedEpilogue(params.epilogue), place.group * params.gemm_n + n_first,
        params.gemm_n - n_first);
  }
}

// 16-bit results whose activation is a clamp: computes t on the fragments, rounds, clamps, and
// passes through shared memory to rows of 128 or 64 bytes.
template <Op kOp, typename T, class Tile, class Residual>
__device__ __forceinline__ void StoreClampedTile(const Params& params, const TilePlace& place,
                                                 const ResidueClass& of,
                                                 const typename Tile::Accumulators& acc,
                                                 int32_t m_first, uint32_t staging,
                                                 const FusedEpilogue& epilogue,
                                                 Residual& residual) {
  constexpr bool kLoads = Residual::kPresent;
  using Steps = ClampedSteps<Tile, kLoads>;
  using Rows = typename Steps::Rows;
  constexpr int kColumns = Steps::kColumns, kPart = Steps::kPart, kChunks = kPart / kColumns;
  // With 192 accumulators, no registers are left to load the next part's residual ahead.
  constexpr bool kAhead = Tile::kAccumulators <= 160;
  const Rows rows{staging};
  const StagedTerms<kPart> terms{staging + Steps::kTermsAt};
  const int lane = Lane();
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int32_t channel0 = place.group * params.gemm_n + n_first;
  const int32_t columns = params.gemm_n - n_first;
  T* const out = static_cast<T*>(params.out);
  // There is no split-K and one batch, so this is a column of the output.
  const int32_t first_column =
      static_cast<int32_t>(place.OutputOffset(params, n_first)) + Rows::Column(lane);
  const PairBounds<T> bounds(epilogue.params.activation);
  int32_t row[Rows::kVectors];
  auto find_rows = [&](int block) {
    const int32_t decoded = OutputRow<kOp>(params, of, m_first + block * 64 + lane % 16);
#pragma unroll
    for (int i = 0; i < Rows::kVectors; ++i) {
      row[i] = __shfl_sync(0xffffffff, decoded, Rows::Row(lane, i));
    }
  };
  auto inside = [&](int c) { return c + Rows::Column(lane) < columns; };
  auto offset = [&](int c) {
    return [&, c](int i) { return int64_t{row[i]} * params.out_channels + (first_column + c); };
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
        find_rows(block);
        if constexpr (kLoads && kAhead) residual.Load(row, inside(c), offset(c));
      }
      __syncwarp();
      if constexpr (!TermsAreStaged<T, Tile>()) {
        if (step == 0) terms.Load(epilogue, channel0 + part, columns - part);
      }
      if constexpr (kLoads) {
        if (!kAhead) residual.Load(row, inside(c), offset(c));
        residual.Stage(rows, lane);
        if (kAhead && c + kColumns < part + kPart && c + kColumns < Tile::kTileN) {
          residual.Load(row, inside(c + kColumns), offset(c + kColumns));
        }
      }
      if (kLoads || step == 0) __syncwarp();
      const float* sums = acc.Columns(block, c);
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {
        [[maybe_unused]] uint32_t added[4];
        uint32_t rounded[4];
        if constexpr (Residual::kPresent) LoadMatrices(rows.Matrices(lane, j), added);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float term[4];
          LoadShared<0>(terms.at + (c - part + (j + h) * 8 + lane % 4 * 2) * 8, term);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float* pair = sums + (j + h) * 4 + r * 2;
            float t[2] = {fmaf(pair[0], term[0], term[2]), fmaf(pair[1], term[1], term[3])};
            if constexpr (Residual::kPresent) Neighbours<T, 2>{added[h * 2 + r]}.AddTo(t);
            rounded[h * 2 + r] = bounds.Clamp(PackPair<T>(t[0], t[1]));
          }
        }
        // Overwrites the loaded residual's matrices, which the warp has just read.
        StoreMatrices(rows.Matrices(lane, j), rounded[0], rounded[1], rounded[2], rounded[3]);
      }
      __syncwarp();
      // As many vectors at once as the registers hold.
      constexpr int kAtOnce = kAhead || !kLoads ? Rows::kVectors : 1;
#pragma unroll
      for (int v = 0; v < Rows::kVectors; v += kAtOnce) {
        uint4 chunk[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) chunk[i] = LoadChunk(rows.Vector(lane, v + i));
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (row[v + i] >= 0 && inside(c)) {
            *reinterpret_cast<uint4*>(out + offset(c)(v + i)) = chunk[i];
          }
        }
      }
    }
  }
}

// 16-bit results of any fused epilogue: computes t on the fragments, activates, rounds, and passes
// through shared memory to rows of 128 or 64 bytes. Unrolled, ten activations of 128 sums would be
// 13,000 instructions. So a loop handles 64 columns a turn (32 where registers or staging are
// short) and picks the sums by uniform branches. A second result, the pre-activation t, takes a
// turn of its own.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ void StoreActivatedTile(const Params& params, const TilePlace& place,
                                                   const ResidueClass& of,
                                                   const typename Tile::Accumulators& acc,
                                                   int32_t m_first, uint32_t staging,
                                                   const FusedEpilogue& epilogue) {
  constexpr int kColumns = Tile::kStagingBytes >= 4096 && Tile::kAccumulators <= 128 ? 64 : 32;
  // Columns that are activated at once.
  constexpr int kAtOnce = Tile::kAccumulators > 160 ? 16 : kColumns,
                kParts = Tile::kTileN / kAtOnce;
  using Steps = ClampedSteps<Tile, false>;
  constexpr int kPart = Steps::kPart;
  static_assert(kPart % kColumns == 0 && Tile::kTileN % kColumns == 0);
  using Rows = RoundedRows<kColumns>;
  const Rows rows{staging};
  const StagedTerms<kPart> terms{staging + Steps::kTermsAt};
  const EpilogueParams& with = epilogue.params;
  const int lane = Lane();
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int32_t columns = min(params.gemm_n - n_first, Tile::kTileN);
  const int64_t first_column = place.OutputOffset(params, n_first) + Rows::Column(lane);
#pragma unroll 1
  for (int32_t part = 0; part < columns; part += kPart) {
    __syncwarp();  // the previous terms and rows have been read
    if constexpr (!TermsAreStaged<T, Tile>()) {
      terms.Load(epilogue, place.group * params.gemm_n + n_first + part, columns - part);
    }
#pragma unroll 1
    for (int block = 0; block < Tile::kBlocks; ++block) {
      const int32_t decoded = OutputRow<kOp>(params, of, m_first + block * 64 + lane % 16);
      int32_t row[Rows::kVectors];
#pragma unroll
      for (int i = 0; i < Rows::kVectors; ++i) {
        row[i] = __shfl_sync(0xffffffff, decoded, Rows::Row(lane, i));
      }
      FusedTurns turns(with, (min(columns - part, kPart) + kColumns - 1) / kColumns);
#pragma unroll 1
      for (; turns.More(); turns.Next()) {
        const int32_t c = part + turns.Part() * kColumns;
        const bool activates = turns.Activates();
        auto stored = [&](int i) { return row[i] >= 0 && c + Rows::Column(lane) < columns; };
        auto offset = [&](int i) {
          return int64_t{row[i]} * params.out_channels + (first_column + c);
        };
        __syncwarp();
        if (with.residual != nullptr) {
#pragma unroll
          for (int i = 0; i < Rows::kVectors; ++i) {
            uint4 added{};
            if (stored(i)) {
              added =
                  *reinterpret_cast<const uint4*>(static_cast<const T*>(with.residual) + offset(i));
            }
            StoreChunk(rows.Vector(lane, i), {added.x, added.y, added.z, added.w});
          }
          __syncwarp();
        }
#pragma unroll
        for (int first = 0; first < kColumns; first += kAtOnce) {
          float t[kAtOnce / 2];
          PickSums<0, Tile::kBlocks * kParts>(
              block * kParts + (c + first) / kAtOnce,
              [&](int i, int e) { return acc.Columns(i / kParts, i % kParts * kAtOnce)[e]; }, t);
#pragma unroll
          for (int j = 0; j < kAtOnce / 8; ++j) {
            float term[4];
            LoadShared<0>(terms.at + (c - part + first + j * 8 + lane % 4 * 2) * 8, term);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              t[j * 4 + e] = fmaf(t[j * 4 + e], term[e % 2], term[2 + e % 2]);
            }
          }
          if (with.residual != nullptr) {
#pragma unroll
            for (int j = 0; j < kAtOnce / 8; j += 2) {
              uint32_t added[4];
              LoadMatrices(rows.Matrices(lane, first / 8 + j), added);
              AddFragments<T>(added, t + j * 4);
            }
          }
          if (activates) Activate(with.activation, with.negative_slope, t);
#pragma unroll
          for (int j = 0; j < kAtOnce / 8; j += 2) {
            const float* v = t + j * 4;
            StoreMatrices(rows.Matrices(lane, first / 8 + j), PackPair<T>(v[0], v[1]),
                          PackPair<T>(v[2], v[3]), PackPair<T>(v[4], v[5]),
                          PackPair<T>(v[6], v[7]));
          }
        }
        __syncwarp();
        T* const out = static_cast<T*>(activates ? params.out : with.pre);
#pragma unroll
        for (int i = 0; i < Rows::kVectors; ++i) {
          const uint4 chunk = LoadChunk(rows.Vector(lane, i));
          if (stored(i)) *reinterpret_cast<uint4*>(out + offset(i)) = chunk;
        }
      }
    }
  }
}

// Stores a warpgroup's part of a finished tile through any fused epilogue as 32-bit output. It
// passes through the staging 16 rows by 64 or 32 columns at a time. The loop is not unrolled, so
// that the code has one copy of the epilogue; a uniform branch picks the accumulators. `m_first`:
// the warp's first row.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ void StoreStagedTile(const Params& params, const TilePlace& place,
                                                const ResidueClass& of,
                                                const typename Tile::Accumulators& acc,
                                                int32_t m_first, uint32_t staging,
                                                const FusedEpilogue& epilogue) {
  constexpr int kColumns = Tile::kStagingBytes < 4096 ? 32 : 64;
  static_assert(Tile::kStagingBytes >= 16 * kColumns * 4);
  // With 192 accumulators, 48 registers are left for everything else.
  constexpr bool kAhead = Tile::kAccumulators < 160;
  constexpr int kBytes = Tile::kAccumulators > 160 ? 8 : 16;
  using Rows = StagedRows<T, kColumns, kBytes>;
  const Rows rows{staging};
  const int lane = Lane();
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int64_t base = place.OutputOffset(params, n_first);
#pragma unroll 1
  for (int block = 0; block < Tile::kBlocks; ++block) {
    const int32_t decoded =
        OutputRow<kOp>(params, of, m_first + block * 64 + Tile::PixelOf(lane % 16));
#pragma unroll 1
    for (int c = 0; c < Tile::kTileN && n_first + c < params.gemm_n; c += kColumns) {
      const int column = c + Rows::Column(lane);
      const bool inside = n_first + column < params.gemm_n;
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

// Stores a tile through any fused epilogue.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ void StoreFusedTile(const Params& params, const TilePlace& place,
                                               const ResidueClass& of,
                                               const typename Tile::Accumulators& acc,
                                               int32_t m_first, uint32_t staging,
                                               const FusedEpilogue& epilogue) {
  if constexpr (sizeof(T) == 2) {
    if (Clamps(epilogue.params)) {
      if (epilogue.params.residual == nullptr) {
        NoResidual none;
        StoreClampedTile<kOp, T, Tile>(params, place, of, acc, m_first, staging, epilogue, none);
      } else {
        using Rows = typename ClampedSteps<Tile, true>::Rows;
        LoadedResidual<T, Rows> residual{params.epilogue};
        StoreClampedTile<kOp, T, Tile>(params, place, of, acc, m_first, staging, epilogue,
                                       residual);
      }
      return;
    }
  }
  if constexpr (sizeof(T) == 2) {
    StoreActivatedTile<kOp, T, Tile>(params, place, of, acc, m_first, staging, epilogue);
  } else {
    StoreStagedTile<kOp, T, Tile>(params, place, of, acc, m_first, staging, epilogue);
  }
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SM90_CUH_
