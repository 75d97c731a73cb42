// block_diagonal, wgrad: groups of 2 to 32 channels on the tensor cores (sm_80), operands of 16
// bits or float32.
//
//     dw[tap][c, k] = sum over positions of x[position under the tap, c] dy[position, k]
//
// for the kBlock = 16 or 32 neighbouring channels of a block. Products of different groups are
// computed but not stored. A is x transposed and B is dy; ldmatrix.trans reads both from pixels of
// 128 bytes (tile.cuh).
//
// Warp w has 16 channels c, the kBlock channels k of their block, and every second block of 16
// positions of the tile. The sums of kRows x kColumns taps stay in registers (3x3: 72, or 144 with
// kBlock 32):
//
//     stage 0: x box | dy tile | stage 1: x box | dy tile | a pixel of zeros | tables
//
// For positions outside the output dy is zero, and x is read from the pixel of zeros, so that no
// Inf in x is multiplied by zero. 16 positions take kBlock / 16 ldmatrix of dy and then, for each
// tap, one ldmatrix of x and kBlock
// / 8 products.
//
// float32: a tile has 32 channels, so two warps have its channels c, and each has every fourth
// block of 16 positions, as two products. A and B are read as pairs of words (LoadElements) and
// rounded to TF32 in registers. With three products they are split there, and a run of the
// reduction is 16 positions (common/split_tf32.cuh).
//
// A CTA has 64 channels and processes tiles slice, slice + slices, ..., with two barriers for each
// tile. At the end the sums of warps with equal channels are added in order through shared memory,
// and those of slices by common/splitk_reduce.cuh, so the bits repeat. Filters of other sizes are
// divided into parts of kColumns taps of a filter row, each with separate CTAs.
//
// Refused, with a reason (plan.cc): what gather.cuh refuses.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_WGRAD_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_WGRAD_CUH_

#include <cstdint>

#include "cuda/block_diagonal/params.h"
#include "cuda/block_diagonal/tile.cuh"
#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/split_tf32.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::block_diagonal {

// kRows x kColumns: taps of a CTA. With kRows = 1 filters of any size are divided into parts.
// kThreeTf32: float32 as three products.
template <Op kOp, DType kType, int kBlock_, int kRows_, int kColumns_, int kCtasPerSm_,
          bool kThreeTf32_ = false>
struct Wgrad {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kChannels = TileChannels(sizeof(T));
  static constexpr int kBlock = kBlock_, kRows = kRows_, kColumns = kColumns_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr bool kThreeTf32 = kThreeTf32_;
  static constexpr int kBlocksN = kBlock / 8;
  // Warps side by side with 16 channels each; two strips, or four in float32.
  static constexpr int kWarpsOfStrip = kChannels / 16, kStrips = kWarps / kWarpsOfStrip;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// Starts copying a tile of dy, with zeros outside. positions: in shared memory.
template <typename T>
__device__ __forceinline__ void CopyWalked(const Params& params, const TilePlace& tile,
                                           uint32_t positions, uint32_t to) {
  using P = PaddedPixel;
  constexpr int kStep = kThreads / P::kChunks;
  const int chunk = threadIdx.x % P::kChunks, pixel = threadIdx.x / P::kChunks;
  const int32_t channel = tile.first_channel + chunk * (16 / int{sizeof(T)});
  const bool exists = channel < params.channels;
  const uint32_t limits = Limits(params, tile);
  const T* first =
      static_cast<const T*>(params.walked) + FirstPixel(params, tile) * params.channels + channel;
  const int32_t bytes = params.channels * int{sizeof(T)};
  to += P::Offset(pixel, chunk);
  positions += pixel * kPlaceBytes;
  for (int32_t left = params.tile_pixels - pixel; left > 0; left -= kStep) {
    uint32_t row_column, moved;
    LoadPair(positions, &row_column, &moved);
    CopyAsync<16>(to, OffsetBytes(first, static_cast<int32_t>(moved), bytes),
                  exists && InTile(limits, row_column));
    positions += kStep * kPlaceBytes, to += kStep * P::kBytes;
  }
}

// A lane's addresses in a stage, in bytes.
struct LanePlace {
  uint32_t box;        // the x box, the lane's chunk, the CTA's first tap
  uint32_t walked;     // dy: the lane's first position and chunk
  uint32_t zeros;      // the lane's chunk of the pixel of zeros
  uint32_t positions;  // the lane's first position in x: row and column, and bytes from `box`
  uint32_t limits;     // see Limits
};

// For 32-bit elements, which ldmatrix.trans does not support. A lane reads channels 2 g and 2 g + 1
// of positions 2 t and 2 t + 1, as rows g and g + 8 of A, or as column g of two blocks of B.
// Positions and channels have this order in both operands, and the words of half a warp are in
// different banks.
__device__ __forceinline__ void LoadElements(uint32_t first, uint32_t second,
                                             uint32_t (&words)[4]) {
  LoadPair(first, &words[0], &words[1]);
  LoadPair(second, &words[2], &words[3]);
}

// Two positions of a lane: the address of x under the first tap, and the bytes to the next tap and
// to the next filter row.
struct ElementPlace {
  uint32_t at[2];
  int32_t to_next_tap[2], to_next_row[2];

  // positions: in shared memory.
  __device__ __forceinline__ ElementPlace(const Params& params, const LanePlace& place,
                                          uint32_t positions) {
    const uint4 both = LoadChunk(positions);
    const uint32_t row_column[2] = {both.x, both.z}, moved[2] = {both.y, both.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = InTile(place.limits, row_column[i]);
      at[i] = inside ? place.box + moved[i] : place.zeros;
      to_next_tap[i] = inside ? params.axis[2].dilation * kPixelBytes : 0;
      to_next_row[i] = inside ? params.axis[1].dilation * params.box_row_bytes : 0;
    }
  }
  __device__ __forceinline__ void Load(int row, int column, uint32_t (&words)[4]) const {
    LoadElements(at[0] + row * to_next_row[0] + column * to_next_tap[0],
                 at[1] + row * to_next_row[1] + column * to_next_tap[1], words);
  }
};

// Loads dy of eight positions.
template <class Tag>
__device__ __forceinline__ void LoadWalkedElements(uint32_t at, uint32_t (&y)[Tag::kBlocksN][2]) {
#pragma unroll
  for (int nb = 0; nb < Tag::kBlocksN; nb += 2) {
    uint32_t words[4];
    LoadElements(at + nb * 32, at + nb * 32 + kPixelBytes, words);
    y[nb][0] = words[0], y[nb + 1][0] = words[1], y[nb][1] = words[2], y[nb + 1][1] = words[3];
  }
}

// AddPositions for 32-bit elements, with one TF32 product or three (common/split_tf32.cuh).
template <class Tag, int kColumns>
__device__ __forceinline__ void AddElements(
    const Params& params, LanePlace place, int32_t blocks,
    float (&sums)[Tag::kRows * Tag::kColumns][Tag::kBlocksN][4]) {
  constexpr int kBlocksN = Tag::kBlocksN, kTaps = Tag::kRows * kColumns;
  constexpr int kStepBytes = 8 * kPixelBytes, kStepPlaces = 8 * kPlaceBytes;
#pragma unroll 1
  for (; blocks > 0; --blocks) {
    if constexpr (Tag::kThreeTf32) {
      const ElementPlace of_step[] = {{params, place, place.positions},
                                      {params, place, place.positions + kStepPlaces}};
      static_assert(kSplitRunSteps == 2);
      uint32_t x[2][4], y[2][kBlocksN][2];
      auto read_x = [&](int tap, auto& words) {
#pragma unroll
        for (int s = 0; s < 2; ++s) of_step[s].Load(tap / kColumns, tap % kColumns, words[s]);
      };
#pragma unroll
      for (int s = 0; s < 2; ++s) LoadWalkedElements<Tag>(place.walked + s * kStepBytes, y[s]);
      read_x(0, x);
      auto& acc = reinterpret_cast<float (&)[kTaps][kBlocksN][4]>(sums);
      const uint32_t left = MultiplySplitRun(y, x, acc, read_x, [](auto) {});
      if (__any_sync(0xffffffff, left != 0)) {
        Unroll<kTaps>([&](auto constant) {
          constexpr int tap = decltype(constant)::value;
          auto& of_tap = reinterpret_cast<float (&)[1][kBlocksN][4]>(acc[tap]);
          PromoteWithCare(left >> tap & 1, of_tap, [&](int step, auto& of_x, auto& of_y) {
            const ElementPlace at(params, place, place.positions + step * kStepPlaces);
            at.Load(tap / kColumns, tap % kColumns, of_x[0]);
            LoadWalkedElements<Tag>(place.walked + step * kStepBytes, of_y);
          });
        });
      }
    } else {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const ElementPlace at(params, place, place.positions + s * kStepPlaces);
        uint32_t y[kBlocksN][2];
        LoadWalkedElements<Tag>(place.walked + s * kStepBytes, y);
#pragma unroll
        for (int nb = 0; nb < kBlocksN; ++nb) RoundToTf32(y[nb][0]), RoundToTf32(y[nb][1]);
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
          uint32_t x[4];
          at.Load(tap / kColumns, tap % kColumns, x);
          RoundFragment<float>(x);
#pragma unroll
          for (int nb = 0; nb < kBlocksN; ++nb) {
            MultiplyAdd<float>(sums[tap / kColumns * Tag::kColumns + tap % kColumns][nb], x,
                               y[nb][0], y[nb][1]);
          }
        }
      }
    }
    place.positions += Tag::kStrips * 16 * kPlaceBytes;
    place.walked += Tag::kStrips * 16 * kPixelBytes;
  }
}

// Adds the products of every kStrips-th of `blocks` blocks of 16 positions, for kColumns taps of
// each of the CTA's filter rows.
template <class Tag, int kColumns>
__device__ __forceinline__ void AddPositions(
    const Params& params, LanePlace place, int32_t blocks,
    float (&sums)[Tag::kRows * Tag::kColumns][Tag::kBlocksN][4]) {
  using T = typename Tag::T;
  constexpr int kBlocksN = Tag::kBlocksN;
  const int32_t tap_bytes = params.axis[2].dilation * kPixelBytes;
  const int32_t row_bytes = params.axis[1].dilation * params.box_row_bytes;
#pragma unroll 1
  for (; blocks > 0; --blocks) {
    uint32_t row_column, moved, y[kBlocksN * 2];
    LoadPair(place.positions, &row_column, &moved);
#pragma unroll
    for (int nb = 0; nb < kBlocksN; nb += 2) {
      LoadMatricesTransposed(place.walked + nb * 16, reinterpret_cast<uint32_t (&)[4]>(y[nb * 2]));
    }
    const bool inside = InTile(place.limits, row_column);
    uint32_t at = inside ? place.box + moved : place.zeros;
    const int32_t to_next_tap = inside ? tap_bytes : 0, to_next_row = inside ? row_bytes : 0;
#pragma unroll
    for (int r = 0; r < Tag::kRows; ++r) {
#pragma unroll
      for (int s = 0; s < kColumns; ++s) {
        uint32_t x[4];
        LoadMatricesTransposed(at + s * to_next_tap, x);
#pragma unroll
        for (int nb = 0; nb < kBlocksN; ++nb) {
          MultiplyAdd<T>(sums[r * Tag::kColumns + s][nb], x, y[nb * 2], y[nb * 2 + 1]);
        }
      }
      at += to_next_row;
    }
    place.positions += Tag::kStrips * 16 * kPlaceBytes;
    place.walked += Tag::kStrips * 16 * kPixelBytes;
  }
}

// The same for the first `columns` <= kColumns taps.
template <class Tag, int kColumns = Tag::kColumns>
__device__ __forceinline__ void AddPositions(
    const Params& params, const LanePlace& place, int32_t blocks, int32_t columns,
    float (&sums)[Tag::kRows * Tag::kColumns][Tag::kBlocksN][4]) {
  if constexpr (Tag::kRows == 1 && kColumns > 1) {
    if (columns < kColumns) {
      AddPositions<Tag, kColumns - 1>(params, place, blocks, columns, sums);
      return;
    }
  }
  if constexpr (sizeof(typename Tag::T) == 4) {
    AddElements<Tag, kColumns>(params, place, blocks, sums);
  } else {
    AddPositions<Tag, kColumns>(params, place, blocks, sums);
  }
}

// The offset in bytes of a sum of one tap in shared memory, [block n][lane][4], and the parts of it
// from channels c and k; see ptx/mma.cuh, or LoadElements for 32-bit elements.
template <class Tag>
__device__ __forceinline__ uint32_t RowBytes(int32_t c) {
  if constexpr (sizeof(typename Tag::T) == 4) return c % 16 / 2 * 64 + c % 2 * 8;
  return c % 8 * 64 + c / 8 % 2 * 8;
}
template <class Tag>
__device__ __forceinline__ uint32_t ColumnBytes(int32_t k) {
  if constexpr (sizeof(typename Tag::T) == 4) {
    return (k / 16 * 2 + k % 2) % Tag::kBlocksN * 512 + k % 16 / 4 * 16 + k / 2 % 2 * 4;
  }
  return k / 8 % Tag::kBlocksN * 512 + k % 8 / 2 * 16 + k % 2 * 4;
}

// Adds the sums of the other strips to those of the first, in order, and leaves the result in
// shared memory, [warp of the strip][tap][n][lane][4].
template <class Tag, class Barrier>
__device__ __forceinline__ void AddStrips(
    float (&sums)[Tag::kRows * Tag::kColumns][Tag::kBlocksN][4], uint32_t shared, int strip,
    int warp_of_strip, const Barrier& barrier) {
  constexpr int kBlocksN = Tag::kBlocksN, kSums = Tag::kRows * Tag::kColumns * kBlocksN;
  shared += (warp_of_strip * kSums * 32 + threadIdx.x % 32) * 16;
#pragma unroll 1
  for (int other_strip = 1; other_strip < Tag::kStrips; ++other_strip) {
    if (strip == other_strip) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        StoreShared(shared + i * 512, sums[i / kBlocksN][i % kBlocksN]);
      }
    }
    barrier();
    if (strip == 0) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        float other[4], (&total)[4] = sums[i / kBlocksN][i % kBlocksN];
        LoadShared<0>(shared + i * 512, other);
#pragma unroll
        for (int e = 0; e < 4; ++e) total[e] += other[e];
        if (other_strip + 1 == Tag::kStrips) StoreShared(shared + i * 512, total);
      }
    }
    barrier();
  }
}

// Stores a CTA's sums from shared memory, for equal groups only. A lane has neighbouring channels
// k, 4 bytes of a pixel; a warp has every kWarps-th (tap, channel c of their group).
template <class Tag>
__device__ __forceinline__ void StoreSums(const Params& params, uint32_t sums, int32_t slice,
                                          int32_t filter, int32_t first_channel, const Step& step,
                                          int32_t first_tap) {
  constexpr int kBlocksN = Tag::kBlocksN, kTaps = Tag::kRows * Tag::kColumns;
  constexpr int kOfLane = Tag::kChannels / 32;
  const int k_of_tile = threadIdx.x % 32 * kOfLane;
  const int32_t k = first_channel + k_of_tile;
  if (k >= params.channels) return;
  const int32_t rows = params.axis[1].taps, columns = params.axis[2].taps;
  const int32_t before = (step.depth_tap * rows + step.row_tap) * columns + first_tap;
  const int32_t all_taps = params.axis[0].taps * rows * columns;
  const int32_t taps = Tag::kRows > 1 ? kTaps : min(kTaps, columns - first_tap);
  const int32_t group = params.group, first_c = k_of_tile & ~(group - 1);
  float* out =
      static_cast<float*>(params.out) +
      ((int64_t{slice} * params.filters + filter) * all_taps + before) * group * params.channels +
      k;
  sums += ColumnBytes<Tag>(k_of_tile);
  for (int32_t i = threadIdx.x / 32; i < taps * group; i += kWarps) {
    const int32_t tap = i >> params.group_log2, c = first_c + (i & (group - 1));
    const uint32_t at = sums + (c / 16 * kTaps + tap) * (kBlocksN * 512) + RowBytes<Tag>(c);
    float* const to = out + int64_t{i} * params.channels;
    if constexpr (kOfLane == 2) {
      float pair[2];
      LoadPair(at, &pair[0], &pair[1]);
      *reinterpret_cast<float2*>(to) = make_float2(pair[0], pair[1]);
    } else {
      *to = __uint_as_float(LoadWord(at));
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    WgradKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  constexpr int kRows = Tag::kRows, kColumns = Tag::kColumns, kBlocksN = Tag::kBlocksN;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const int lane = threadIdx.x % 32, warp = UniformWarp();
  const int strip = warp / Tag::kWarpsOfStrip;
  const int sixteen = warp % Tag::kWarpsOfStrip;  // block of 16 of the tile's channels c
  const int32_t walked_bytes = params.tile_images * rows.box * params.box_row_bytes;
  const uint32_t stages = SharedAddress(dynamic), zeros = stages + 2 * params.stage_bytes;
  const Tables tables(zeros + kPixelBytes);

  // The CTA's slice, taps, filter in the batch, and channels.
  int32_t rest = blockIdx.x, filter, channel_tile;
  const int32_t slice = rest % params.slices;
  rest /= params.slices;
  const int32_t parts_of_row = kRows > 1 ? 1 : (columns.taps + kColumns - 1) / kColumns;
  const int32_t row_parts = kRows > 1 ? 1 : rows.taps;
  Step step;
  const int32_t first_tap = rest % parts_of_row * kColumns;
  rest /= parts_of_row;
  step.row_tap = rest % row_parts;
  rest /= row_parts;
  step.depth_tap = rest % params.axis[0].taps;
  rest /= params.axis[0].taps;
  params.channel_tiles.Divmod(rest, &filter, &channel_tile);

  auto place = [&](int32_t item) {
    TilePlace tile(params, item, Tag::kChannels);
    tile.first_channel = channel_tile * Tag::kChannels;
    tile.image += filter * params.images;
    return tile;
  };
  auto fill = [&](int32_t item, int stage) {
    if (item < params.items) {
      const TilePlace tile = place(item);
      const uint32_t to = stages + stage * params.stage_bytes;
      CopyBox<T>(params, tile, step.depth_tap, step.row_tap, tables.gathered, to);
      CopyWalked<T>(params, tile, tables.outputs, to + walked_bytes);
    }
    CopyAsyncCommit();
  };

  FillTables(params, step.row_tap, tables);
  // Zeros: a pixel, and dy after the last position up to a multiple of 16; copies do not write
  // these.
  const int32_t blocks = (params.tile_pixels + 15) / 16;
  const int32_t behind = (blocks * 16 - params.tile_pixels) * kPixelBytes;
  if (threadIdx.x < PaddedPixel::kChunks) StoreChunk(zeros + threadIdx.x * 16, {0, 0, 0, 0});
  for (int32_t i = threadIdx.x * 16; i < behind; i += kThreads * 16) {
    const uint32_t to = stages + walked_bytes + params.tile_pixels * kPixelBytes + i;
    StoreChunk(to, {0, 0, 0, 0});
    StoreChunk(to + params.stage_bytes, {0, 0, 0, 0});
  }
  __syncthreads();

  // ldmatrix.trans: lanes 0-7 and 8-15 address rows of eight positions in two chunks, lanes 16-31
  // those of the next eight positions. For dy, whose chunks are columns of B, lanes 8-15 address
  // the next positions. For 32-bit elements see LoadElements.
  constexpr bool kElements = sizeof(T) == 4;
  const int x_position = strip * 16 + (kElements ? lane % 4 * 2 : lane % 8 + lane / 16 * 8);
  const int y_position = strip * 16 + (kElements ? lane % 4 * 2 : lane % 16);
  const int of_lane = kElements ? lane / 4 * 8 : lane / 8 % 2 * 16;
  const int x_bytes = sixteen * 16 * int{sizeof(T)} + of_lane;
  const int y_bytes = sixteen * 16 / Tag::kBlock * Tag::kBlock * int{sizeof(T)} +
                      (kElements ? of_lane : lane / 16 * 16);
  LanePlace lane_place;
  lane_place.zeros = zeros + x_bytes;
  lane_place.positions = tables.boxes + x_position * kPlaceBytes;
  const int32_t blocks_of_strip = (blocks - strip + Tag::kStrips - 1) / Tag::kStrips;
  float sums[kRows * kColumns][kBlocksN][4] = {};
  int32_t item = slice;
  fill(item, 0);
  for (int stage = 0; item < params.items; stage ^= 1, item += params.slices) {
    fill(item + params.slices, stage ^ 1);
    CopyAsyncWait<1>();
    __syncthreads();
    const uint32_t box = stages + stage * params.stage_bytes;
    lane_place.box = box + first_tap * columns.dilation * kPixelBytes + x_bytes;
    lane_place.walked = box + walked_bytes + y_position * kPixelBytes + y_bytes;
    lane_place.limits = Limits(params, place(item));
    AddPositions<Tag>(params, lane_place, blocks_of_strip, columns.taps - first_tap, sums);
    // The next pass fills this stage.
    __syncthreads();
  }

  CopyAsyncWait<0>();
  AddStrips<Tag>(sums, stages, strip, sixteen, [] { __syncthreads(); });
  StoreSums<Tag>(params, stages, slice, filter, channel_tile * Tag::kChannels, step, first_tap);
}

template <Op kOp, DType kType, int kBlock_, int kRows_, int kColumns_, int kCtasPerSm_,
          bool kThreeTf32_>
template <class Tag>
Status Wgrad<kOp, kType, kBlock_, kRows_, kColumns_, kCtasPerSm_, kThreeTf32_>::Launch(
    const Plan& plan, const Operands& operands, void* stream) {
  return LaunchHaloWgrad<Params, WgradKernel<Tag>, Epilogue>(plan, operands, stream);
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_WGRAD_CUH_
