// block_diagonal, wgrad: groups of 2 to 32 channels on the tensor cores (sm_80), 16-bit operands.
//
//     dw[tap][c, k] = sum over positions of x[position under the tap, c] dy[position, k]
//
// for the kBlock = 16 or 32 neighbouring channels of a block, whose products of unlike groups are not
// stored. A is x transposed, B dy, both by ldmatrix.trans from pixels of 128 bytes (tile.cuh).
//
// Warp w has 16 channels c, the kBlock channels k of their block, and every second 16 positions of the
// tile; the sums of kRows x kColumns taps stay in registers (3x3: 72, of kBlock 32 144):
//
//     stage 0: x box | dy tile | stage 1: x box | dy tile | a pixel of zeros
//
// Positions outside of the output read that pixel for both operands, so that no Inf of x meets a zero.
// Of 16 positions: kBlock / 16 ldmatrix of dy, then for each tap one of x and kBlock / 8 products.
//
// A CTA has 64 channels and walks tiles slice, slice + slices, ...; two barriers a tile. At the end the
// two warps of equal channels are added in order through shared memory, and the slices' sums by
// common/splitk_reduce.cuh: the same bits in every run. Filters of other sizes take kColumns taps of a
// filter row at a time, each part by CTAs of its own.
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
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::block_diagonal {

// kRows x kColumns: taps of a CTA. Of kRows 1 filters of any size are cut into parts.
template <Op kOp, DType kType, int kBlock_, int kRows_, int kColumns_, int kCtasPerSm_>
struct Wgrad {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kBlock = kBlock_, kRows = kRows_, kColumns = kColumns_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr int kBlocksN = kBlock / 8;
  // Warps side by side, of 16 channels each; two strips.
  static constexpr int kWarpsOfStrip = kChannels / 16, kStrips = kWarps / kWarpsOfStrip;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// Begins to copy a tile of dy, zeros where it has no pixel.
template <typename T>
__device__ __forceinline__ void FillWalked(const Params& params, const TilePlace& tile,
                                           unsigned char* stage) {
  using P = SwizzledPixel;
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const int chunk = threadIdx.x % P::kChunks;
  const int32_t channel = tile.first_channel + chunk * P::kChunkChannels;
  const T* plane = static_cast<const T*>(params.walked) +
                   (int64_t{tile.image} * params.axis[0].out + tile.depth) * rows.out *
                       columns.out * params.channels;
  for (int32_t i = threadIdx.x / P::kChunks; i < params.tile_pixels; i += kThreads / P::kChunks) {
    int32_t row, column;
    params.tile_columns.Divmod(i, &row, &column);
    row += tile.row, column += tile.column;
    const bool valid = row < rows.out && column < columns.out && channel < params.channels;
    const int64_t at = (int64_t{row} * columns.out + column) * params.channels + channel;
    CopyAsync<16>(SharedAddress(stage + P::Offset(i, chunk)), plane + (valid ? at : 0), valid);
  }
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    WgradKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  constexpr int kRows = Tag::kRows, kColumns = Tag::kColumns, kBlocksN = Tag::kBlocksN;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const int lane = threadIdx.x % 32, strip = threadIdx.x / 32 / Tag::kWarpsOfStrip;
  const int sixteen = threadIdx.x / 32 % Tag::kWarpsOfStrip;  // of the tile's channels c
  const int32_t walked_bytes = rows.box * columns.box * SwizzledPixel::kBytes;

  // The CTA's slice, taps, filter of the batch and channels.
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
    TilePlace tile(params, item, kChannels);
    tile.first_channel = channel_tile * kChannels;
    tile.image += filter * params.images;
    return tile;
  };
  auto fill = [&](int32_t item, int stage) {
    if (item < params.items) {
      const TilePlace tile = place(item);
      unsigned char* to = dynamic + stage * params.stage_bytes;
      FillBox<T, SwizzledPixel>(params, tile, step, 0, rows.box, to);
      FillWalked<T>(params, tile, to + walked_bytes);
    }
    CopyAsyncCommit();
  };
  if (threadIdx.x < SwizzledPixel::kChunks) {
    StoreChunk(SharedAddress(dynamic) + 2 * params.stage_bytes + threadIdx.x * 16, {0, 0, 0, 0});
  }

  // ldmatrix.trans: lanes 0-7 and 8-15 give eight positions' rows of two chunks, 16-31 the next eight
  // positions'; of dy, whose chunks are columns of B, lanes 8-15 the next positions.
  const int x_position = lane % 8 + lane / 16 * 8, x_chunk = sixteen * 2 + lane / 8 % 2;
  const int y_position = lane % 16;
  const int y_chunk = sixteen * 2 / kBlocksN * kBlocksN + lane / 16;
  const int32_t blocks = (params.tile_pixels + 15) / 16;
  float sums[kRows * kColumns][kBlocksN][4] = {};
  int32_t item = slice;
  fill(item, 0);
  for (int stage = 0; item < params.items; stage ^= 1, item += params.slices) {
    fill(item + params.slices, stage ^ 1);
    CopyAsyncWait<1>();
    __syncthreads();
    const TilePlace tile = place(item);
    const uint32_t box = SharedAddress(dynamic) + stage * params.stage_bytes;
    const uint32_t zeros = SharedAddress(dynamic) + 2 * params.stage_bytes;
#pragma unroll 1
    for (int32_t b = strip; b < blocks; b += Tag::kStrips) {
      // Where the lane's position of either operand lies; false outside of the output.
      auto locate = [&](int32_t position, int32_t* row, int32_t* column) {
        params.tile_columns.Divmod(position, row, column);
        return position < params.tile_pixels && tile.row + *row < rows.out &&
               tile.column + *column < columns.out;
      };
      int32_t row, column;
      const bool y_inside = locate(b * 16 + y_position, &row, &column);
      uint32_t y[kBlocksN * 2];
#pragma unroll
      for (int nb = 0; nb < kBlocksN; nb += 2) {
        const int chunk = y_chunk + nb;
        const uint32_t at = box + walked_bytes + SwizzledPixel::Offset(b * 16 + y_position, chunk);
        LoadMatricesTransposed(y_inside ? at : zeros + chunk * 16,
                               reinterpret_cast<uint32_t (&)[4]>(y[nb * 2]));
      }
      const bool x_inside = locate(b * 16 + x_position, &row, &column);
      const int32_t base = BoxPixel(params, row, column) + first_tap * columns.dilation;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int s = 0; s < kColumns; ++s) {
          if (kRows == 1 && first_tap + s >= columns.taps) break;
          const int32_t pixel = base + r * rows.dilation * columns.box + s * columns.dilation;
          uint32_t x[4];
          LoadMatricesTransposed(
              x_inside ? box + SwizzledPixel::Offset(pixel, x_chunk) : zeros + x_chunk * 16, x);
#pragma unroll
          for (int nb = 0; nb < kBlocksN; ++nb) {
            MultiplyAdd<T>(sums[r * kColumns + s][nb], x, y[nb * 2], y[nb * 2 + 1]);
          }
        }
      }
    }
    // The next pass fills this stage.
    __syncthreads();
  }

  // The second strip's sums, [warp of the strip][tap][n][lane], are added to the first's.
  CopyAsyncWait<0>();
  constexpr int kTaps = kRows * kColumns;
  const uint32_t exchange = SharedAddress(dynamic) + (sixteen * kTaps * kBlocksN * 32 + lane) * 16;
  if (strip == 1) {
#pragma unroll
    for (int i = 0; i < kTaps * kBlocksN; ++i) {
      StoreShared(exchange + i * 512, sums[i / kBlocksN][i % kBlocksN]);
    }
  }
  __syncthreads();
  if (strip == 1) return;
  const int32_t first = channel_tile * kChannels, group = params.group;
  const int32_t first_k = first + sixteen * 16 / Tag::kBlock * Tag::kBlock;
  const int32_t before = (step.depth_tap * rows.taps + step.row_tap) * columns.taps + first_tap;
  const int32_t all_taps = params.axis[0].taps * rows.taps * columns.taps;
  float* out = static_cast<float*>(params.out) +
               (int64_t{slice} * params.filters + filter) * all_taps * group * params.channels;
#pragma unroll
  for (int i = 0; i < kTaps * kBlocksN; ++i) {
    const int tap = i / kBlocksN, nb = i % kBlocksN;
    float other[4];
    LoadShared<0>(exchange + i * 512, other);
    if (kRows == 1 && first_tap + tap >= columns.taps) continue;
    const int32_t at_tap = before + tap / kColumns * columns.taps + tap % kColumns;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t c = first + sixteen * 16 + lane / 4 + e / 2 * 8;
      const int32_t k = first_k + nb * 8 + lane % 4 * 2 + e % 2;
      if (c >= params.channels || k >= params.channels || c / group != k / group) continue;
      out[(int64_t{at_tap} * group + c % group) * params.channels + k] =
          sums[tap][nb][e] + other[e];
    }
  }
}

template <Op kOp, DType kType, int kBlock_, int kRows_, int kColumns_, int kCtasPerSm_>
template <class Tag>
Status Wgrad<kOp, kType, kBlock_, kRows_, kColumns_, kCtasPerSm_>::Launch(const Plan& plan,
                                                                          const Operands& operands,
                                                                          void* stream) {
  return LaunchHaloWgrad<Params, WgradKernel<Tag>, Epilogue>(plan, operands, stream);
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_WGRAD_CUH_
