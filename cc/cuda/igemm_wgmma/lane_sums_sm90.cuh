// The sums of y and y^2 over the numbers that a lane stores (statistics_sm90.cuh, sm_90a).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_LANE_SUMS_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_LANE_SUMS_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/igemm_wgmma/counted_block_sm90.cuh"
#include "cuda/igemm_wgmma/store_swap_ab_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_wgmma {

// The sums that a consumer's lanes have formed and not yet written. A lane has eight of 64
// channels, those of its 16-byte vectors.
template <typename T, class Tile>
class LaneSums {
 public:
  static_assert(Tile::kTileN == 64);

  // `staging`: the warpgroup's staging.
  explicit __device__ __forceinline__ LaneSums(uint32_t staging) : staging_(staging) {}

  // Whether nothing has been summed, so that pivots are needed.
  __device__ __forceinline__ bool Fresh() const { return rows_ == 0; }
  // Sets the pivots: the vectors of the first eight lanes.
  __device__ __forceinline__ void Begin(const uint4& vector) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) pivot_[i] = __shfl_sync(0xffffffff, words[i], Lane() % 8);
  }
  // Adds a vector if it belongs to the output; otherwise the pivot is added in its place.
  __device__ __forceinline__ void Add(const uint4& vector, bool stored) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float values[2], about[2];
      UnpackWord<T>(stored ? words[i] : pivot_[i], values);
      UnpackWord<T>(pivot_[i], about);
      AddAbout<2>(about, values, sum_ + i * 2, squares_ + i * 2);
    }
  }
  // Adds the number of outputs among the pixels that the warp has summed.
  __device__ __forceinline__ void AddRows(int rows) { rows_ += rows; }

  // Called after a tile; writes the sums to a slot if the slot ends with this tile. They pass
  // through the warpgroup's staging, which no warp writes before the warps synchronise at the next
  // turn.
  template <int kWarpgroup>
  __device__ __forceinline__ void EndTile(const Params& params, const TilePlace& place) {
    int32_t slot;
    if (!SlotOf<kWarpgroup>(params, place, &slot)) return;
    const uint32_t lane = Lane(), thread = Thread() % 128u, warp = thread / 32;
    NamedBarrierSync(3 + kWarpgroup, 128);
    const bool second = (lane & 8) != 0, upper = (lane & 16) != 0;
    float eight[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      eight[e] = Exchange(sum_[e], squares_[e], second, 8);
      sum_[e] = squares_[e] = 0;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float value[1] = {Exchange(eight[e], eight[e + 4], upper, 16)};
      const uint32_t column = lane % 8 * 8 + lane / 16 * 4 + e;
      StoreShared(SumsAt(warp) + column * 8 + lane / 8 % 2 * 4, value);
    }
    if (lane < 8) StoreChunk(PivotAt(warp) + lane * 16, pivot_);
    if (lane == 0) StoreWord(RowsAt(warp), rows_);
    rows_ = 0;
    NamedBarrierSync(3 + kWarpgroup, 128);
    const int32_t n_first = place.n_tile * Tile::kTileN, column = static_cast<int32_t>(thread);
    const int32_t channel = place.group * params.gemm_n + n_first;
    if (column < min(Tile::kTileN, params.gemm_n - n_first)) {
      ChannelSums sums = {};
#pragma unroll 1
      for (uint32_t w = 0; w < 4; ++w) {
        float about[2], pair[2];
        LoadPair(SumsAt(w) + column * 8, &about[0], &about[1]);
        UnpackWord<T>(LoadWord(PivotAt(w) + column / 2 * 4), pair);
        const double p = column % 2 == 0 ? pair[0] : pair[1];
        const double rows = static_cast<int32_t>(LoadWord(RowsAt(w)));
        // sum + n p, squares + p (2 sum + n p).
        sums.sum += about[0] + rows * p;
        sums.squares += about[1] + p * (2.0 * about[0] + rows * p);
      }
      params.epilogue.moments[int64_t{slot} * params.out_channels + (channel + column)] = sums;
    }
  }

 private:
  // In shared memory, for each warp: sums and squares, pivots, and the number of rows summed.
  static constexpr uint32_t kPivots = 4 * 64 * 8, kRows = kPivots + 4 * 64 * 2;
  static_assert(kRows + 16 <= Tile::kStagingBytes * 4);
  __device__ __forceinline__ uint32_t SumsAt(uint32_t warp) const { return staging_ + warp * 512; }
  __device__ __forceinline__ uint32_t PivotAt(uint32_t warp) const {
    return staging_ + kPivots + warp * 128;
  }
  __device__ __forceinline__ uint32_t RowsAt(uint32_t warp) const {
    return staging_ + kRows + warp * 4;
  }

  uint32_t staging_;
  uint32_t pivot_[4] = {};
  float sum_[8] = {}, squares_[8] = {};
  int32_t rows_ = 0;
};

// Stores a warpgroup's swap-AB tile of 64 channels as vectors, and forms its sums.
template <Op kOp, typename T, class Tile, int kWarpgroup>
__device__ __forceinline__ void StoreAndCountLines(
    const SwapAbStore<kOp, T, Tile, kWarpgroup>& tile, LaneSums<T, Tile>* sums) {
  const PixelRows<kOp, Tile> row_of(tile.params, tile.of, tile.place);
  const bool fresh = sums->Fresh();
  int rows = 0;
  tile.Lines(row_of, Round<T>(), [&](bool first, const uint4& vector, bool stored) {
    // The pivot may be a pixel outside the output.
    if (first && fresh) sums->Begin(vector);
    sums->Add(vector, stored);
    rows += stored ? 1 : 0;
  });
  rows += __shfl_xor_sync(0xffffffff, rows, 8);
  rows += __shfl_xor_sync(0xffffffff, rows, 16);
  sums->AddRows(rows);
  sums->template EndTile<kWarpgroup>(tile.params, tile.place);
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_LANE_SUMS_SM90_CUH_
