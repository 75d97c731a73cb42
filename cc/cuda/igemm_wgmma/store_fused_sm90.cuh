// A warpgroup's accumulators of a WgmmaTile -> the fused epilogue -> the output (sm_90a).
//
// Two ways. Where the activation is to clamp and the pre-activation is not wanted (most networks'
// inference), 16-bit results are finished on the fragments: straight code without a branch, because
// a store that jumps waits for the instruction cache longer than for memory. Everything else passes
// through shared memory as float32 (StoreStagedTile).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/finish_staged.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
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

// 16-bit results whose activation is to clamp: t on the fragments, rounded, clamped, and through
// shared memory to rows of 128 or 64 bytes. Half of a warp's staging holds these, the other half the
// terms. A residual comes the opposite way: loaded in rows a step ahead, and through the same shared
// memory to the fragments.
template <Op kOp, typename T, class Tile, bool kResidual>
__device__ __forceinline__ void StoreClampedTile(const Params& params, const TilePlace& place,
                                                 const ResidueClass& of,
                                                 const typename Tile::Accumulators& acc,
                                                 int32_t m_first, uint32_t staging,
                                                 const FusedEpilogue& epilogue) {
  // 64 where there are registers for as many of the residual beside the accumulators.
  constexpr bool kWide = Tile::kStagingBytes >= 4096 && !(kResidual && Tile::kAccumulators >= 160);
  constexpr int kColumns = kWide ? 64 : 32;
  constexpr int kPart = Tile::kStagingBytes / 16;  // columns whose terms there is room for
  static_assert(Tile::kTileN % kColumns == 0);
  using Rows = RoundedRows<kColumns>;
  const Rows rows{staging};
  const StagedTerms<(Tile::kTileN < kPart ? Tile::kTileN : kPart)> terms{staging +
                                                                         Tile::kStagingBytes / 2};
  const int lane = Lane();
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int32_t channel0 = place.group * params.gemm_n + n_first;
  const int32_t columns = params.gemm_n - n_first;
  const int64_t base = place.OutputOffset(params, n_first) + Rows::Column(lane);
  T* const out = static_cast<T*>(params.out) + base;
  const T* const residual = static_cast<const T*>(epilogue.params.residual) + base;
  const PairBounds<T> bounds(epilogue.params.activation);
  // Steps of a block and kColumns columns, in the order of their columns' terms.
  constexpr int kChunks = (Tile::kTileN < kPart ? Tile::kTileN : kPart) / kColumns;
  int32_t row[Rows::kVectors];
  auto find_rows = [&](int block) {
    const int32_t decoded = OutputRow<kOp>(params, of, m_first + block * 64 + lane % 16);
#pragma unroll
    for (int i = 0; i < Rows::kVectors; ++i) {
      row[i] = __shfl_sync(0xffffffff, decoded, Rows::Row(lane, i));
    }
  };
  uint4 ahead[Rows::kVectors];
  auto load_residual = [&](int column) {
#pragma unroll
    for (int i = 0; i < Rows::kVectors; ++i) {
      if (row[i] >= 0 && column + Rows::Column(lane) < columns) {
        ahead[i] = *reinterpret_cast<const uint4*>(residual +
                                                   int64_t{row[i]} * params.out_channels + column);
      }
    }
  };
  find_rows(0);
  if constexpr (kResidual) load_residual(0);
#pragma unroll
  for (int part = 0; part < Tile::kTileN; part += kPart) {
    if (part > 0 && part >= columns) break;
    __syncwarp();
    terms.Load(epilogue, channel0 + part, columns - part);
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) {
      if (block > 0 || part > 0) {
        find_rows(block);
        if constexpr (kResidual) load_residual(part);
      }
#pragma unroll
      for (int c = part; c < part + kChunks * kColumns && c < Tile::kTileN; c += kColumns) {
        if (c >= columns) break;
        __syncwarp();
        if constexpr (kResidual) {
#pragma unroll
          for (int i = 0; i < Rows::kVectors; ++i) {
            StoreChunk(rows.Vector(lane, i), {ahead[i].x, ahead[i].y, ahead[i].z, ahead[i].w});
          }
          if (c + kColumns < part + kChunks * kColumns) load_residual(c + kColumns);
          __syncwarp();
        }
        const float* sums = acc.Columns(block, c);
#pragma unroll
        for (int j = 0; j < kColumns / 8; j += 2) {
          [[maybe_unused]] uint32_t added[4];
          uint32_t rounded[4];
          if constexpr (kResidual) LoadMatrices(rows.Matrices(lane, j), added);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float term[4];
            LoadShared<0>(terms.at + (c - part + (j + h) * 8 + lane % 4 * 2) * 8, term);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const float* pair = sums + (j + h) * 4 + r * 2;
              float t[2] = {fmaf(pair[0], term[0], term[2]), fmaf(pair[1], term[1], term[3])};
              if constexpr (kResidual) Neighbours<T, 2>{added[h * 2 + r]}.AddTo(t);
              rounded[h * 2 + r] = bounds.Clamp(PackPair<T>(t[0], t[1]));
            }
          }
          // In place of the residual's matrices, which the warp has just read.
          StoreMatrices(rows.Matrices(lane, j), rounded[0], rounded[1], rounded[2], rounded[3]);
        }
        __syncwarp();
        uint4 chunk[Rows::kVectors];
#pragma unroll
        for (int i = 0; i < Rows::kVectors; ++i) chunk[i] = LoadChunk(rows.Vector(lane, i));
#pragma unroll
        for (int i = 0; i < Rows::kVectors; ++i) {
          if (row[i] >= 0 && c + Rows::Column(lane) < columns) {
            *reinterpret_cast<uint4*>(out + int64_t{row[i]} * params.out_channels + c) = chunk[i];
          }
        }
      }
    }
  }
}

// A warpgroup's part of a finished tile -> any fused epilogue -> the output, in float32 through as
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
    const int32_t decoded = OutputRow<kOp>(params, of, m_first + block * 64 + lane % 16);
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
    if (epilogue.Clamps()) {
      if (epilogue.params.residual == nullptr) {
        StoreClampedTile<kOp, T, Tile, false>(params, place, of, acc, m_first, staging, epilogue);
      } else {
        StoreClampedTile<kOp, T, Tile, true>(params, place, of, acc, m_first, staging, epilogue);
      }
      return;
    }
  }
  StoreStagedTile<kOp, T, Tile>(params, place, of, acc, m_first, staging, epilogue);
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SM90_CUH_
