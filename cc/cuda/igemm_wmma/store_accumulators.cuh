// Tensor-core accumulators -> epilogue -> output, through shared memory.
//
// A fragment holds two neighbouring columns of a row; a direct store would write every 32-byte
// sector in four parts. Each warp therefore writes 16 rows of its tile to its own shared memory,
// reads them back as 16 bytes of output a lane, with a row's lanes side by side, and applies the
// epilogue in float32, where residual and output are whole vectors. Chunk c of row r lies at c ^ 2
// (r % 4): no bank conflicts in the stores, two lanes a bank in the loads of 16-bit output.
#ifndef JAXCONV_CUDA_IGEMM_WMMA_STORE_ACCUMULATORS_CUH_
#define JAXCONV_CUDA_IGEMM_WMMA_STORE_ACCUMULATORS_CUH_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/finish_staged.cuh"
#include "cuda/common/mma_tile.cuh"

namespace jaxconv::igemm_wmma {

// Two elements at an even offset.
template <typename Out>
__device__ __forceinline__ void StoreNeighbours(Out* to, const Out (&elements)[2]) {
  using Pair = std::conditional_t<sizeof(Out) == 4, uint2, uint32_t>;
  Pair packed;
  memcpy(&packed, elements, sizeof(packed));
  *reinterpret_cast<Pair*>(to) = packed;
}

// Stores row r of the tile to out + dst_row(r) * row_stride; dst_row(r) < 0: the row does not
// exist. Columns from n_first (of the tile) to n_end. `vector`: n_end, row_stride and `base` are
// multiples of 16 bytes. `base`: offset of column 0 in the output, `channel_first` its channel.
// `shared`: at least kStagingBytes for each warp, which no other warp reads any more.
template <class Tile>
inline constexpr int kStagingBytes = 16 * Tile::kWarpN * 4;

template <typename Out, class Tile, class Epilogue, typename DstRow>
__device__ __forceinline__ void StoreAccumulators(
    const float (&acc)[Tile::kBlocksM][Tile::kBlocksN][4], uint32_t shared, Out* out,
    const Epilogue& epilogue, DstRow dst_row, int64_t base, int32_t row_stride, int n_first,
    int n_end, int channel_first, bool vector) {
  constexpr int kRowBytes = Tile::kWarpN * 4;
  constexpr int kWidth = 16 / sizeof(Out);
  constexpr int kLanesOfRow = Tile::kWarpN / kWidth;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const uint32_t staging = shared + threadIdx.x / 32 * kStagingBytes<Tile>;
  auto chunk_address = [&](int row, int chunk) {
    const int swizzle = kRowBytes >= 128 ? row % 4 * 2 : row / 2 % 2 * 2;
    return staging + row * kRowBytes + (chunk ^ swizzle) * 16;
  };
  const uint32_t store = chunk_address(g, t / 2) + t % 2 * 8;
  const int n_warp = n_first + Tile::WarpN();
#pragma unroll
  for (int i = 0; i < Tile::kBlocksM; ++i) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < Tile::kBlocksN; ++j) {
      StorePair(store ^ (j * 32), acc[i][j][0], acc[i][j][1]);
      StorePair((store ^ (j * 32)) + 8 * kRowBytes, acc[i][j][2], acc[i][j][3]);
    }
    __syncwarp();
    const int first_row = Tile::WarpM() + i * 16;
    if (vector) {
      const int column = lane % kLanesOfRow * kWidth;
      const int n = n_warp + column;
      constexpr int kPasses = kLanesOfRow / 2;
      float values[kPasses][kWidth];
      int32_t dst[kPasses];
      // All loads, then all stores, without a branch: the warp waits only once for each.
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int row = lane / kLanesOfRow + pass * (32 / kLanesOfRow);
        dst[pass] = n < n_end ? dst_row(first_row + row) : -1;
#pragma unroll
        for (int q = 0; q < kWidth / 4; ++q) {
          LoadShared<0>(chunk_address(row, column / 4 + q), &values[pass][q * 4]);
        }
      }
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const bool inside = dst[pass] >= 0;
        const int64_t at = base + n + int64_t{dst[pass]} * row_stride;
        Out elements[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          elements[e] = FromFloat<Out>(epilogue.template operator()<Out>(
              values[pass][e], OutputPlace{at + e, dst[pass], channel_first + n + e, inside}));
        }
        uint4 packed;
        memcpy(&packed, elements, sizeof(packed));
        if (inside) *reinterpret_cast<uint4*>(out + at) = packed;
      }
    } else {
      // Two neighbouring columns a lane; one store if rows consist of whole pairs.
      constexpr int kPairsOfRow = Tile::kWarpN / 2;
      const bool whole = n_end % 2 == 0 && row_stride % 2 == 0;
#pragma unroll 4
      for (int pair = lane; pair < 16 * kPairsOfRow; pair += 32) {
        const int row = pair / kPairsOfRow, column = pair % kPairsOfRow * 2;
        const int n = n_warp + column;
        const int32_t dst = n < n_end ? dst_row(first_row + row) : -1;
        if (dst < 0) continue;
        float values[2];
        LoadPair(chunk_address(row, column / 4) + column % 4 * 4, &values[0], &values[1]);
        const int64_t at = base + int64_t{dst} * row_stride + n;
        Out elements[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          elements[e] = FromFloat<Out>(epilogue.template operator()<Out>(
              values[e], OutputPlace{at + e, dst, channel_first + n + e, e == 0 || n + 1 < n_end}));
        }
        if (whole) {
          StoreNeighbours(out + at, elements);
        } else {
          out[at] = elements[0];
          if (n + 1 < n_end) out[at + 1] = elements[1];
        }
      }
    }
  }
}

// The same with the fused epilogue. The loop over the warp's rows is not unrolled, so that the code
// has one copy of the epilogue; a uniform branch picks the accumulators.
template <typename Out, class Tile, typename DstRow>
__device__ __forceinline__ void StoreFusedAccumulators(
    const float (&acc)[Tile::kBlocksM][Tile::kBlocksN][4], uint32_t shared, Out* out,
    const FusedEpilogue& epilogue, DstRow dst_row, int64_t base, int32_t row_stride, int n_first,
    int n_end, int channel_first, bool vector) {
  constexpr int kRowBytes = Tile::kWarpN * 4;
  constexpr int kWidth = 16 / sizeof(Out);
  constexpr int kLanesOfRow = Tile::kWarpN / kWidth, kVectors = kLanesOfRow / 2;
  const int lane = threadIdx.x % 32;
  const uint32_t staging = shared + threadIdx.x / 32 * kStagingBytes<Tile>;
  auto chunk_address = [&](int row, int chunk) {
    const int swizzle = kRowBytes >= 128 ? row % 4 * 2 : row / 2 % 2 * 2;
    return staging + row * kRowBytes + (chunk ^ swizzle) * 16;
  };
  const uint32_t store = chunk_address(lane / 4, lane % 4 / 2) + lane % 2 * 8;
  const int column = lane % kLanesOfRow * kWidth;
  const int n_warp = n_first + Tile::WarpN();
  const bool inside = n_warp + column < n_end;
#pragma unroll 1
  for (int block = 0; block < Tile::kBlocksM; ++block) {
    const int first_row = Tile::WarpM() + block * 16;
    auto row_of = [&](int i) { return lane / kLanesOfRow + i * (32 / kLanesOfRow); };
    auto offset_of = [&](int i) -> int64_t {
      const int32_t dst = inside ? dst_row(first_row + row_of(i)) : -1;
      return dst < 0 ? -1 : base + n_warp + column + int64_t{dst} * row_stride;
    };
    auto stage = [&] {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < Tile::kBlocksM; ++i) {
        if (i != block) continue;
#pragma unroll
        for (int j = 0; j < Tile::kBlocksN; ++j) {
          StorePair(store ^ (j * 32), acc[i][j][0], acc[i][j][1]);
          StorePair((store ^ (j * 32)) + 8 * kRowBytes, acc[i][j][2], acc[i][j][3]);
        }
      }
      __syncwarp();
    };
    if (vector) {
      const StagedVectors<Out, kVectors> vectors(epilogue, channel_first + n_warp + column, inside,
                                                 offset_of);
      stage();
      vectors.Finish(epilogue, out, offset_of,
                     [&](int i, int q) { return chunk_address(row_of(i), column / 4 + q); });
    } else {
      stage();
      const int columns = min(Tile::kWarpN, n_end - n_warp);
#pragma unroll 1
      for (int element = lane; element < 16 * Tile::kWarpN; element += 32) {
        const int row = element / Tile::kWarpN, n = element % Tile::kWarpN;
        const int32_t dst = n < columns ? dst_row(first_row + row) : -1;
        if (dst < 0) continue;
        const float sum = __uint_as_float(LoadWord(chunk_address(row, n / 4) + n % 4 * 4));
        const int64_t at = base + int64_t{dst} * row_stride + n_warp + n;
        out[at] = FromFloat<Out>(epilogue.template operator()<Out>(
            sum, OutputPlace{at, dst, channel_first + n_warp + n, /*inside=*/true}));
      }
    }
  }
}

}  // namespace jaxconv::igemm_wmma

#endif  // JAXCONV_CUDA_IGEMM_WMMA_STORE_ACCUMULATORS_CUH_
