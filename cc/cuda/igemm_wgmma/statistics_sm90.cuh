// Stores a warpgroup's accumulators, and forms for each channel the sums of y and of y^2 over the
// stored rows (common/merge_moments.h, sm_90a).
//
// Results pass through shared memory on their way to the output, as blocks of 64 rows by 64 columns
// of a warpgroup. There a warp sums sixteen columns by mma.sync, two instructions for 16 rows. A is
// eight columns, transposed, above eight rows of ones. B is the same eight columns, in the same
// registers:
//
//     D = [ Y^T ] Y        d[0], d[1]: sums of squares on the diagonal
//         [  1  ]          d[2], d[3]: sums
//
// Accuracy. Products of 16-bit numbers are exact in float32. An instruction aligns its 17 addends
// to the largest, cuts off what lies 2^-24 of it or more below, and rounds towards zero. For
// addends >= 0 its relative error is at most 18 * 2^-24, and that of a block's four instructions is
// e < 2^-17 of Q = sum y^2. (Measured: 2^-21 for bfloat16, 2^-20 for float16, whose products have
// 16 and 22 bits, most of them far from the cut.) The squared deviations of a block, M = Q - n
// mean^2, have the relative error e (1 + n mean^2 / M). If n mean^2 > kMostRatio M in one of a
// warp's columns, the warp sums the block again in float32, in two passes, about its columns'
// means; the relative error of M is then 2^-20 for any mean. Blocks are added in double. The bound
// on the variance's relative error is 2^-13; the largest in 90 measurements is 1.1e-6 (means of 0
// to 1000 standard deviations; normal, folded, contaminated and log-normal numbers).
//
// While the other consumer runs wgmma, mma.sync waits for the tensor core. Kernels bound by the
// tensor cores therefore form their sums on the FMA pipe: row_sums_sm90.cuh, lane_sums_sm90.cuh.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_STATISTICS_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_STATISTICS_SM90_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/igemm_wgmma/counted_block_sm90.cuh"
#include "cuda/igemm_wgmma/lane_sums_sm90.cuh"
#include "cuda/igemm_wgmma/row_sums_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_wgmma {

// Whether a kernel has code for the sums: a fused epilogue (EpilogueParams::moments requests them),
// 16-bit results, and a tile that HasStatistics of plan.cc allows.
template <Op kOp, typename T, class Tile, class Epilogue>
inline constexpr bool kHasMoments = !Epilogue::kPlain && kOp == Op::kFprop && sizeof(T) == 2 &&
                                    Tile::kPingpong && (!Tile::kFilterRow || Tile::kSwapAb);

// Calls consume(std::true_type) if sums are requested, else consume(std::false_type). They are
// separate loops, because the sums would take registers from the other epilogues.
template <Op kOp, typename T, class Tile, class Epilogue, class Consume>
__device__ __forceinline__ void CountingOrNot(const Params& params, const Consume& consume) {
  if constexpr (kHasMoments<kOp, T, Tile, Epilogue>) {
    if (params.epilogue.moments != nullptr) {
      consume(std::true_type());
      return;
    }
  }
  consume(std::false_type());
}

// Swap-AB of several taps, which stores its pixels as vectors.
template <class Tile>
inline constexpr bool kCountsVectors =
    Tile::kSwapAb && (Tile::kFilterRow || Tile::kStationary == 0);

// The ratio n mean^2 / M above which a block is summed about its means.
template <typename T>
inline constexpr float kMostRatio = 16;
template <>
inline constexpr float kMostRatio<__half> = 4;

template <typename T>
inline constexpr uint32_t kTwoOnes = 0x3f803f80;
template <>
inline constexpr uint32_t kTwoOnes<__half> = 0x3c003c00;

// The sums that a consumer has formed and not yet written. A lane has channels 8 h + lane / 4, h =
// 0 and 1, of a warp's sixteen columns. Lanes that differ in lane % 4 take turns at the blocks;
// kLanes of them share a chunk of 64 columns.
template <typename T, class Tile>
class TileSums {
 public:
  static constexpr int kChunks = Tile::kTileN / 64, kLanes = 4 / kChunks;
  static_assert(4 % kChunks == 0 && Tile::kTileN % 64 == 0);

  explicit __device__ __forceinline__ TileSums(uint32_t) {}

  // The products of a block with itself and with ones, for eight columns each.
  struct Products {
    float of[2][4];
  };
  // What a lane adds to a block's address for ldmatrix of the warp's sixteen columns of rows 0 to 15.
  static __device__ __forceinline__ uint32_t Matrices(uint32_t lane, uint32_t warp) {
    return (lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16) ^ warp * 32;
  }
  static __device__ __forceinline__ Products Multiply(uint32_t matrices, uint32_t block) {
    Products d = {};
#pragma unroll
    for (int rows = 0; rows < kBlockRows; rows += 16) {
      uint32_t y[4];
      LoadMatricesTransposed(block + matrices + rows * 128, y);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t a[4] = {y[h * 2], kTwoOnes<T>, y[h * 2 + 1], kTwoOnes<T>};
        MultiplyAdd<T>(d.of[h], a, y[h * 2], y[h * 2 + 1]);
      }
    }
    return d;
  }
  // Adds a block of a chunk by its products. The first `rows` > 0 rows are outputs.
  __device__ __forceinline__ void Count(const Products& d, uint32_t lane, uint32_t block, int rows,
                                        uint32_t turn) {
    constexpr float kShare = kBlockRows * (kMostRatio<T> / (1 + kMostRatio<T>));
    const bool odd = lane / 4 % 2 != 0;
    bool apart = false;
    float sums[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[h][0] = odd ? d.of[h][3] : d.of[h][2];
      sums[h][1] = odd ? d.of[h][1] : d.of[h][0];
      apart |= sums[h][0] * sums[h][0] > kShare * sums[h][1];
    }
    // Only the lanes that hold the diagonal decide.
    apart = __any_sync(0xffffffff, apart && lane % 4 == lane / 8) || rows < kBlockRows;
    if (__builtin_expect(apart, false)) {
      CountAboutMeans(block, rows, turn);
      return;
    }
    const uint32_t diagonal = lane / 4 * 4 + lane / 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[h][i] = __shfl_sync(0xffffffff, sums[h][i], diagonal);
        kept_[h][i] = lane % 4 == turn ? sums[h][i] : kept_[h][i];
      }
    }
  }
  // Adds up the sums that each lane has formed in its turns.
  __device__ __forceinline__ void EndTurns() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Add(h, kept_[h][0], kept_[h][1]);
      kept_[h][0] = kept_[h][1] = 0;
    }
  }
  // Called after a tile; writes the sums to a slot if the slot ends with this tile.
  template <int kWarpgroup>
  __device__ __forceinline__ void EndTile(const Params& params, const TilePlace& place) {
    int32_t slot;
    if (!SlotOf<kWarpgroup>(params, place, &slot)) return;
    const int32_t n_first = place.n_tile * Tile::kTileN;
    Store(params, slot, place.group * params.gemm_n + n_first, params.gemm_n - n_first);
  }

 private:
  // Writes the sums to a slot. `channel`: the channel of the first column.
  __device__ __forceinline__ void Store(const Params& params, int32_t slot, int32_t channel,
                                        int32_t columns) {
    const int lane = Lane(), warp = Thread() / 32 % 4;
    const int column = lane % 4 / kLanes * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ChannelSums sums = all_[h];
      all_[h] = {0, 0};
      auto add_lane = [&](int bits) {
        sums.sum += __shfl_xor_sync(0xffffffff, sums.sum, bits);
        sums.squares += __shfl_xor_sync(0xffffffff, sums.squares, bits);
      };
      if constexpr (kLanes > 1) add_lane(1);
      if constexpr (kLanes > 2) add_lane(2);
      if (lane % kLanes == 0 && column + h * 8 < columns) {
        params.epilogue.moments[int64_t{slot} * params.out_channels + (channel + column + h * 8)] =
            sums;
      }
    }
  }

  // Two passes over the first rows of a warp's sixteen columns: about the first row, and about the
  // resulting mean. A lane has columns 2 (lane % 8) and 2 (lane % 8) + 1, and every fourth row.
  __device__ __forceinline__ void CountAboutMeans(uint32_t block, uint32_t rows, uint32_t turn) {
    const uint32_t lane = Lane(), word = lane % 8, chunk = Thread() / 32u % 4 * 2 + word / 4;
    const uint32_t first = block + word % 4 * 4;
    auto load = [&](uint32_t row, float (&pair)[2]) {
      UnpackWord<T>(LoadWord(first + row * 128 + (chunk ^ row % 8) * 16), pair);
    };
    float about[2], sum[2], squares[2];
    load(0, about);
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      sum[0] = sum[1] = squares[0] = squares[1] = 0;
#pragma unroll 1
      for (uint32_t row = lane / 8; row < rows; row += 4) {
        float pair[2];
        load(row, pair);
        AddAbout<2>(about, pair, sum, squares);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int bits = 8; bits < 32; bits *= 2) {
          sum[e] += __shfl_xor_sync(0xffffffff, sum[e], bits);
          squares[e] += __shfl_xor_sync(0xffffffff, squares[e], bits);
        }
        if (pass == 0) about[e] += __fdividef(sum[e], static_cast<float>(rows));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Reads from the lane that holds this lane's channel.
      auto of_channel = [&](const float (&pair)[2]) {
        const uint32_t from = h * 4 + lane / 8;
        const float even = __shfl_sync(0xffffffff, pair[0], from);
        const float odd = __shfl_sync(0xffffffff, pair[1], from);
        return static_cast<double>(lane / 4 % 2 != 0 ? odd : even);
      };
      const double a = of_channel(about), s = of_channel(sum), q = of_channel(squares);
      if (lane % 4 == turn) Add(h, s + rows * a, q + a * (2 * s + rows * a));
    }
  }
  __device__ __forceinline__ void Add(int h, double sum, double squares) {
    all_[h] = {all_[h].sum + sum, all_[h].squares + squares};
  }

  ChannelSums all_[2] = {};
  float kept_[2][2] = {};
};

// For kernels without statistics.
struct NoSums {
  explicit __device__ __forceinline__ NoSums(uint32_t) {}
};

// Kernels bound by memory sum on the tensor cores. In 192x128 tiles and in swap-AB of several taps,
// which wgmma bounds, mma.sync would wait for wgmma.
template <typename T, class Tile>
using SumsOf = std::conditional_t<
    (Tile::kAccumulators > 128), RowSums<T, Tile>,
    std::conditional_t<kCountsVectors<Tile>, LaneSums<T, Tile>, TileSums<T, Tile>>>;

template <bool kHas, typename T, class Tile>
using ConsumerSums = std::conditional_t<kHas, SumsOf<T, Tile>, NoSums>;

// Stores a warpgroup's tile of pixels by channels and forms its sums. Like StoreTile, for results
// without an epilogue whose rows are the output's. `staging`: the warpgroup's two staging blocks.
template <int kBarrier, typename T, class Tile>
__device__ __forceinline__ void StoreAndCount(const Params& params, const TilePlace& place,
                                              const ResidueClass& of,
                                              const typename Tile::Accumulators& acc,
                                              uint32_t staging, TileSums<T, Tile>* sums) {
  using Sums = TileSums<T, Tile>;
  static_assert(Tile::kStagingBytes * 4 >= 2 * kBlockBytes);
  static_assert(Tile::kBlocks <= Sums::kLanes, "a lane has one turn");
  const int32_t n_first = place.n_tile * Tile::kTileN, row0 = place.m_tile * Tile::kTileM;
  const int32_t columns = params.gemm_n - n_first;
  CountedRows<T> counted(params, place, n_first, row0, staging);
  const uint32_t first = counted.staged.staging,
                 matrices = Sums::Matrices(counted.lane, counted.warp);
  // With two staging blocks, the next block is staged while the tensor core sums this one.
  constexpr int kUnits = Tile::kBlocks * Sums::kChunks;
  auto stage = [&](int unit) {
    counted.staged.staging = first + unit % 2 * kBlockBytes;
    StageFragments<4>(counted.staged, Round<T>(), 0,
                      acc.Columns(unit % Tile::kBlocks, unit / Tile::kBlocks * 64));
  };
  stage(0);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const int block = unit % Tile::kBlocks, c = unit / Tile::kBlocks;
    const int rows = min(of.rows - (row0 + block * kBlockRows), kBlockRows);
    const uint32_t at = staging + unit % 2 * kBlockBytes;
    NamedBarrierSync(kBarrier, 128);
    const bool some = rows > 0 && c * 64 < columns;
    typename Sums::Products products;
    if (some) {
      products = Sums::Multiply(matrices, at);
      counted.staged.staging = first + unit % 2 * kBlockBytes;
      counted.row = block * kBlockRows, counted.rows = rows;
      StoreVectors<4>(counted.staged, params.out, counted, c * 64);
    }
    if (unit + 1 < kUnits) stage(unit + 1);
    if (some) {
      sums->Count(products, counted.lane, at, rows, c * Sums::kLanes + block % Sums::kLanes);
    }
  }
  sums->EndTurns();
  // The warps meet at the next turn, before they write the staging again.
}

// Sums a tile of 64 channels that SwapAbStore::Boxes has staged as pixels of 128 bytes.
template <typename T, class Tile>
__device__ __forceinline__ void CountBoxes(const TilePlace& place, const ResidueClass& of,
                                           uint32_t staging, TileSums<T, Tile>* sums) {
  using Sums = TileSums<T, Tile>;
  constexpr int kBlocks = Tile::kTileM / kBlockRows;
  static_assert(kBlocks <= Sums::kLanes);
  const uint32_t lane = Lane(), matrices = Sums::Matrices(lane, Thread() / 32u % 4);
  typename Sums::Products products[kBlocks];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    products[block] = Sums::Multiply(matrices, staging + block * kBlockBytes);
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int rows = min(of.rows - (place.m_tile * Tile::kTileM + block * kBlockRows), kBlockRows);
    if (rows > 0) {
      sums->Count(products[block], lane, staging + block * kBlockBytes, rows, block);
    }
  }
  sums->EndTurns();
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_STATISTICS_SM90_CUH_
