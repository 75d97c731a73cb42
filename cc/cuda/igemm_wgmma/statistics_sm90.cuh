// A warpgroup's accumulators -> the output, and the moments of what was stored: each channel's mean
// and sum of squared deviations from it, over the rows of a tile (common/merge_moments.h, sm_90a).
//
// Pixels as rows: results pass through shared memory as 16 rows of 64 columns of a warp. Rows are read
// from there for the output, and columns for the moments: a lane has two columns and all sixteen rows,
// so that nothing passes between lanes. The four warps of a warpgroup are merged by Chan's formula.
//
// Swap-AB, pointwise: the warpgroup stages its tile, and a warp counts sixteen channels of all pixels.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_STATISTICS_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_STATISTICS_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/igemm_wgmma/store_tile_sm90.cuh"
#include "cuda/igemm_wgmma/swap_ab_tile_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_wgmma {

// Whether a kernel's stores may be asked for moments: of a fused epilogue (EpilogueParams::moments
// asks), 16-bit results and tiles that plan.cc's HasStatistics allows.
template <Op kOp, typename T, class Tile, class Epilogue>
inline constexpr bool kHasMoments =
    !Epilogue::kPlain && kOp == Op::kFprop && sizeof(T) == 2 && Tile::kPingpong &&
    !Tile::kFilterRow && (Tile::kSwapAb ? Tile::kStationary > 0 : Tile::kAccumulators <= 128);

struct Moments {
  float mean, squares;
};

// Sums of (y - about) and of its square, where `about` is one of the n numbers: the difference
// that gives the squared deviations loses a factor of n at most, and about 1 of normal numbers.
struct ShiftedSums {
  float about, sum, squares;

  __device__ __forceinline__ void Add(float value) {
    const float apart = value - about;
    sum += apart;
    squares = fmaf(apart, apart, squares);
  }
  // `share`: 1 / n.
  __device__ __forceinline__ Moments Of(float share) const {
    const float mean = sum * share;
    const float deviations = fmaf(-mean, sum, squares);
    return {about + mean, deviations < 0 ? 0 : deviations};  // NaN stays
  }
};

// Adds the moments of `added` > 0 numbers to those of `count`.
struct MergedMoments {
  float share, weight;
  __device__ __forceinline__ MergedMoments(int count, int added) {
    share = __fdividef(static_cast<float>(added), static_cast<float>(count + added));
    weight = share * static_cast<float>(count);
  }
  __device__ __forceinline__ void operator()(Moments* all, const Moments& more) const {
    const float apart = more.mean - all->mean;
    all->mean = fmaf(apart, share, all->mean);
    all->squares = fmaf(apart * weight, apart, all->squares + more.squares);
  }
};

// The two elements of a word. Of the word, not of its halves: the compiler would keep each of them in a
// register of its own.
template <typename T>
__device__ __forceinline__ void UnpackWord(uint32_t word, float (&pair)[2]);
template <>
__device__ __forceinline__ void UnpackWord<__nv_bfloat16>(uint32_t word, float (&pair)[2]) {
  pair[0] = __uint_as_float(word << 16);
  pair[1] = __uint_as_float(word & 0xffff0000u);
}
template <>
__device__ __forceinline__ void UnpackWord<__half>(uint32_t word, float (&pair)[2]) {
  Neighbours<__half, 2>{word}.Unpack(pair);
}

__device__ __forceinline__ int Clamped(int value, int most) { return max(0, min(value, most)); }

// Sixteen rows by 64 columns of a warp -> shared memory, as StoreRounded does it.
template <typename T>
__device__ __forceinline__ void StageRows(const RoundedRows<64>& staged, int lane,
                                          const float* acc) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    StoreMatrices(staged.Matrices(lane, j), PackPair<T>(acc[4 * j], acc[4 * j + 1]),
                  PackPair<T>(acc[4 * j + 2], acc[4 * j + 3]),
                  PackPair<T>(acc[4 * j + 4], acc[4 * j + 5]),
                  PackPair<T>(acc[4 * j + 6], acc[4 * j + 7]));
  }
}

// -> the first `rows` of neighbouring rows of the output. `out`: of row 0.
template <typename T>
__device__ __forceinline__ void StoreRows(const RoundedRows<64>& staged, int lane, T* out, int rows,
                                          int32_t pitch) {
  uint4 vectors[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) vectors[i] = LoadChunk(staged.Vector(lane, i));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (RoundedRows<64>::Row(lane, i) < rows) {
      *reinterpret_cast<uint4*>(out + (RoundedRows<64>::Row(lane, i) * pitch +
                                       RoundedRows<64>::Column(lane))) = vectors[i];
    }
  }
}

// Of the first `rows` of 16 rows of 128 bytes, as StoreRows has left them in shared memory: this lane's
// columns, 2 lane and 2 lane + 1, about row 0.
template <typename T>
__device__ __forceinline__ void CountColumns(uint32_t staging, int rows, ShiftedSums (&sums)[2]) {
  // Chunk c of row r lies at c ^ r % 8.
  const uint32_t first = staging + Lane() * 4;
  auto load = [&](int row) { return LoadWord((first ^ (row % 8 * 16)) + row * 128); };
  float pair[2];
  UnpackWord<T>(load(0), pair);
  sums[0] = {pair[0], 0, 0}, sums[1] = {pair[1], 0, 0};
  if (rows == 16) {
    uint32_t words[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) words[r] = load(r);
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      UnpackWord<T>(words[r], pair);
      sums[0].Add(pair[0]), sums[1].Add(pair[1]);
    }
  } else {
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      UnpackWord<T>(load(r), pair);
      sums[0].Add(pair[0]), sums[1].Add(pair[1]);
    }
  }
}

// Writes how many rows a slot has; of the first, also what the merging kernel counts with.
__device__ __forceinline__ void StoreRowsOfSlot(const Params& params, int32_t slot, int32_t rows) {
  params.epilogue.moment_rows[slot] = rows;
  if (slot > 0) return;
#pragma unroll 1
  for (int32_t i = 0; i < params.epilogue.moment_counters; ++i) {
    params.epilogue.moment_rows[i - params.epilogue.moment_counters] = 0;
  }
}

// Writes the moments of a slot's channel.
__device__ __forceinline__ void StoreMoments(const Params& params, int32_t slot, int32_t channel,
                                             const Moments& moments) {
  auto* const to = reinterpret_cast<float2*>(params.epilogue.moments);
  to[int64_t{slot} * params.out_channels + channel] = make_float2(moments.mean, moments.squares);
}

// A warpgroup's tile of pixels by channels -> the output and a slot. As StoreTile, of plain
// sums whose rows are the output's. The loop over 16 rows by 64 columns is not unrolled, and a uniform
// branch picks the accumulators: unrolled, the warps wait for instructions most of the time.
// `staging`: of the warp.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ void StoreWithMoments(const Params& params, const TilePlace& place,
                                                 const ResidueClass& of,
                                                 const typename Tile::Accumulators& acc,
                                                 uint32_t staging) {
  constexpr int kChunks = Tile::kTileN / 64;
  // Half of the staging is for results, the other half for moments, eight bytes a column: the
  // accumulators' registers are free for nothing else.
  constexpr uint32_t kMomentsAt = 2048;
  static_assert(Tile::kTileN % 64 == 0 && kMomentsAt + Tile::kTileN * 8 <= Tile::kStagingBytes);
  const int lane = Lane(), warp = Thread() / 32 % 4;
  const int32_t n_first = place.n_tile * Tile::kTileN, row0 = place.m_tile * Tile::kTileM;
  const int32_t columns = params.gemm_n - n_first;
  const uint32_t moments = staging + kMomentsAt + lane * 16;
  const RoundedRows<64> staged{staging};
  int counted = 0;
#pragma unroll 1
  for (int block = 0; block < Tile::kBlocks; ++block) {
    const int32_t first = row0 + block * 64 + warp * 16;
    const int rows = Clamped(of.rows - first, 16);
    if (rows == 0) break;
    const MergedMoments merge(counted, rows);
    const float share = __fdividef(1, static_cast<float>(rows));
    counted += rows;
    T* const out = static_cast<T*>(params.out) + place.OutputOffset(params, n_first) +
                   int64_t{first} * params.out_channels;
#pragma unroll 1
    for (int c = 0; c < kChunks && c * 64 < columns; ++c) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          if (i == block && k == c) StageRows<T>(staged, lane, acc.Columns(i, k * 64));
        }
      }
      __syncwarp();
      StoreRows<T>(staged, lane, out + c * 64, c * 64 + lane % 8 * 8 < columns ? rows : 0,
                   params.out_channels);
      ShiftedSums sums[2];
      CountColumns<T>(staging, rows, sums);
      Moments found[2] = {sums[0].Of(share), sums[1].Of(share)};
      if (block > 0) {
        float before[4];
        LoadShared<0>(moments + c * 512, before);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          Moments all = {before[2 * e], before[2 * e + 1]};
          merge(&all, found[e]);
          found[e] = all;
        }
      }
      StoreShared(moments + c * 512,
                  {found[0].mean, found[0].squares, found[1].mean, found[1].squares});
    }
  }
  const int thread = Thread(), barrier = 2 + thread / 128;
  NamedBarrierSync(barrier, 128);
  const uint32_t of_warpgroup = staging - warp * Tile::kStagingBytes;
#pragma unroll 1
  for (int part = 0; part < Tile::kTileN; part += 128) {
    const int column = part + thread % 128;
    if (column >= columns || column >= Tile::kTileN) break;
    Moments all = {};
    int count = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      int rows = 0;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        rows += Clamped(of.rows - (row0 + block * 64 + w * 16), 16);
      }
      if (rows == 0) break;
      Moments of_warp;
      LoadPair(of_warpgroup + w * Tile::kStagingBytes + kMomentsAt + column * 8, &of_warp.mean,
               &of_warp.squares);
      MergedMoments(count, rows)(&all, of_warp);
      count += rows;
    }
    StoreMoments(params, place.m_tile, place.group * params.gemm_n + n_first + column, all);
  }
  if (thread % 128 == 0 && place.n_tile == 0 && place.group == 0) {
    StoreRowsOfSlot(params, place.m_tile, Clamped(of.rows - row0, Tile::kTileM));
  }
  // The staging is written again when the warps have met, at the next turn.
}

// A swap-AB tile's results, 64 channels of all pixels, counted as they lie in shared memory: a warp has
// sixteen channels, a lane two of them and every fourth pair of pixels.
template <typename T>
struct PixelSums {
  ShiftedSums sums[2];
  int count = 0;

  // 32 pixels of 128 bytes, chunk c of pixel p at c ^ p % 8. valid: which of them are outputs. The first call takes one of them for what the others are
  // about, or any number where there is none.
  __device__ __forceinline__ void Count(uint32_t staging, uint32_t valid, bool first_call) {
    const int lane = Lane(), word = lane % 8, chunk = Thread() / 32 % 4 * 2 + word / 4;
    auto load = [&](int pixel) {
      return LoadWord(staging + pixel * 128 + (chunk ^ pixel % 8) * 16 + word % 4 * 4);
    };
    float pair[2];
    if (first_call) {
      UnpackWord<T>(load(max(0, __ffs(static_cast<int>(valid)) - 1)), pair);
      sums[0] = {pair[0], 0, 0}, sums[1] = {pair[1], 0, 0};
    }
    const int pixel = lane / 8 * 2;
    const uint32_t mine = valid >> pixel;
    count += __popc(valid);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const uint32_t at =
          staging + (pixel + odd) * 128 + (chunk ^ (pixel + odd)) * 16 + word % 4 * 4;
#pragma unroll
      for (int eight = 0; eight < 4; ++eight) {
        UnpackWord<T>(LoadWord(at + eight * 1024), pair);
        if ((mine >> (eight * 8 + odd) & 1) != 0) sums[0].Add(pair[0]), sums[1].Add(pair[1]);
      }
    }
  }
  // All pixels' moments -> the tile's slot.
  __device__ __forceinline__ void Store(const Params& params, const TilePlace& place) const {
    const int lane = Lane(), thread = Thread();
    auto over_lanes = [](float value) {
      value += __shfl_xor_sync(0xffffffff, value, 8);
      return value + __shfl_xor_sync(0xffffffff, value, 16);
    };
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const ShiftedSums all = {sums[e].about, over_lanes(sums[e].sum), over_lanes(sums[e].squares)};
      const Moments moments =
          count > 0 ? all.Of(__fdividef(1, static_cast<float>(count))) : Moments{0, 0};
      const int32_t channel = place.n_tile * 64 + thread / 32 % 4 * 16 + lane % 8 * 2 + e;
      if (lane / 8 == e && channel < params.gemm_n) {
        StoreMoments(params, place.m_tile, place.group * params.gemm_n + channel, moments);
      }
    }
    if (thread % 128 == 0 && place.n_tile == 0 && place.group == 0) {
      StoreRowsOfSlot(params, place.m_tile, count);
    }
  }
};

// The moments of a tile that StoreSwapAbBoxes has staged -> its slot.
template <typename T, class Tile>
__device__ __forceinline__ void CountSwapAbBoxes(const Params& params, const TilePlace& place,
                                                 const ResidueClass& of, uint32_t staging) {
  PixelSums<T> sums;
#pragma unroll 1
  for (int p = 0; p < Tile::kTileM; p += 32) {
    const int32_t first = place.m_tile * Tile::kTileM + p;
    const uint32_t valid = __ballot_sync(0xffffffff, first + Lane() < of.rows);
    sums.Count(staging + p * 128, valid, p == 0);
  }
  sums.Store(params, place);
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_STATISTICS_SM90_CUH_
