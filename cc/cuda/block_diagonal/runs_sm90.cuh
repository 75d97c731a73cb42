// block_diagonal, fprop of 3x3 filters with stride 2 (sm_90a): the products of gather.cuh, of
// pixels that are read from shared memory once for the filter rows that meet them.
//
// A run is one column of kRows output rows. A row of operand A is a run: under column tap s and at
// row y of the box, 16 runs are one ldmatrix, the same pixels for the filter rows 0 and 2, or for
// row 1 alone:
//
//     for s:  B of (0, s), (1, s), (2, s)                      3 kSteps ldmatrix
//       for y = 0 ... 2 kRows:  A of row y                     kSteps ldmatrix
//         for r with y - r even:  out[(y - r) / 2] += A B(r, s)    2 kSteps products each
//
// Tile: 32 runs, of neighbouring columns, groups of kRows rows, and images; 64 channels. Warp w has
// 16 of the runs and 16 channels of the result, 8 kRows sums a lane.
//
//     stage 0: box | stage 1: box | filter [tap][row of the block][64 channels] | barriers
//
// The columns of even and of odd index are two boxes, so that the pixels of neighbouring runs are
// neighbours.
//
// Boxes come by TMA, which fills in the zeros of the padding, rows of 128 bytes with its swizzle. A
// box's rows have a multiple of 8 pixels, so the swizzle of a run's pixel is the same in all of
// them: a row is a constant distance, and only the column tap changes an address otherwise. Results
// are rounded, stored into the stage whose box has been read, and leave by TMA, which leaves out
// what lies outside of the output. Meanwhile the next box is multiplied; its successor is asked for
// when that store has read the stage.
//
// The filter lies as in memory, a tap's rows of channels, rows of other groups zero: ldmatrix.trans
// gives B. Sums of a lane: see ptx/mma.cuh.
//
// Zeros of the filter meet the channels of other groups, see gather.cuh.
//
// Refused, with a reason (runs_plan.cc): other filters, strides, dilation, depth, float32 outputs,
// filters stored as krsc; and what gather.cuh refuses.
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
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::block_diagonal {

// kBlock: channels of a block. kRows: output rows of a run.
template <Op kOp_, DType kType_, int kBlock_, int kRows_, int kCtasPerSm_>
struct Runs {
  using T = typename ElementOf<kType_>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kChannels = TileChannels(sizeof(T));
  static constexpr Op kOp = kOp_;
  static constexpr DType kType = kType_;
  static constexpr int kBlock = kBlock_, kRows = kRows_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kSteps = kBlock / 16;
  static constexpr int kTapBytes = kBlock * kRunPixelBytes;
  static constexpr int kFilterBytes = 9 * kTapBytes;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// Adds the three taps of one filter column, of 16 gathered channels. box: the lane's pixel and
// chunk of the box's first row under the column. filter: the lane's row and chunk of the tap (0,
// s).
template <class Tag>
__device__ __forceinline__ void AddColumn(uint32_t box, int32_t row_bytes, uint32_t filter,
                                          float (&sums)[Tag::kRows][2][4]) {
  uint32_t b[3][4];
#pragma unroll
  for (int r = 0; r < 3; ++r) {
    LoadMatricesTransposed(filter + r * 3 * Tag::kTapBytes, b[r]);
  }
#pragma unroll
  for (int y = 0; y < 2 * Tag::kRows + 1; ++y, box += row_bytes) {
    uint32_t a[4];
    LoadMatrices(box, a);
#pragma unroll
    for (int r = 0; r < 3; ++r) {
      const int row = (y - r) / 2;
      if (y < r || (y - r) % 2 != 0 || row >= Tag::kRows) continue;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        MultiplyAdd<typename Tag::T>(sums[row][n], a, b[r][2 * n], b[r][2 * n + 1]);
      }
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    RunsKernel(const __grid_constant__ Params params,
               const __grid_constant__ CUtensorMap gathered_map,
               const __grid_constant__ CUtensorMap second_map,
               const __grid_constant__ CUtensorMap out_map) {
  using T = typename Tag::T;
  constexpr int kRows = Tag::kRows;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const int lane = threadIdx.x % 32, warp = UniformWarp();
  const int slot = warp % (Tag::kChannels / 16), strip = warp / (Tag::kChannels / 16);
  const uint32_t stages = SharedAddress(dynamic), filter = stages + 2 * params.stage_bytes;
  const uint32_t barriers = filter + Tag::kFilterBytes;
  const Cursor range(params);

  auto load = [&](int32_t item, uint32_t stage) {
    const TilePlace tile(params, item, Tag::kChannels);
    const uint32_t barrier = barriers + stage * 8;
    BarrierArriveExpect(barrier, params.box_pixels * kRunPixelBytes);
    const uint32_t to = stages + stage * params.stage_bytes;
    const int32_t row = tile.row * 2 - rows.pad;
    CopyTile4d(to, &gathered_map, barrier, tile.first_channel, tile.column + (-columns.pad >> 1),
               row, tile.image);
    CopyTile4d(to + params.box_pixels / 2 * kRunPixelBytes, &second_map, barrier,
               tile.first_channel, tile.column + ((1 - columns.pad) >> 1), row, tile.image);
  };
  LoadFirstBoxes(barriers, range, load);
  HeldFilter<Tag> held(params, filter, range.item);

  // The lane's run; those that do not exist read another's pixels, and are stored behind the tile.
  const int32_t groups = static_cast<int32_t>(params.run_groups.divisor);
  const int32_t run = strip * 16 + lane % 16, runs = params.tile_images * groups * columns.tile;
  int32_t piece, column, image, group;
  params.tile_columns.Divmod(min(run, runs - 1), &piece, &column);
  params.run_groups.Divmod(piece, &image, &group);
  const int32_t first_row = group * kRows;
  const int32_t box_pixel = (image * rows.box + first_row * 2) * columns.box + column;
  const bool exists = run < runs;
  const int32_t out_pixel =
      exists ? (image * rows.tile + first_row) * columns.tile + column : params.tile_pixels;
  const int32_t out_step = exists ? columns.tile : 0;
  const int32_t row_bytes = ComputedHere(columns.box * kRunPixelBytes);
  const int out_chunk = slot * 2 + lane / 16;
  const int box_chunk = slot / Tag::kSteps * Tag::kSteps * 2 + lane / 16;
  // Of B: rows of the block and chunks of channels.
  const int b_row = lane % 16, b_chunk = out_chunk;
  const uint32_t b = filter + b_row * kRunPixelBytes + ((b_chunk ^ (b_row & 7)) << 4);
  CopyAsyncWait<0>();
  __syncthreads();

  uint32_t stage = 0, parity = 0;
  for (int32_t item = range.item; item < range.end; ++item) {
    held.Exchange(item);
    const uint32_t box = stages + stage * params.stage_bytes;
    float sums[kRows][2][4] = {};
    BarrierWait(barriers + stage * 8, parity);
#pragma unroll
    for (int s = 0; s < 3; ++s) {
      const int32_t second = params.box_pixels / 2;  // of the other columns
      const int32_t pixel = box_pixel + (s == 1 ? second : s >> 1);
      const uint32_t from = box + pixel * kRunPixelBytes + ((box_chunk ^ (pixel & 7)) << 4);
      const uint32_t taps = b + s * Tag::kTapBytes;
#pragma unroll
      for (int k = 0; k < Tag::kSteps; ++k) {
        AddColumn<Tag>(from ^ k * 32, row_bytes, taps + k * 16 * kRunPixelBytes, sums);
      }
      // The other stage's results have left by now.
      if (s == 0 && warp == 0 && item > range.item && item + 1 < range.end) {
        if (ElectOne()) {
          WaitForStoresToRead();
          load(item + 1, stage ^ 1);
        }
        __syncwarp();
      }
    }
    __syncthreads();
    int32_t pixel = ComputedHere(out_pixel);
#pragma unroll
    for (int y = 0; y < kRows; ++y, pixel += out_step) {
      StoreMatrices(
          box + pixel * kRunPixelBytes + ((out_chunk ^ (pixel & 7)) << 4),
          PackPair<T>(sums[y][0][0], sums[y][0][1]), PackPair<T>(sums[y][0][2], sums[y][0][3]),
          PackPair<T>(sums[y][1][0], sums[y][1][1]), PackPair<T>(sums[y][1][2], sums[y][1][3]));
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

template <Op kOp_, DType kType_, int kBlock_, int kRows_, int kCtasPerSm_>
template <class Tag>
Status Runs<kOp_, kType_, kBlock_, kRows_, kCtasPerSm_>::Launch(const Plan& plan,
                                                                const Operands& operands,
                                                                void* stream) {
  const auto& launch = plan.As<LaunchParams>();
  Params params = launch.kernel;
  params.filter = operands.rhs;
  CUtensorMap gathered, second, out;
  const int first = params.axis[2].pad & 1;
  JAXCONV_RETURN_IF_ERROR(EncodeGathered(kType, params, operands.lhs, 2, first, &gathered));
  JAXCONV_RETURN_IF_ERROR(EncodeGathered(kType, params, operands.lhs, 2, first ^ 1, &second));
  JAXCONV_RETURN_IF_ERROR(
      EncodeWalked(kType, params, operands.out, params.axis[1].tile, params.axis[2].tile, &out));
  return jaxconv::Launch<RunsKernel<Tag>>(plan.kernel->name,
                                          RunConfig(launch, kThreads, /*overlaps=*/true), stream,
                                          params, gathered, second, out);
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_RUNS_SM90_CUH_
