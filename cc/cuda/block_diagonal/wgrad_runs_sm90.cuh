// block_diagonal, wgrad of 3x3 filters without strides (sm_90a): the products of wgrad.cuh. As in
// runs_sm90.cuh, a pixel is read from shared memory once for the three filter rows.
//
// A run is one column of kRows output rows; 16 runs are the reduction of a product. Row y of the
// box of x, under column tap s, is multiplied by the rows y, y - 1, y - 2 of dy, which a warp keeps
// in registers:
//
//     for y = 0 ... kRows + 1:  dy of row y                     kBlock / 16 ldmatrix
//       for s:  x of row y under s                              1 ldmatrix
//         for r:  dw[r, s] += x dy[y - r]                       kBlock / 8 products
//
// Tile: 32 runs and 64 channels. Warp w has 16 channels c, the kBlock channels k of their block,
// and 16 of the runs, with the sums of nine taps: 72 in each lane, or 144 with kBlock 32. A third
// warpgroup requests boxes, and gives its registers to the others:
//
//     stages 0, 1, 2: dy box | x box | 8 pixels of zeros || a pixel of zeros | barriers
//
// float32: a tile has 32 channels, two warps have 16 each, and a warp has 8 of the runs. x and dy
// are read as pairs of words (wgrad.cuh, LoadElements), which TMA has rounded to TF32.
//
// Missing runs read zeros in both tensors, and missing rows are skipped, so that no Inf in x is
// multiplied by zero. A tile with fewer rows processes them one by one.
//
// For slices and the final sums see wgrad.cuh.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_WGRAD_RUNS_SM90_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_WGRAD_RUNS_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/block_diagonal/params.h"
#include "cuda/block_diagonal/run_maps_sm90.cuh"
#include "cuda/block_diagonal/tile.cuh"
#include "cuda/block_diagonal/wgrad.cuh"
#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/split_tf32.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"

namespace jaxconv::block_diagonal {

// kBlock: channels of a block. kRunRows: output rows of a run. kThreeTf32: float32 as three
// products.
template <Op kOp, DType kType_, int kBlock_, int kRunRows_, bool kThreeTf32_ = false>
struct WgradRuns {
  using T = typename ElementOf<kType_>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kChannels = TileChannels(sizeof(T));
  static constexpr DType kType = kType_;
  static constexpr int kBlock = kBlock_, kRunRows = kRunRows_, kRows = 3, kColumns = 3;
  static constexpr bool kThreeTf32 = kThreeTf32_;
  static constexpr int kBlocksN = kBlock / 8;
  // Warps side by side with 16 channels each. A product reduces 32 bytes of runs; with 32-bit
  // elements a lane reads two runs (LoadElements).
  static constexpr int kWarpsOfStrip = kChannels / 16, kStrips = kWarps / kWarpsOfStrip;
  static constexpr int kReads = sizeof(T) == 4 ? 2 : 1;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// A lane's addresses: x under the three column taps, and dy; and the distances between rows.
template <int kReads>
struct RunPlace {
  uint32_t x[3][kReads], y[kReads];
  int32_t x_step[kReads], y_step[kReads];

  // Loads x under column tap s, `rows` rows further.
  __device__ __forceinline__ void LoadGathered(int s, int rows, uint32_t (&words)[4]) const {
    if constexpr (kReads == 2) {
      LoadElements(x[s][0] + rows * x_step[0], x[s][1] + rows * x_step[1], words);
    } else {
      LoadMatricesTransposed(x[s][0] + rows * x_step[0], words);
    }
  }
  // Loads dy, `rows` rows further.
  template <int kBlocksN>
  __device__ __forceinline__ void LoadWalked(int rows, uint32_t (&words)[kBlocksN][2]) const {
#pragma unroll
    for (int nb = 0; nb < kBlocksN; nb += 2) {
      if constexpr (kReads == 2) {
        uint32_t both[4];
        LoadElements((y[0] ^ nb * 32) + rows * y_step[0], (y[1] ^ nb * 32) + rows * y_step[1],
                     both);
        words[nb][0] = both[0], words[nb + 1][0] = both[1];
        words[nb][1] = both[2], words[nb + 1][1] = both[3];
      } else {
        LoadMatricesTransposed((y[0] ^ nb * 16) + rows * y_step[0],
                               reinterpret_cast<uint32_t (&)[4]>(words[nb]));
      }
    }
  }
  __device__ __forceinline__ void NextOfX(int s) {
#pragma unroll
    for (int i = 0; i < kReads; ++i) x[s][i] += x_step[i];
  }
  __device__ __forceinline__ void NextOfY() {
#pragma unroll
    for (int i = 0; i < kReads; ++i) y[i] += y_step[i];
  }
};

// Adds the products of a strip's runs.
template <class Tag>
__device__ __forceinline__ void AddRuns(RunPlace<Tag::kReads> at,
                                        float (&sums)[9][Tag::kBlocksN][4]) {
  constexpr int kRows = Tag::kRunRows;
  uint32_t walked[3][Tag::kBlocksN][2];
#pragma unroll
  for (int y = 0; y < kRows + 2; ++y) {
    if (y < kRows) at.LoadWalked(0, walked[y % 3]);
    at.NextOfY();
#pragma unroll
    for (int s = 0; s < 3; ++s) {
      uint32_t x[4];
      at.LoadGathered(s, 0, x);
      at.NextOfX(s);
#pragma unroll
      for (int r = 0; r < 3; ++r) {
        if (y - r < 0 || y - r >= kRows) continue;
        const auto& b = walked[(y - r) % 3];
#pragma unroll
        for (int nb = 0; nb < Tag::kBlocksN; ++nb) {
          MultiplyAdd<typename Tag::T>(sums[r * 3 + s][nb], x, b[nb][0], b[nb][1]);
        }
      }
    }
  }
}
// The same for the first rows.
template <class Tag>
__device__ __forceinline__ void AddRows(RunPlace<Tag::kReads> at, int32_t rows,
                                        float (&sums)[9][Tag::kBlocksN][4]) {
#pragma unroll 1
  for (; rows > 0; --rows) {
    uint32_t walked[Tag::kBlocksN][2];
    at.LoadWalked(0, walked);
    at.NextOfY();
#pragma unroll
    for (int s = 0; s < 3; ++s) {
#pragma unroll
      for (int r = 0; r < 3; ++r) {
        uint32_t x[4];
        at.LoadGathered(s, r, x);
#pragma unroll
        for (int nb = 0; nb < Tag::kBlocksN; ++nb) {
          MultiplyAdd<typename Tag::T>(sums[r * 3 + s][nb], x, walked[nb][0], walked[nb][1]);
        }
      }
      at.NextOfX(s);
    }
  }
}

// Adds the products of one row for the taps in `taps`, one bit each, with operands of any value, as
// three TF32 products (common/split_tf32.cuh).
template <class Tag>
__device__ __forceinline__ void AddRowWithCare(const RunPlace<Tag::kReads>& at, int32_t row,
                                               uint32_t taps, float (&sums)[9][Tag::kBlocksN][4]) {
  Unroll<9>([&](auto constant) {
    constexpr int tap = decltype(constant)::value;
    if (!__any_sync(0xffffffff, taps >> tap & 1)) return;
    auto& of_tap = reinterpret_cast<float (&)[1][Tag::kBlocksN][4]>(sums[tap]);
    PromoteWithCare<1>(taps >> tap & 1, of_tap, [&](int, auto& x, auto& walked) {
      at.LoadGathered(tap % 3, row + tap / 3, x[0]);
      at.LoadWalked(row, walked);
    });
  });
}

// AddRuns with three TF32 products. A run of the reduction is two rows of dy at one filter
// position. Their split words stay in registers with those of the last two rows of x: 48 and 32
// registers in addition to the sums.
template <class Tag>
__device__ __forceinline__ void AddRunsSplit(const RunPlace<Tag::kReads>& at,
                                             float (&sums)[9][Tag::kBlocksN][4]) {
  constexpr int kRows = Tag::kRunRows, kBlocksN = Tag::kBlocksN;
  static_assert((kRows + 1) / 2 * 9 <= 64);
  uint64_t left = 0;                     // nine taps for each pair of rows
  SplitWords<1, kBlocksN, 2> walked[4];  // of row y at y % 4
  SplitWords<1, 1, 4> x[2][3];           // of row y at y % 2
#pragma unroll
  for (int y = 0; y < kRows + 2; ++y) {
    if (y < kRows) {
      uint32_t words[kBlocksN][2];
      at.LoadWalked(y, words);
#pragma unroll
      for (int nb = 0; nb < kBlocksN; ++nb) walked[y % 4].template Split<false>(0, nb, words[nb]);
    }
#pragma unroll
    for (int s = 0; s < 3; ++s) {
      uint32_t words[4];
      at.LoadGathered(s, y, words);
      x[y % 2][s].template Split<false>(0, 0, words);
#pragma unroll
      for (int r = 0; r < 3; ++r) {
        const int row = y - r, tap = r * 3 + s;
        if (row < 0 || row >= kRows) continue;
        bool not_finite = false;
        if (row % 2 == 1) {
          const SplitWords<2, 1, 4> both_x(x[(y + 1) % 2][s], x[y % 2][s]);
          const SplitWords<2, kBlocksN, 2> both_walked(walked[(row + 3) % 4], walked[row % 4]);
          not_finite = MultiplySplit(both_x, both_walked, sums[tap]);
        } else if (row + 1 == kRows) {
          not_finite = MultiplySplit(x[y % 2][s], walked[row % 4], sums[tap]);
        } else {
          continue;
        }
        left |= uint64_t{not_finite} << (row / 2 * 9 + tap);
      }
    }
  }
  if (__any_sync(0xffffffff, left != 0)) {
#pragma unroll 1
    for (int row = 0; row < kRows; ++row) {
      AddRowWithCare<Tag>(at, row, static_cast<uint32_t>(left >> (row / 2 * 9)) & 0x1ff, sums);
    }
  }
}

// The same for a single row.
template <class Tag>
__device__ __forceinline__ void AddRowSplit(const RunPlace<Tag::kReads>& at, int32_t row,
                                            float (&sums)[9][Tag::kBlocksN][4]) {
  constexpr int kBlocksN = Tag::kBlocksN;
  uint32_t words[kBlocksN][2], left = 0;
  SplitWords<1, kBlocksN, 2> walked;
  at.LoadWalked(row, words);
#pragma unroll
  for (int nb = 0; nb < kBlocksN; ++nb) walked.template Split<false>(0, nb, words[nb]);
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    uint32_t of_x[4];
    SplitWords<1, 1, 4> x;
    at.LoadGathered(tap % 3, row + tap / 3, of_x);
    x.template Split<false>(0, 0, of_x);
    left |= uint32_t{MultiplySplit(x, walked, sums[tap])} << tap;
  }
  if (__any_sync(0xffffffff, left != 0)) AddRowWithCare<Tag>(at, row, left, sums);
}

template <class Tag>
__global__ void __launch_bounds__(kRunThreads, 1)
    WgradRunsKernel(const __grid_constant__ Params params,
                    const __grid_constant__ CUtensorMap gathered_map,
                    const __grid_constant__ CUtensorMap walked_map) {
  constexpr int kBlocksN = Tag::kBlocksN;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const int lane = threadIdx.x % 32, warp = UniformWarp();
  const int strip = warp / Tag::kWarpsOfStrip, sixteen = warp % Tag::kWarpsOfStrip;
  const uint32_t stages = SharedAddress(dynamic);
  const uint32_t zeros = stages + kRunStages * params.stage_bytes;
  const uint32_t full = zeros + kRunPixelBytes, empty = full + kRunStages * 8;
  const int32_t box_bytes = params.box_pixels * kRunPixelBytes;
  const int32_t walked_bytes = params.tile_pixels * kRunPixelBytes;

  int32_t rest = blockIdx.x, filter, channel_tile;
  const int32_t slice = rest % params.slices;
  rest /= params.slices;
  params.channel_tiles.Divmod(rest, &filter, &channel_tile);
  const int32_t first_image = filter * params.images, first_channel = channel_tile * Tag::kChannels;

  // After a box, the padding that its last row would share with a next row.
  for (int32_t i = threadIdx.x; i < (kRunStages + 1) * kRunGuardPixels * 8; i += kRunThreads) {
    const int32_t stage = i / (kRunGuardPixels * 8), chunk = i % (kRunGuardPixels * 8);
    if (stage < kRunStages) {
      StoreChunk(stages + stage * params.stage_bytes + box_bytes + walked_bytes + chunk * 16,
                 {0, 0, 0, 0});
    } else if (chunk < 8) {
      StoreChunk(zeros + chunk * 16, {0, 0, 0, 0});
    }
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRunStages; ++i) {
      BarrierInit(full + i * 8, 1);
      BarrierInit(empty + i * 8, kWarps);
    }
    BarrierInitFence();
  }
  __syncthreads();

  RingPlace<kRunStages> stage;
  if (warp >= kWarps) {
    LowerRegisters<24>();
    if (warp == kWarps && ElectOne()) {
      for (int32_t item = slice; item < params.items; item += params.slices, stage.Next()) {
        const TilePlace tile(params, item, Tag::kChannels);
        const uint32_t to = stages + stage.slot * params.stage_bytes,
                       barrier = full + stage.slot * 8;
        BarrierWait(empty + stage.slot * 8, stage.parity ^ 1);
        BarrierArriveExpect(barrier, box_bytes + walked_bytes);
        // dy first, because the guard follows x.
        CopyTile4d(to, &walked_map, barrier, first_channel, tile.column, tile.row,
                   first_image + tile.image);
        CopyTile4d(to + walked_bytes, &gathered_map, barrier, first_channel,
                   tile.column - columns.pad, tile.row - rows.pad, first_image + tile.image);
      }
    }
    return;
  }
  RaiseRegisters<240>();
  float sums[9][kBlocksN][4] = {};
  {
    // As in wgrad.cuh: the lane's runs in x and dy, and their first byte in a pixel.
    constexpr int kReads = Tag::kReads;
    const int32_t groups = static_cast<int32_t>(params.run_groups.divisor);
    const int32_t runs = params.tile_images * groups * columns.tile;
    constexpr int kSixteenBytes = kRunPixelBytes / Tag::kWarpsOfStrip;
    const int of_lane = kReads == 2 ? lane / 4 * 8 : lane / 8 % 2 * 16;
    const int x_bytes = sixteen * kSixteenBytes + of_lane;
    const int y_bytes = sixteen * 16 / Tag::kBlock * (Tag::kBlock / 16) * kSixteenBytes +
                        (kReads == 2 ? of_lane : lane / 16 * 16);
    int32_t image[2], row[2], column[2];  // 16-bit elements: of x and of dy
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of_strip = kReads == 2 ? lane % 4 * 2 + i
                           : i == 0    ? lane % 8 + lane / 16 * 8
                                       : lane % 16;
      const int run = strip * (kTileRuns / Tag::kStrips) + of_strip;
      int32_t piece;
      params.tile_columns.Divmod(run, &piece, &column[i]);
      params.run_groups.Divmod(piece, &image[i], &row[i]);
      row[i] *= Tag::kRunRows;
      if (run >= runs) image[i] = INT16_MAX;
    }
    const int32_t x_row = columns.box * kRunPixelBytes;
    const int32_t y_row = params.walked_columns * kRunPixelBytes;
    // The swizzled address of a byte of a pixel, in rows of whole pixels.
    auto address = [](int32_t pixel, int bytes) {
      return static_cast<uint32_t>(pixel * kRunPixelBytes + (bytes ^ (pixel & 7) << 4));
    };
    for (int32_t item = slice; item < params.items; item += params.slices, stage.Next()) {
      const TilePlace tile(params, item, Tag::kChannels);
      const int32_t images_left = min(params.images - tile.image, params.tile_images);
      const int32_t columns_left = columns.out - tile.column;
      const uint32_t walked = stages + stage.slot * params.stage_bytes, box = walked + walked_bytes;
      RunPlace<kReads> place;
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int of_y = kReads == 2 ? i : 1;
        const bool has_x = image[i] < images_left && column[i] < columns_left;
        const bool has_y = image[of_y] < images_left && column[of_y] < columns_left;
        const int32_t x_pixel = (image[i] * rows.box + row[i]) * columns.box + column[i];
        const int32_t y_pixel =
            (image[of_y] * rows.tile + row[of_y]) * params.walked_columns + column[of_y];
#pragma unroll
        for (int s = 0; s < 3; ++s) {
          place.x[s][i] = has_x ? box + address(x_pixel + s, x_bytes) : zeros;
        }
        place.y[i] = has_y ? walked + address(y_pixel, y_bytes) : zeros;
        place.x_step[i] = has_x ? x_row : 0;
        place.y_step[i] = has_y ? y_row : 0;
      }
      BarrierWait(full + stage.slot * 8, stage.parity);
      // Tiles of several groups of rows have all of them.
      const int32_t rows_left = rows.out - tile.row;
      if constexpr (Tag::kThreeTf32) {
        if (rows_left >= Tag::kRunRows) {
          AddRunsSplit<Tag>(place, sums);
        } else {
#pragma unroll 1
          for (int32_t row = 0; row < rows_left; ++row) AddRowSplit<Tag>(place, row, sums);
        }
      } else if (rows_left >= Tag::kRunRows) {
        AddRuns<Tag>(place, sums);
      } else {
        AddRows<Tag>(place, rows_left, sums);
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(empty + stage.slot * 8);
    }
  }
  NamedBarrierSync(1, kThreads);

  AddStrips<Tag>(sums, stages, strip, sixteen, [] { NamedBarrierSync(1, kThreads); });
  StoreSums<Tag>(params, stages, slice, filter, first_channel, Step(), /*first_tap=*/0);
}

template <Op kOp, DType kType_, int kBlock_, int kRunRows_, bool kThreeTf32_>
template <class Tag>
Status WgradRuns<kOp, kType_, kBlock_, kRunRows_, kThreeTf32_>::Launch(const Plan& plan,
                                                                       const Operands& operands,
                                                                       void* stream) {
  const auto& launch = plan.As<LaunchParams>();
  Params params = launch.kernel;
  params.out = operands.workspace;
  BindEpilogue(operands, &params.epilogue);
  CUtensorMap gathered, walked;
  JAXCONV_RETURN_IF_ERROR(
      EncodeGathered(kType_, params, operands.lhs, /*step=*/1, /*first=*/0, &gathered, kThreeTf32));
  JAXCONV_RETURN_IF_ERROR(EncodeWalked(kType_, params, operands.rhs, params.axis[1].tile,
                                       params.walked_columns, &walked, kThreeTf32));
  JAXCONV_RETURN_IF_ERROR(jaxconv::Launch<WgradRunsKernel<Tag>>(
      plan.kernel->name, RunConfig(launch, kRunThreads, /*overlaps=*/false), stream, params,
      gathered, walked));
  return ReduceSlices<Epilogue>(static_cast<const float*>(operands.workspace), launch.out_elements,
                                plan.slices, params.channels, params.epilogue, operands.out,
                                launch.out_dtype, stream);
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_WGRAD_RUNS_SM90_CUH_
