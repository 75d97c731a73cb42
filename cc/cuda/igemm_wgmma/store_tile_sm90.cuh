// A warpgroup's accumulators of a WgmmaTile -> the output (sm_90a).
//
// 16-bit results without an epilogue pass through shared memory as 16-bit words, others as float32;
// where lanes hold whole sectors, they store from the fragments.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_STORE_TILE_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_STORE_TILE_SM90_CUH_

#include <cstdint>
#include <cstring>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_wgmma/store_fused_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// The output position of a tile's row: the offset of its first column, or negative, and its row
// number in the output.
struct RowPlace {
  int64_t offset;
  int32_t row;
};

// Stores a warp's sixteen rows of 128 bytes as output of type T: rounds them, stages them in 2 KB
// (16-bit results by stmatrix), and stores 16 bytes a lane, eight lanes a row. Against bank
// conflicts, chunk c of row r lies at c ^ r % 8 (float32: c ^ 2 (r % 4)). dst[p]: the output offset
// of row 4 p + lane / 8 at this lane's columns, or negative.
template <typename T>
__device__ __forceinline__ void StoreRounded(const float* acc, uint32_t staging, T* out,
                                             const int64_t (&dst)[4], bool inside) {
  const int lane = Lane();
  auto chunk_address = [&](int row, int chunk) {
    return staging + row * 128 + (chunk ^ (sizeof(T) == 2 ? row % 8 : row % 4 * 2)) * 16;
  };
  if constexpr (sizeof(T) == 2) {
    const int row = lane % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      StoreMatrices(chunk_address(row, j + lane / 16), PackPair<T>(acc[4 * j], acc[4 * j + 1]),
                    PackPair<T>(acc[4 * j + 2], acc[4 * j + 3]),
                    PackPair<T>(acc[4 * j + 4], acc[4 * j + 5]),
                    PackPair<T>(acc[4 * j + 6], acc[4 * j + 7]));
    }
  } else {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t at = chunk_address(g, 2 * j + t / 2) + t % 2 * 8;
      StorePair(at, acc[4 * j], acc[4 * j + 1]);
      StorePair(at + 8 * 128, acc[4 * j + 2], acc[4 * j + 3]);
    }
  }
  __syncwarp();
  uint4 chunk[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    LoadShared<0>(chunk_address(p * 4 + lane / 8, lane % 8), reinterpret_cast<float*>(&chunk[p]));
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    if (inside && dst[p] >= 0) *reinterpret_cast<uint4*>(out + dst[p]) = chunk[p];
  }
}

// Stores sixteen rows of 256 columns as 16-bit output, like StoreRounded but in whole rows: a warp
// stores one run of 512 bytes, up to 5 % faster than four runs of 128. It stages eight rows at a
// time in 4 KB. `row_place(r)`: the RowPlace of row r.
template <typename T, typename RowPlaceOf>
__device__ __forceinline__ void StoreRoundedRows(const float (&acc)[128], uint32_t staging, T* out,
                                                 RowPlaceOf row_place, int columns) {
  const int lane = threadIdx.x % 32;
  auto chunk_address = [&](int row, int chunk) {
    return staging + row * 512 + (chunk ^ row % 8) * 16;
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      const float* d = acc + 4 * j + 2 * half;
      StoreMatrices(chunk_address(lane % 8, j + lane / 8), PackPair<T>(d[0], d[1]),
                    PackPair<T>(d[4], d[5]), PackPair<T>(d[8], d[9]), PackPair<T>(d[12], d[13]));
    }
    __syncwarp();
    uint4 chunk[8];
#pragma unroll
    for (int row = 0; row < 8; ++row) chunk[row] = LoadChunk(chunk_address(row, lane));
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      const int64_t offset = row_place(half * 8 + row).offset;
      if (offset >= 0 && lane * 8 < columns) {
        *reinterpret_cast<uint4*>(out + offset + lane * 8) = chunk[row];
      }
    }
  }
}

// Stores sixteen rows by 64 columns through 4 KB of float32, with an epilogue, for 16-bit and
// 32-bit outputs. `row_place(r)`: the RowPlace of row r; `channel0`: the output channel of column
// 0.
template <typename Out, class Epilogue, typename RowPlaceOf>
__device__ __forceinline__ void StoreFinished(const float* acc, uint32_t staging, Out* out,
                                              const Epilogue& epilogue, RowPlaceOf row_place,
                                              int columns, int channel0) {
  constexpr int kWidth = 16 / sizeof(Out);
  constexpr int kLanesOfRow = 64 / kWidth;
  constexpr int kRowsOfPass = 32 / kLanesOfRow;
  const int lane = Lane();
  const int g = lane / 4, t = lane % 4;
  auto chunk_address = [&](int row, int chunk) {
    return staging + row * 256 + (chunk ^ (row % 4 * 2)) * 16;
  };
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t at = chunk_address(g, 2 * j + t / 2) + t % 2 * 8;
    StorePair(at, acc[4 * j], acc[4 * j + 1]);
    StorePair(at + 8 * 256, acc[4 * j + 2], acc[4 * j + 3]);
  }
  __syncwarp();
  const int column = lane % kLanesOfRow * kWidth;
#pragma unroll
  for (int p = 0; p < 16 / kRowsOfPass; ++p) {
    const int row = p * kRowsOfPass + lane / kLanesOfRow;
    float values[kWidth];
#pragma unroll
    for (int q = 0; q < kWidth / 4; ++q) {
      LoadShared<0>(chunk_address(row, column / 4 + q), &values[q * 4]);
    }
    const RowPlace at = row_place(row);
    if (at.offset < 0 || column >= columns) continue;
    Out elements[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      elements[e] = FromFloat<Out>(epilogue.template operator()<Out>(
          values[e],
          OutputPlace{at.offset + column + e, at.row, channel0 + column + e, /*inside=*/true}));
    }
    uint4 packed;
    memcpy(&packed, elements, sizeof(packed));
    *reinterpret_cast<uint4*>(out + at.offset + column) = packed;
  }
}

// Stores float32 results from the fragments. A warp stores eight rows of 32 bytes (four lanes, a
// whole sector). This leaves the throughput of shared memory to the other warpgroup's operands.
// `upper`, `lower`: rows lane / 4 and lane / 4 + 8.
template <class Epilogue>
__device__ __forceinline__ void StoreFragments(const float* acc, float* out,
                                               const Epilogue& epilogue, const RowPlace& upper,
                                               const RowPlace& lower, int columns, int channel0) {
  const int lane = Lane();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int column = 8 * j + lane % 4 * 2;
    if (column >= columns) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowPlace& at = half == 0 ? upper : lower;
      if (at.offset < 0) continue;
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        pair[e] = epilogue.template operator()<float>(
            acc[4 * j + 2 * half + e],
            OutputPlace{at.offset + column + e, at.row, channel0 + column + e, /*inside=*/true});
      }
      *reinterpret_cast<float2*>(out + at.offset + column) = make_float2(pair[0], pair[1]);
    }
  }
}

// Stores a warpgroup's part of a finished tile. kWholeRows: stores whole 16-bit rows of 256
// columns.
template <Op kOp, typename T, class Tile, bool kWholeRows = false, class Epilogue>
__device__ __forceinline__ void StoreTile(const Params& params, const TilePlace& place,
                                          const ResidueClass& of,
                                          const typename Tile::Accumulators& acc, int32_t m_first,
                                          uint32_t staging, const Epilogue& epilogue) {
  if constexpr (!Epilogue::kPlain) {
    if (!epilogue.partial) {
      StoreFusedTile<kOp, T, Tile>(params, place, of, acc, m_first, staging, epilogue.Whole());
      FinishTile<Tile>(params, place, of, epilogue);
      return;
    }
  }
  const int lane = Lane();
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int64_t base = place.OutputOffset(params, n_first);
  // Each lane decodes one of the warp's rows, once; shuffles distribute the result.
  int32_t decoded[(Tile::kBlocks + 1) / 2];
#pragma unroll
  for (int i = 0; i < (Tile::kBlocks + 1) / 2; ++i) {
    decoded[i] =
        OutputRow<kOp>(params, of, m_first + (2 * i + lane / 16) * 64 + Tile::PixelOf(lane % 16));
  }
  auto row_place = [&](int block, int row) -> RowPlace {
    const int32_t m = __shfl_sync(0xffffffff, decoded[block / 2], block % 2 * 16 + row);
    return {m < 0 ? -1 : base + int64_t{m} * params.out_channels, m};
  };
  const int channel0 = place.group * params.gemm_n + n_first;
  constexpr bool kPlain = Epilogue::kPlain;
  const PlainEpilogue sums(params.epilogue);
  // Stores rows of 128 bytes, a block's columns from c on, through one or two buffers of 2 KB. A
  // warp barrier separates the reads of a buffer from the next writes to it; with two buffers, the
  // barrier of the other buffer serves.
  auto store_rounded = [&](const float* chunk, int c, const int64_t (&dst)[4]) {
    constexpr int kColumns = 128 / sizeof(T), kBuffers = Tile::kStagingBytes < 4096 ? 1 : 2;
    if (kBuffers == 1 || c == 0) __syncwarp();
    T* out = static_cast<T*>(params.out) + c;
    if constexpr (Tile::kPatches) {
      // Rows of a patch are whole vectors.
      out += int64_t{params.patch_row.Div(n_first + c + lane % 8 * 8)} * params.patch_skip;
    }
    StoreRounded(chunk, staging + c / kColumns % kBuffers * 2048, out, dst,
                 n_first + c + lane % 8 * (kColumns / 8) < params.gemm_n);
  };
  auto rounded_offsets = [&](int i, int64_t (&dst)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      dst[p] = row_place(i, 4 * p + lane / 8).offset;
      if (dst[p] >= 0) dst[p] += lane % 8 * (16 / int{sizeof(T)});
    }
  };
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; ++i) {
    if constexpr (sizeof(T) == 4 && Tile::kPingpong) {
      const RowPlace upper = row_place(i, lane / 4), lower = row_place(i, lane / 4 + 8);
#pragma unroll
      for (int c = 0; c < Tile::kTileN; c += 64) {
        const int columns = params.gemm_n - n_first - c;
        if (columns <= 0) break;
        StoreFragments(acc.Columns(i, c), static_cast<float*>(params.out) + c, sums, upper, lower,
                       columns, channel0 + c);
      }
    } else if (kPlain && (sizeof(T) == 4 || !params.out_is_f32)) {
      if constexpr (kWholeRows) {
        static_assert(Tile::kTileN == 256 && sizeof(T) == 2);
        StoreRoundedRows(
            acc.first[i], staging, static_cast<T*>(params.out),
            [&](int row) { return row_place(i, row); }, params.gemm_n - n_first);
      } else {
        int64_t dst[4];
        rounded_offsets(i, dst);
#pragma unroll
        for (int c = 0; c < Tile::kTileN; c += 128 / int{sizeof(T)}) {
          if (n_first + c >= params.gemm_n) break;
          store_rounded(acc.Columns(i, c), c, dst);
        }
      }
    } else if constexpr (!kPlain || sizeof(T) == 2) {
#pragma unroll
      for (int c = 0; c < Tile::kTileN; c += 64) {
        const float* chunk = acc.Columns(i, c);
        const int columns = params.gemm_n - n_first - c;
        if (columns <= 0) break;
        auto place_of = [&](int row) -> RowPlace {
          const RowPlace at = row_place(i, row);
          return {at.offset < 0 ? at.offset : at.offset + c, at.row};
        };
        if constexpr (Tile::kStagingBytes < 4096) {
          StoreFragments(chunk, static_cast<float*>(params.out) + c, sums, row_place(i, lane / 4),
                         row_place(i, lane / 4 + 8), columns, channel0 + c);
        } else if (params.out_is_f32) {
          StoreFinished(chunk, staging, static_cast<float*>(params.out), sums, place_of, columns,
                        channel0 + c);
        }
      }
    }
  }
  FinishTile<Tile>(params, place, of, epilogue);
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_STORE_TILE_SM90_CUH_
