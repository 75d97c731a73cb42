// The sums of y and y^2 for tiles with 192 accumulators, on the FMA pipe (statistics_sm90.cuh,
// sm_90a).
//
// Accuracy, here and in lane_sums_sm90.cuh. A consumer sums y - p and (y - p)^2 in float32. The
// pivot p is the first y that it meets in a channel, so a large mean takes no digits. A difference
// of 16-bit numbers is rounded at most once, and an addition has the relative error 2^-24. Let M be
// the sum of squared deviations of n numbers from their mean. If p is one of them, sum (y - p)^2 <=
// (1 + n) M; for a random one the expectation is 2 M. At the end the sums are converted to those of
// y and y^2, in double.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_ROW_SUMS_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_ROW_SUMS_SM90_CUH_

#include <cstdint>

#include "cuda/igemm_wgmma/counted_block_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_wgmma {

// Four elements.
template <typename T>
__device__ __forceinline__ void UnpackFour(uint32_t first, uint32_t second, float* four) {
  float pair[2];
  UnpackWord<T>(first, pair), four[0] = pair[0], four[1] = pair[1];
  UnpackWord<T>(second, pair), four[2] = pair[0], four[3] = pair[1];
}

// Converts a sum about the pivot to the sum of the n numbers themselves; in lanes with `second`,
// the sum of squares. The lane at a distance of 8 has the other sum.
__device__ __forceinline__ double AboutZero(float about_pivot, float pivot, int n, bool second) {
  // sum + n p, squares + p (2 sum + n p).
  const double other = __shfl_xor_sync(0xffffffff, about_pivot, 8), p = pivot;
  return about_pivot + p * (second ? 2 * other + n * p : n);
}

// The sums that a consumer has formed and not yet written. In a block of 64 rows, a lane sums four
// of a warp's sixteen columns of a chunk over every eighth row. After the block it holds the sum or
// the squares of one of these columns, in shared memory.
template <typename T, class Tile>
class RowSums {
 public:
  static constexpr int kChunks = Tile::kTileN / 64;
  static_assert(Tile::kTileN % 64 == 0);
  static_assert(Tile::kStagingBytes * 4 >= kBlockBytes + kChunks * (512 + 128) + 512);

  // `staging`: the warpgroup's staging: one block, and the kept sums.
  explicit __device__ __forceinline__ RowSums(uint32_t staging) : kept_(staging + kBlockBytes) {
    for (int c = 0; c <= kChunks; ++c) StoreWord(KeptAt(c), 0);
  }

  // Adds the first `rows` > 0 rows of a block of chunk `c`. If nothing was summed before this tile,
  // the first row of its `first` block gives the pivots.
  __device__ __forceinline__ void Count(uint32_t block, int rows, int c, bool first) {
    const uint32_t lane = Lane(), row = lane / 2 % 8, chunk = Thread() / 32u % 4 * 2 + lane / 16;
    uint32_t at = block + row * 128 + (chunk ^ row) * 16 + lane % 2 * 8;
    const uint32_t pivots = kept_ + (kChunks + 1) * 512 + c * 128 + chunk * 16 + lane % 2 * 8;
    uint32_t words[2];
    if (first && LoadWord(KeptAt(kChunks)) == 0) {
      if (row == 0) {
        LoadPair(at, &words[0], &words[1]);
        StoreWord(pivots, words[0]), StoreWord(pivots + 4, words[1]);
      }
      __syncwarp();
    }
    LoadPair(pivots, &words[0], &words[1]);
    float pivot[4], sum[4] = {}, squares[4] = {};
    UnpackFour<T>(words[0], words[1], pivot);
    auto add = [&](uint32_t first, uint32_t second) {
      float four[4];
      UnpackFour<T>(first, second, four);
      AddAbout<4>(pivot, four, sum, squares);
    };
    if (__builtin_expect(rows >= kBlockRows, true)) {
#pragma unroll 1
      for (int turn = 0; turn < 4; ++turn, at += 2048) {
        uint32_t pairs[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) LoadPair(at + i * 1024, &pairs[i][0], &pairs[i][1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) add(pairs[i][0], pairs[i][1]);
      }
    } else {
#pragma unroll 1
      for (int i = row; i < rows; i += 8, at += 1024) {
        LoadPair(at, &words[0], &words[1]);
        add(words[0], words[1]);
      }
    }
    const bool second = (lane & 8) != 0, upper = (lane & 4) != 0, odd = (lane & 2) != 0;
    float four[4], two[2];
#pragma unroll
    for (int e = 0; e < 4; ++e) four[e] = Exchange(sum[e], squares[e], second, 8);
#pragma unroll
    for (int e = 0; e < 2; ++e) two[e] = Exchange(four[e], four[e + 2], upper, 4);
    const float one[1] = {__uint_as_float(LoadWord(KeptAt(c))) + Exchange(two[0], two[1], odd, 2)};
    StoreShared(KeptAt(c), one);
  }

  // Called after a tile of `rows` rows; writes the sums to a slot if the slot ends with this tile.
  template <int kWarpgroup>
  __device__ __forceinline__ void EndTile(const Params& params, const TilePlace& place, int rows) {
    rows += static_cast<int>(LoadWord(KeptAt(kChunks)));
    int32_t slot;
    if (!SlotOf<kWarpgroup>(params, place, &slot)) {
      StoreWord(KeptAt(kChunks), rows);
      return;
    }
    StoreWord(KeptAt(kChunks), 0);
    const int32_t n_first = place.n_tile * Tile::kTileN;
    const uint32_t lane = Lane(), warp = Thread() / 32u % 4;
    const int column = warp * 16 + lane / 16 * 8 + lane % 2 * 4 + lane / 4 % 2 * 2 + lane / 2 % 2;
    const int32_t channel = place.group * params.gemm_n + n_first;
    auto* const moments = reinterpret_cast<double*>(
        params.epilogue.moments + (int64_t{slot} * params.out_channels + channel));
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      const float about = __uint_as_float(LoadWord(KeptAt(c)));
      StoreWord(KeptAt(c), 0);
      float pair[2];
      UnpackWord<T>(LoadWord(kept_ + (kChunks + 1) * 512 + (c * 64 + column) / 2 * 4), pair);
      const double sums = AboutZero(about, column % 2 == 0 ? pair[0] : pair[1], rows, lane & 8);
      if (c * 64 + column < params.gemm_n - n_first) {
        moments[(c * 64 + column) * 2 + lane / 8 % 2] = sums;
      }
    }
  }

 private:
  // Computed each time, because no register is left to keep it.
  __device__ __forceinline__ uint32_t KeptAt(int c) const {
    return kept_ + c * 512 + Thread() % 128u * 4;
  }
  uint32_t kept_;
};

// Stores a warpgroup's tile of pixels by channels and forms its sums, in a loop; a uniform branch
// picks the accumulators. `staging`: the warpgroup's staging.
template <int kWarpgroup, typename T, class Tile>
__device__ __forceinline__ void StoreAndCountRows(const Params& params, const TilePlace& place,
                                                  const ResidueClass& of,
                                                  const typename Tile::Accumulators& acc,
                                                  uint32_t staging, RowSums<T, Tile>* sums) {
  constexpr int kBarrier = 3 + kWarpgroup;
  const int32_t n_first = place.n_tile * Tile::kTileN, row0 = place.m_tile * Tile::kTileM;
  const int32_t columns = params.gemm_n - n_first;
#pragma unroll 1
  for (int c = 0; c < RowSums<T, Tile>::kChunks && c * 64 < columns; ++c) {
#pragma unroll 1
    for (int block = 0; block < Tile::kBlocks; ++block) {
      const int rows = min(of.rows - (row0 + block * kBlockRows), kBlockRows);
      if (rows <= 0) break;
      const RoundedRows<64> staged{staging + Thread() / 32u % 4 * 2048, uint32_t(Lane())};
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
        for (int k = 0; k < RowSums<T, Tile>::kChunks; ++k) {
          if (i == block && k == c) {
            StageFragments<4>(staged, Round<T>(), 0, acc.Columns(i, k * 64));
          }
        }
      }
      NamedBarrierSync(kBarrier, 128);
      {
        CountedRows<T> counted(params, place, n_first, row0, staging);
        counted.row = block * kBlockRows, counted.rows = rows;
        StoreVectors<2>(counted.staged, params.out, counted, c * 64);
      }
      sums->Count(staging, rows, c, block == 0);
      NamedBarrierSync(kBarrier, 128);
    }
  }
  sums->template EndTile<kWarpgroup>(params, place, min(of.rows - row0, Tile::kTileM));
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_ROW_SUMS_SM90_CUH_
