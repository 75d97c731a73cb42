// block_diagonal, dgrad of 3x3 filters with stride 2 (sm_90a), by the phases of dx's rows and
// columns. As in runs_sm90.cuh, a pixel of dy is read from shared memory once for all filter rows.
//
// Rows 2m and 2m + 1 of dx together need rows i = m - pad / 2 and i + 1 of dy under three taps, two
// of which belong to one of them; `pad` is the padding of the gathered tensor:
//
//     pad odd:   dx[2m]     = dy[i] F1
//                dx[2m + 1] = dy[i] F0 + dy[i + 1] F2
//     pad even:  dx[2m]     = dy[i] F0 + dy[i + 1] F2
//                dx[2m + 1] = dy[i + 1] F1
//
// and likewise for columns. There are no products with the zeros between dy's pixels.
//
// A run is one column of kRows rows m. From one ldmatrix of row y of dy, the three taps of a filter
// column add to the rows 2y and 2y + 1 and to one of the rows of y - 1. A warp has 16 channels and
// 16 runs: first the columns of dx with filter columns 0 and 2, then those with filter column 1; 16
// kRows sums in each lane.
//
//     stage 0: box | stage 1: box | tile of dx | filter (runs_sm90.cuh) | barriers
//
// Boxes, results and the filter are copied as in runs_sm90.cuh, but the results have separate
// memory.
//
// Refused, with a reason (runs_plan.cc): other filters and strides, and what runs_sm90.cuh refuses.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_PHASES_SM90_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_PHASES_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/block_diagonal/params.h"
#include "cuda/block_diagonal/run_loads_sm90.cuh"
#include "cuda/block_diagonal/run_maps_sm90.cuh"
#include "cuda/block_diagonal/runs_sm90.cuh"
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

// kBlock: channels of a block. kRows: rows of dy in a run. kThreeTf32: float32 as three products.
template <Op kOp_, DType kType_, int kBlock_, int kRows_, int kCtasPerSm_, bool kThreeTf32_ = false>
struct Phases : Runs<kOp_, kType_, kBlock_, kRows_, kCtasPerSm_, /*kStride=*/2, kThreeTf32_> {
  static_assert(kOp_ == Op::kDgrad);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// Whether filter row r belongs to the phase of the odd rows of dx; and the row of dy that it
// multiplies for a row of a phase: the one with the same index or the next.
template <bool kOddPad>
__device__ constexpr int PhaseOf(int r) {
  return (r == 1) != kOddPad;
}
template <bool kOddPad>
__device__ constexpr int RowOf(int r) {
  return r == 2 || (r == 1 && !kOddPad);
}

// Adds the taps of one filter column to both phases of the rows. box, filter: as in AddColumn.
template <class Tag, bool kOddPad>
__device__ __forceinline__ void AddPhases(uint32_t box, int32_t row_bytes, uint32_t filter,
                                          float (&sums)[2][Tag::kRows][Tag::kBlocksN][4]) {
  constexpr int kSteps = Tag::kSteps, kRows = Tag::kRows, kBlocksN = Tag::kBlocksN;
  uint32_t b[3][kSteps][2 * kBlocksN];
#pragma unroll
  for (int r = 0; r < 3; ++r) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t taps = filter + r * 3 * Tag::kTapBytes;
      if constexpr (Tag::kElements) {
        LoadPair(taps + Tag::Filter::OfWord(2 * k), &b[r][k][0], &b[r][k][1]);
      } else {
        LoadMatrices(taps ^ k * 32, b[r][k]);
      }
    }
  }
#pragma unroll
  for (int y = 0; y < kRows + 1; ++y, box += row_bytes) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t a[4];
      LoadMatrices(box ^ k * 32, a);
#pragma unroll
      for (int r = 0; r < 3; ++r) {
        const int phase = PhaseOf<kOddPad>(r), row = y - RowOf<kOddPad>(r);
        if (row < 0 || row >= kRows) continue;
#pragma unroll
        for (int n = 0; n < kBlocksN; ++n) {
          MultiplyAdd<typename Tag::T>(sums[phase][row][n], a, b[r][k][2 * n], b[r][k][2 * n + 1]);
        }
      }
    }
  }
}

// AddPhases with three TF32 products, for one step of gathered channels. A run of the reduction is
// the filter rows of a phase. Returns a bit for each row of a phase whose run has a sum that is not
// finite.
template <class Tag, bool kOddPad>
__device__ __forceinline__ uint32_t AddPhasesSplit(uint32_t box, int32_t row_bytes, uint32_t filter,
                                                   float (&sums)[2][Tag::kRows][1][4]) {
  constexpr int kRows = Tag::kRows, kTwo = PhaseOf<kOddPad>(0), kOne = 1 - kTwo;
  SplitWords<2, 1, 2> b_two;
  SplitWords<1, 1, 2> b_one;
#pragma unroll
  for (int r = 0; r < 3; ++r) {
    uint32_t words[2];
    LoadPair(filter + r * 3 * Tag::kTapBytes, &words[0], &words[1]);
    if (r == 1) {
      b_one.template Split<false>(0, 0, words);
    } else {
      b_two.template Split<false>(r / 2, 0, words);
    }
  }
  uint32_t left = 0;
  SplitWords<2, 1, 4> a;  // of the last two rows of dy
#pragma unroll
  for (int y = 0; y < kRows + 1; ++y, box += row_bytes) {
    if (y > 0) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a.big[0][0][e] = a.big[1][0][e], a.small[0][0][e] = a.small[1][0][e];
      }
    }
    uint32_t words[4];
    LoadMatrices(box, words);
    a.template Split<false>(1, 0, words);
    if (y > 0)
      left |= uint32_t{MultiplySplit(a, b_two, sums[kTwo][y - 1])} << (kTwo * kRows + y - 1);
    const int row = y - RowOf<kOddPad>(1);
    if (row < 0 || row >= kRows) continue;
    SplitWords<1, 1, 4> last;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      last.big[0][0][e] = a.big[1][0][e], last.small[0][0][e] = a.small[1][0][e];
    }
    left |= uint32_t{MultiplySplit(last, b_one, sums[kOne][row])} << (kOne * kRows + row);
  }
  return left;
}

// Computes the rows in `left` again, with operands of any value, for column taps first_s, first_s +
// 2, ... under(s): `box` of AddPhases for tap s. filter: the lane's words of tap (0, 0).
template <class Tag, class Under>
__device__ __forceinline__ void AddPhasesWithCare(uint32_t left, const Under& under, int first_s,
                                                  bool odd_pad, int32_t row_bytes, uint32_t filter,
                                                  float (&sums)[2][Tag::kRows][1][4]) {
  constexpr int kRows = Tag::kRows;
#pragma unroll 1
  for (int i = 0; i < 2 * kRows; ++i) {
    float sum[1][1][4] = {};
#pragma unroll 1
    for (int s = first_s; s < 3; s += 2) {
#pragma unroll 1
      for (int r = 0; r < 3; ++r) {
        if ((odd_pad ? PhaseOf<true>(r) : PhaseOf<false>(r)) != i / kRows) continue;
        const int row = i % kRows + (odd_pad ? RowOf<true>(r) : RowOf<false>(r));
        const uint32_t box = under(s) + row * row_bytes;
#pragma unroll 1
        for (int k = 0; k < Tag::kSteps; ++k) {
          PromoteWithCare<1>(1, sum, [&](int, auto& a, auto& b) {
            LoadMatrices(box ^ k * 32, a[0]);
            LoadPair(filter + (r * 3 + s) * Tag::kTapBytes + Tag::Filter::OfWord(2 * k), &b[0][0],
                     &b[0][1]);
          });
        }
      }
    }
    TakeTurn(left >> i & 1, sum[0][0], reinterpret_cast<float (&)[2 * kRows][1][4]>(sums));
  }
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    PhasesKernel(const __grid_constant__ Params params,
                 const __grid_constant__ CUtensorMap gathered_map,
                 const __grid_constant__ CUtensorMap out_map) {
  constexpr int kRows = Tag::kRows;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const int lane = threadIdx.x % 32, warp = UniformWarp();
  constexpr int kSlots = kTileBytes / 32;
  const int slot = warp % kSlots, strip = warp / kSlots;
  const uint32_t stages = SharedAddress(dynamic), results = stages + 2 * params.stage_bytes;
  const uint32_t filter = results + params.result_bytes, barriers = filter + Tag::kFilterBytes;
  const Cursor range(params);

  auto load = [&](int32_t item, uint32_t stage) {
    const TilePlace tile(params, item, Tag::kChannels);
    const uint32_t barrier = barriers + stage * 8;
    BarrierArriveExpect(barrier, params.box_pixels * kRunPixelBytes);
    CopyTile4d(stages + stage * params.stage_bytes, &gathered_map, barrier, tile.first_channel,
               tile.column - (columns.pad >> 1), tile.row - (rows.pad >> 1), tile.image);
  };
  LoadFirstBoxes(barriers, range, load);
  HeldFilter<Tag> held(params, filter, range.item);

  // The lane's run. Missing runs read the pixels of another run, and are stored after the tile.
  const int32_t groups = static_cast<int32_t>(params.run_groups.divisor);
  const int32_t run = strip * 16 + lane % 16, runs = params.tile_images * groups * columns.tile;
  int32_t piece, column, image, group;
  params.tile_columns.Divmod(min(run, runs - 1), &piece, &column);
  params.run_groups.Divmod(piece, &image, &group);
  const int32_t first_row = group * kRows;
  const int32_t box_pixel = (image * rows.box + first_row) * columns.box + column;
  const bool exists = run < runs;
  const int32_t out_pixel = exists
                                ? ((image * rows.tile + first_row) * columns.tile * 2 + column) * 2
                                : params.tile_pixels;
  const int32_t out_step = exists ? columns.tile * 2 : 0;
  const int32_t row_bytes = ComputedHere(columns.box * kRunPixelBytes);
  const int first_chunk = slot / Tag::kSteps * Tag::kSteps * 2;
  const int out_chunk = slot * 2 + lane / 16, box_chunk = first_chunk + lane / 16;
  const int b_row = slot % Tag::kSteps * 16 + lane / 16 * 8 + lane % 8;
  const int b_chunk = first_chunk + lane / 8 % 2;
  const uint32_t b = Tag::kElements
                         ? filter + slot * 9 * Tag::kTapBytes + Tag::Filter::OfLane(lane)
                         : filter + b_row * kRunPixelBytes + ((b_chunk ^ (b_row & 7)) << 4);
  const bool odd_rows = (rows.pad & 1) != 0;
  const int odd_columns = columns.pad & 1;
  held.Wait();

  uint32_t stage = 0, parity = 0;
  for (int32_t item = range.item; item < range.end; ++item) {
    held.Exchange(item);
    const uint32_t box = stages + stage * params.stage_bytes;
    BarrierWait(barriers + stage * 8, parity);
#pragma unroll 1
    for (int single = 0; single < 2; ++single) {
      float sums[2][kRows][Tag::kBlocksN][4] = {};
      // The lane's pixel and chunk under a column tap.
      auto under = [&](int s) {
        const int32_t pixel = box_pixel + (s == 1 ? 1 - odd_columns : s >> 1);
        return box + pixel * kRunPixelBytes + ((box_chunk ^ (pixel & 7)) << 4);
      };
      uint32_t left = 0;
#pragma unroll 1
      for (int s = single; s < 3; s += 2) {
        const uint32_t from = under(s), taps = b + s * Tag::kTapBytes;
        if constexpr (Tag::kThreeTf32) {
#pragma unroll 1
          for (int k = 0; k < Tag::kSteps; ++k) {
            const uint32_t words = taps + Tag::Filter::OfWord(2 * k);
            left |= odd_rows ? AddPhasesSplit<Tag, true>(from ^ k * 32, row_bytes, words, sums)
                             : AddPhasesSplit<Tag, false>(from ^ k * 32, row_bytes, words, sums);
          }
        } else if (odd_rows) {
          AddPhases<Tag, true>(from, row_bytes, taps, sums);
        } else {
          AddPhases<Tag, false>(from, row_bytes, taps, sums);
        }
      }
      if constexpr (Tag::kThreeTf32) {
        if (__any_sync(0xffffffff, left != 0)) {
          AddPhasesWithCare<Tag>(left, under, single, odd_rows, row_bytes, b, sums);
        }
      }
      if (single == 0) {
        // The results of the last tile have been read by their store.
        if (warp == 0 && ElectOne()) WaitForStoresToRead();
        __syncthreads();
      }
      int32_t pixel = ComputedHere(out_pixel) + (exists ? odd_columns ^ single : 0);
#pragma unroll
      for (int y = 0; y < 2 * kRows; ++y, pixel += out_step) {
        StoreRun<Tag>(results + pixel * kRunPixelBytes + ((out_chunk ^ (pixel & 7)) << 4),
                      sums[y % 2][y / 2]);
      }
    }
    FenceForCopies();
    __syncthreads();
    if (warp == 0) {
      if (ElectOne()) {
        const TilePlace tile(params, item, Tag::kChannels);
        StoreTile4d(&out_map, results, tile.first_channel, tile.column * 2, tile.row * 2,
                    tile.image);
        CommitStores();
        if (item + 2 < range.end) load(item + 2, stage);
      }
      __syncwarp();
    }
    parity ^= stage;
    stage ^= 1;
  }
  if (warp == 0 && ElectOne()) WaitForStoresToRead();
}

template <Op kOp_, DType kType_, int kBlock_, int kRows_, int kCtasPerSm_, bool kThreeTf32_>
template <class Tag>
Status Phases<kOp_, kType_, kBlock_, kRows_, kCtasPerSm_, kThreeTf32_>::Launch(
    const Plan& plan, const Operands& operands, void* stream) {
  const auto& launch = plan.As<LaunchParams>();
  Params params = launch.kernel;
  params.filter = operands.rhs;
  CUtensorMap gathered, out;
  JAXCONV_RETURN_IF_ERROR(EncodeGathered(kType_, params, operands.lhs, /*step=*/1, /*first=*/0,
                                         &gathered, kThreeTf32_));
  JAXCONV_RETURN_IF_ERROR(EncodeWalked(kType_, params, operands.out, params.axis[1].tile * 2,
                                       params.axis[2].tile * 2, &out, /*whole_f32=*/true));
  return jaxconv::Launch<PhasesKernel<Tag>>(plan.kernel->name,
                                            RunConfig(launch, kThreads, /*overlaps=*/true), stream,
                                            params, gathered, out);
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_PHASES_SM90_CUH_
