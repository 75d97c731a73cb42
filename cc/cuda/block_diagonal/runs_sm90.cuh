// block_diagonal, fprop of 3x3 filters with stride 2 and, in float32, fprop and dgrad with stride 1
// (sm_90a): the products of gather.cuh, where a pixel is read from shared memory once for all
// filter rows.
//
// A run is one column of kRows output rows, and a row of operand A. For column tap s and row y of
// the box, one ldmatrix reads 16 runs. At stride 2 its pixels serve filter rows 0 and 2, or row 1;
// at stride 1 all three:
//
//     for s:  B of (0, s), (1, s), (2, s)                      3 kSteps ldmatrix
//       for y = 0 ... kStride (kRows - 1) + 2:  A of row y     kSteps ldmatrix
//         for r with kStride | y - r:  out[(y - r) / kStride] += A B(r, s)   2 kSteps products each
//
// Tile: 32 runs, from neighbouring columns, groups of kRows rows, and images; 64 channels. Warp w
// has 16 of the runs and 16 channels of the result, with 8 kRows sums in each lane.
//
//     stage 0: box | stage 1: box | filter [tap][row of the block][64 channels] | barriers
//
// At stride 2 even and odd columns are two boxes, so that the pixels of neighbouring runs are
// neighbours.
//
// TMA copies the boxes in swizzled rows of 128 bytes and inserts the zeros of the padding. The rows
// of a box have a multiple of 8 pixels, so a run's pixel has the same swizzle in all rows: the
// distance between rows is constant, and only the column tap needs another address computation.
// Results are rounded, written to the stage whose box has been read, and stored by TMA, which omits
// elements outside the output. Meanwhile the next box is multiplied; the box after it is requested
// when the store has read the stage.
//
// The filter has the order of global memory: rows of channels for each tap, with zeros for other
// groups. ldmatrix.trans reads B from it. For the sums of a lane see ptx/mma.cuh.
//
// float32: a tile has 32 channels and a warp 8 channels of the result, one block of columns instead
// of two. The filter is stored as words of B (filter_words.cuh). TMA rounds the boxes to TF32. With
// three TF32 products (common/split_tf32.cuh) a run of the reduction is the three taps of a filter
// column; the split rows of A stay in registers for all their output rows.
//
// Zeros of the filter multiply the channels of other groups; see gather.cuh.
//
// Refused, with a reason (runs_plan.cc): other filters, strides, dilation, depth, float32 outputs
// of 16-bit operands, filters stored as krsc; and what gather.cuh refuses.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_RUNS_SM90_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_RUNS_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/block_diagonal/params.h"
#include "cuda/block_diagonal/run_loads_sm90.cuh"
#include "cuda/block_diagonal/run_maps_sm90.cuh"
#include "cuda/block_diagonal/tile.cuh"
#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/split_tf32.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::block_diagonal {

// kBlock: channels of a block. kRows: output rows of a run. kStride: 1 or 2. kThreeTf32: float32 as
// three products.
template <Op kOp_, DType kType_, int kBlock_, int kRows_, int kCtasPerSm_, int kStride_ = 2,
          bool kThreeTf32_ = false>
struct Runs {
  using T = typename ElementOf<kType_>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kChannels = TileChannels(sizeof(T));
  static constexpr Op kOp = kOp_;
  static constexpr DType kType = kType_;
  static constexpr int kBlock = kBlock_, kRows = kRows_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kStride = kStride_;
  static constexpr bool kThreeTf32 = kThreeTf32_;
  static constexpr bool kElements = sizeof(T) == 4, kRounds = kElements && !kThreeTf32;
  // A warp has 32 bytes of the result's channels: kBlocksN blocks of 8.
  static constexpr int kSteps = kBlock * int{sizeof(T)} / 32, kBlocksN = 4 / int{sizeof(T)};
  using Filter = FilterWords<kSteps, kBlocksN>;  // of float32
  static constexpr int kTapBytes = kElements ? Filter::kTapBytes : kBlock * kRunPixelBytes;
  static constexpr int kFilterBytes = 9 * kBlock * kRunPixelBytes;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// Adds the three taps of one filter column for one step of gathered channels. box: the lane's pixel
// and chunk in the first row of the box under this column. filter: the lane's row and chunk of tap
// (0, s); in float32 its words.
template <class Tag>
__device__ __forceinline__ void AddColumn(uint32_t box, int32_t row_bytes, uint32_t filter,
                                          float (&sums)[Tag::kRows][Tag::kBlocksN][4]) {
  constexpr int kStride = Tag::kStride, kBlocksN = Tag::kBlocksN;
  uint32_t b[3][2 * kBlocksN];
#pragma unroll
  for (int r = 0; r < 3; ++r) {
    if constexpr (Tag::kElements) {
      LoadPair(filter + r * 3 * Tag::kTapBytes, &b[r][0], &b[r][1]);
    } else {
      LoadMatricesTransposed(filter + r * 3 * Tag::kTapBytes, b[r]);
    }
  }
#pragma unroll
  for (int y = 0; y < (Tag::kRows - 1) * kStride + 3; ++y, box += row_bytes) {
    uint32_t a[4];
    LoadMatrices(box, a);
#pragma unroll
    for (int r = 0; r < 3; ++r) {
      const int row = (y - r) / kStride;
      if (y < r || (y - r) % kStride != 0 || row >= Tag::kRows) continue;
#pragma unroll
      for (int n = 0; n < kBlocksN; ++n) {
        MultiplyAdd<typename Tag::T>(sums[row][n], a, b[r][2 * n], b[r][2 * n + 1]);
      }
    }
  }
}

// AddColumn with three TF32 products (common/split_tf32.cuh); a run of the reduction is the column.
// Returns a bit for each row of the result whose run has a sum that is not finite.
template <class Tag>
__device__ __forceinline__ uint32_t AddColumnSplit(uint32_t box, int32_t row_bytes, uint32_t filter,
                                                   float (&sums)[Tag::kRows][1][4]) {
  constexpr int kStride = Tag::kStride;
  SplitWords<3, 1, 2> b;
#pragma unroll
  for (int r = 0; r < 3; ++r) {
    uint32_t words[2];
    LoadPair(filter + r * 3 * Tag::kTapBytes, &words[0], &words[1]);
    b.template Split<false>(r, 0, words);
  }
  uint32_t left = 0;
  SplitWords<3, 1, 4> a;  // of the last three rows of the box
#pragma unroll
  for (int y = 0; y < (Tag::kRows - 1) * kStride + 3; ++y, box += row_bytes) {
    if (y > 0) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a.big[0][0][e] = a.big[1][0][e], a.small[0][0][e] = a.small[1][0][e];
        a.big[1][0][e] = a.big[2][0][e], a.small[1][0][e] = a.small[2][0][e];
      }
    }
    uint32_t words[4];
    LoadMatrices(box, words);
    a.template Split<false>(2, 0, words);
    if (y < 2 || y % kStride != 0) continue;
    const int row = (y - 2) / kStride;
    left |= uint32_t{MultiplySplit(a, b, sums[row])} << row;
  }
  return left;
}

// If `take`, replaces the first row of `sums` by `row`; then rotates the rows, so that after one
// call for each row all are in order again. A variable index would put the rows into local memory.
template <int kRows>
__device__ __forceinline__ void TakeTurn(bool take, const float (&row)[4],
                                         float (&sums)[kRows][1][4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float value = take ? row[e] : sums[0][0][e];
#pragma unroll
    for (int i = 0; i + 1 < kRows; ++i) sums[i][0][e] = sums[i + 1][0][e];
    sums[kRows - 1][0][e] = value;
  }
}

// Computes the rows in `left` again, with operands of any value. under(s): `box` of AddColumn for
// column tap s. filter: the lane's words of tap (0, 0).
template <class Tag, class Under>
__device__ __forceinline__ void AddWithCare(uint32_t left, const Under& under, int32_t row_bytes,
                                            uint32_t filter, float (&sums)[Tag::kRows][1][4]) {
#pragma unroll 1
  for (int row = 0; row < Tag::kRows; ++row) {
    float sum[1][1][4] = {};
#pragma unroll 1
    for (int run = 0; run < 3 * Tag::kSteps; ++run) {
      const int s = run % 3, k = run / 3;
      const uint32_t box = (under(s) ^ k * 32) + row * Tag::kStride * row_bytes;
      const uint32_t taps = filter + s * Tag::kTapBytes + Tag::Filter::OfWord(2 * k);
      PromoteWithCare<3>(1, sum, [&](int r, auto& a, auto& b) {
        LoadMatrices(box + r * row_bytes, a[0]);
        LoadPair(taps + r * 3 * Tag::kTapBytes, &b[0][0], &b[0][1]);
      });
    }
    TakeTurn(left >> row & 1, sum[0][0], sums);
  }
}

// Stores a row of the results of 16 runs. to: the address of the lane's run and chunk for
// StoreMatrices. In float32 columns 2 t and 2 t + 1 are channels t and t + 4 (run_loads_sm90.cuh).
template <class Tag>
__device__ __forceinline__ void StoreRun(uint32_t to, const float (&sums)[Tag::kBlocksN][4]) {
  const float (&first)[4] = sums[0];
  if constexpr (Tag::kElements) {
    StoreMatrices(to, __float_as_uint(first[0]), __float_as_uint(first[2]),
                  __float_as_uint(first[1]), __float_as_uint(first[3]));
  } else {
    using T = typename Tag::T;
    const float (&second)[4] = sums[1];
    StoreMatrices(to, PackPair<T>(first[0], first[1]), PackPair<T>(first[2], first[3]),
                  PackPair<T>(second[0], second[1]), PackPair<T>(second[2], second[3]));
  }
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    RunsKernel(const __grid_constant__ Params params,
               const __grid_constant__ CUtensorMap gathered_map,
               const __grid_constant__ CUtensorMap second_map,
               const __grid_constant__ CUtensorMap out_map) {
  constexpr int kRows = Tag::kRows, kStride = Tag::kStride;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const int lane = threadIdx.x % 32, warp = UniformWarp();
  constexpr int kSlots = kTileBytes / 32;
  const int slot = warp % kSlots, strip = warp / kSlots;
  const uint32_t stages = SharedAddress(dynamic), filter = stages + 2 * params.stage_bytes;
  const uint32_t barriers = filter + Tag::kFilterBytes;
  const Cursor range(params);

  auto load = [&](int32_t item, uint32_t stage) {
    const TilePlace tile(params, item, Tag::kChannels);
    const uint32_t barrier = barriers + stage * 8;
    BarrierArriveExpect(barrier, params.box_pixels * kRunPixelBytes);
    const uint32_t to = stages + stage * params.stage_bytes;
    const int32_t row = tile.row * kStride - rows.pad;
    if constexpr (kStride == 1) {
      CopyTile4d(to, &gathered_map, barrier, tile.first_channel, tile.column - columns.pad, row,
                 tile.image);
    } else {
      CopyTile4d(to, &gathered_map, barrier, tile.first_channel, tile.column + (-columns.pad >> 1),
                 row, tile.image);
      CopyTile4d(to + params.box_pixels / 2 * kRunPixelBytes, &second_map, barrier,
                 tile.first_channel, tile.column + ((1 - columns.pad) >> 1), row, tile.image);
    }
  };
  LoadFirstBoxes(barriers, range, load);
  HeldFilter<Tag> held(params, filter, range.item);
  if constexpr (kStride == 1) {
    // After a box, the padding that its last row would share with a next row.
    for (int32_t i = params.box_pixels * kRunPixelBytes + threadIdx.x * 16; i < params.stage_bytes;
         i += kThreads * 16) {
      StoreChunk(stages + i, {0, 0, 0, 0});
      StoreChunk(stages + params.stage_bytes + i, {0, 0, 0, 0});
    }
  }

  // The lane's run. Missing runs read the pixels of another run, and are stored after the tile.
  const int32_t groups = static_cast<int32_t>(params.run_groups.divisor);
  const int32_t run = strip * 16 + lane % 16, runs = params.tile_images * groups * columns.tile;
  int32_t piece, column, image, group;
  params.tile_columns.Divmod(min(run, runs - 1), &piece, &column);
  params.run_groups.Divmod(piece, &image, &group);
  const int32_t first_row = group * kRows;
  const int32_t box_pixel = (image * rows.box + first_row * kStride) * columns.box + column;
  const bool exists = run < runs;
  const int32_t out_pixel =
      exists ? (image * rows.tile + first_row) * columns.tile + column : params.tile_pixels;
  const int32_t out_step = exists ? columns.tile : 0;
  const int32_t row_bytes = ComputedHere(columns.box * kRunPixelBytes);
  const int out_chunk = slot * 2 + lane / 16;
  const int box_chunk = slot / Tag::kSteps * Tag::kSteps * 2 + lane / 16;
  // For B: a row of the block and a chunk of channels.
  const int b_row = lane % 16, b_chunk = out_chunk;
  const uint32_t b = Tag::kElements
                         ? filter + slot * 9 * Tag::kTapBytes + Tag::Filter::OfLane(lane)
                         : filter + b_row * kRunPixelBytes + ((b_chunk ^ (b_row & 7)) << 4);
  held.Wait();

  uint32_t stage = 0, parity = 0;
  for (int32_t item = range.item; item < range.end; ++item) {
    held.Exchange(item);
    const uint32_t box = stages + stage * params.stage_bytes;
    float sums[kRows][Tag::kBlocksN][4] = {};
    BarrierWait(barriers + stage * 8, parity);
    // The lane's pixel and chunk under a column tap.
    auto under = [&](int s) {
      const int32_t second = params.box_pixels / 2;  // of the other columns
      const int32_t pixel = box_pixel + (kStride == 1 ? s : s == 1 ? second : s >> 1);
      return box + pixel * kRunPixelBytes + ((box_chunk ^ (pixel & 7)) << 4);
    };
    uint32_t left = 0;
    // Unrolled, three TF32 products would need more than 128 registers.
#pragma unroll(Tag::kThreeTf32 ? 1 : 3)
    for (int s = 0; s < 3; ++s) {
      const uint32_t first = under(s);
#pragma unroll(Tag::kThreeTf32 ? 1 : Tag::kSteps)
      for (int k = 0; k < Tag::kSteps; ++k) {
        const uint32_t from = first ^ k * 32;
        const uint32_t taps = b + s * Tag::kTapBytes +
                              (Tag::kElements ? Tag::Filter::OfWord(2 * k)
                                              : static_cast<uint32_t>(k * 16 * kRunPixelBytes));
        if constexpr (Tag::kThreeTf32) {
          left |= AddColumnSplit<Tag>(from, row_bytes, taps, sums);
        } else {
          AddColumn<Tag>(from, row_bytes, taps, sums);
        }
      }
      // The results in the other stage have been read by their store.
      if (s == 0 && warp == 0 && item > range.item && item + 1 < range.end) {
        if (ElectOne()) {
          WaitForStoresToRead();
          load(item + 1, stage ^ 1);
        }
        __syncwarp();
      }
    }
    if constexpr (Tag::kThreeTf32) {
      if (__any_sync(0xffffffff, left != 0)) AddWithCare<Tag>(left, under, row_bytes, b, sums);
    }
    __syncthreads();
    int32_t pixel = ComputedHere(out_pixel);
#pragma unroll
    for (int y = 0; y < kRows; ++y, pixel += out_step) {
      StoreRun<Tag>(box + pixel * kRunPixelBytes + ((out_chunk ^ (pixel & 7)) << 4), sums[y]);
    }
    FenceForCopies();
    __syncthreads();
    if (warp == 0) {
      if (ElectOne()) {
        const TilePlace tile(params, item, Tag::kChannels);
        StoreTile4d(&out_map, box, tile.first_channel, tile.column, tile.row, tile.image);
        CommitStores();
      }
      __syncwarp();
    }
    parity ^= stage;
    stage ^= 1;
  }
  if (warp == 0 && ElectOne()) WaitForStoresToRead();
}

template <Op kOp_, DType kType_, int kBlock_, int kRows_, int kCtasPerSm_, int kStride_,
          bool kThreeTf32_>
template <class Tag>
Status Runs<kOp_, kType_, kBlock_, kRows_, kCtasPerSm_, kStride_, kThreeTf32_>::Launch(
    const Plan& plan, const Operands& operands, void* stream) {
  const auto& launch = plan.As<LaunchParams>();
  Params params = launch.kernel;
  params.filter = operands.rhs;
  CUtensorMap gathered, second, out;
  const int first = params.axis[2].pad & (kStride - 1);
  JAXCONV_RETURN_IF_ERROR(
      EncodeGathered(kType, params, operands.lhs, kStride, first, &gathered, kThreeTf32));
  JAXCONV_RETURN_IF_ERROR(EncodeGathered(kType, params, operands.lhs, kStride,
                                         first ^ (kStride - 1), &second, kThreeTf32));
  JAXCONV_RETURN_IF_ERROR(EncodeWalked(kType, params, operands.out, params.axis[1].tile,
                                       params.axis[2].tile, &out, /*whole_f32=*/true));
  return jaxconv::Launch<RunsKernel<Tag>>(plan.kernel->name,
                                          RunConfig(launch, kThreads, /*overlaps=*/true), stream,
                                          params, gathered, second, out);
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_RUNS_SM90_CUH_
