// A warpgroup's accumulators of a WgmmaTile -> the fused epilogue -> the output (sm_90a).
//
// 16-bit results are finished on the fragments. Where the activation is to clamp and the
// pre-activation is not wanted, by straight code without a branch (StoreClampedTile), because a store
// that jumps waits for the instruction cache longer than for memory. Any other epilogue has one copy,
// through which a loop passes (StoreActivatedTile). 32-bit results pass through shared memory
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

// Sixteen rows of kColumns (32 or 64) 16-bit elements of a warp in shared memory, 1 or 2 KB, without
// bank conflicts for matrices of fragments and for vectors of 16 bytes.
template <int kColumns>
struct RoundedRows {
  static constexpr int kLanesOfRow = kColumns / 8, kVectors = kLanesOfRow / 2;  // of a lane
  uint32_t staging;

  __device__ __forceinline__ uint32_t Chunk(int row, int chunk) const {
    return staging + row * (kColumns * 2) + (chunk ^ (kColumns == 64 ? row % 8 : row / 2 % 4)) * 16;
  }
  // What a lane passes to ldmatrix and stmatrix for the fragments of columns 8 j to 8 j + 15.
  __device__ __forceinline__ uint32_t Matrices(int lane, int j) const {
    return Chunk(lane % 16, j + lane / 16);
  }
  // Where a lane's vectors lie.
  static __device__ __forceinline__ int Row(int lane, int i) {
    return i * (32 / kLanesOfRow) + lane / kLanesOfRow;
  }
  static __device__ __forceinline__ int Column(int lane) { return lane % kLanesOfRow * 8; }
  __device__ __forceinline__ uint32_t Vector(int lane, int i) const {
    return Chunk(Row(lane, i), lane % kLanesOfRow);
  }
};

// Factors and summands of kColumns columns in shared memory, for each pair of columns 16 bytes: two
// factors, two summands. A warp has its own, so that no other has to wait for it.
template <int kColumns>
struct StagedTerms {
  uint32_t at;

  // Of columns [channel, channel + columns); those beyond get any.
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

// Where a tile's residual comes from: StoreClampedTile asks for 16 rows by 64 or 32 columns at a time.
struct NoResidual {
  static constexpr bool kPresent = false;
};

// From global memory, in rows, and through the staging of the results.
template <typename T, class Rows>
struct LoadedResidual {
  static constexpr bool kPresent = true;
  const EpilogueParams& params;
  uint4 ahead[Rows::kVectors];

  // offset(i): of vector i in the output.
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

// How StoreClampedTile passes through shared memory: 64 columns at a time, or 32 where a warp's
// staging is 2 KB or where there are no registers for as many of a loaded residual. The end of the
// staging, half of it at most, is for the terms of kPart columns.
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

// Whether the terms of a pingpong tile are in its warps' staging before it is stored: StageTerms.
template <typename T, class Tile>
__device__ constexpr bool TermsAreStaged() {
  if constexpr (sizeof(T) == 2 && Tile::kPingpong && !Tile::kSwapAb) {
    return ClampedSteps<Tile, false>::kPart == Tile::kTileN;
  }
  return false;
}

// A tile's terms -> a warp's staging, before the tile is multiplied if the consumer waits for its turn
// then, so that their latency is not the store's.
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

// 16-bit results whose activation is to clamp: t on the fragments, rounded, clamped, and through
// shared memory to rows of 128 or 64 bytes.
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
  // 192 accumulators leave no registers for the residual of the next step.
  constexpr bool kAhead = Tile::kAccumulators <= 160;
  const Rows rows{staging};
  const StagedTerms<kPart> terms{staging + Steps::kTermsAt};
  const int lane = Lane();
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int32_t channel0 = place.group * params.gemm_n + n_first;
  const int32_t columns = params.gemm_n - n_first;
  T* const out = static_cast<T*>(params.out);
  // Of whole sums of one batch: a column of the output's rows.
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
    // Blocks of a part, one after another.
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
        // In place of a loaded residual's matrices, which the warp has just read.
        StoreMatrices(rows.Matrices(lane, j), rounded[0], rounded[1], rounded[2], rounded[3]);
      }
      __syncwarp();
      // As many vectors at once as there are registers for.
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

// 16-bit results of any fused epilogue: t on the fragments, activated, rounded, and through shared
// memory to rows of 128 or 64 bytes. Ten activations of 128 sums would be 13,000 instructions, so 64
// columns, or 32 where registers or staging are short, are a turn of a loop, which picks the sums by
// uniform branches. A second result, t, takes a turn of its own.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ void StoreActivatedTile(const Params& params, const TilePlace& place,
                                                   const ResidueClass& of,
                                                   const typename Tile::Accumulators& acc,
                                                   int32_t m_first, uint32_t staging,
                                                   const FusedEpilogue& epilogue) {
  constexpr int kColumns = Tile::kStagingBytes >= 4096 && Tile::kAccumulators <= 128 ? 64 : 32;
  // Of which so many are activated at once.
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
    __syncwarp();  // the terms and rows before have been read
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

// A warpgroup's part of a finished tile -> any fused epilogue -> 32-bit output, through as
// much staging as there is, 16 rows by 64 or 32 columns at a time. `m_first`: the warp's first row.
// The loop over them is not unrolled, so that there is one copy of the epilogue; a uniform branch
// picks the accumulators.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ void StoreStagedTile(const Params& params, const TilePlace& place,
                                                const ResidueClass& of,
                                                const typename Tile::Accumulators& acc,
                                                int32_t m_first, uint32_t staging,
                                                const FusedEpilogue& epilogue) {
  constexpr int kColumns = Tile::kStagingBytes < 4096 ? 32 : 64;
  static_assert(Tile::kStagingBytes >= 16 * kColumns * 4);
  // 192 accumulators leave 48 registers for everything else.
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

// Any fused epilogue.
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
