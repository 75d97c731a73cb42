// block_diagonal, fprop and dgrad: groups of 2 to 32 channels on the tensor cores (sm_80), 16-bit
// operands.
//
// The groups of kBlock = 16 or 32 neighbouring channels are one product whose filter is block-diagonal:
//
//     out[pixel, 16 channels] += sum over taps of gathered[pixel under the tap, 16 channels] F[tap]
//
//            4 channels a group:    x x x x . . . . . . . . . . . .
//            F[tap] 16 x 16         . . . . x x x x . . . .          zeros multiply other groups'
//                                   . . . . . . . . x x x x ...      channels
//
// Zeros waste 3/4 of the products of groups of 4; the bound is memory all the same. dgrad is the same
// product of dy with the filter turned and transposed; a stride's zeros are made where dy's box is
// filled.
//
// Tile: up to 16 kBlocksM positions a strip, of any rows x columns, and 64 channels. Warp w has the block
// of channels w % (64 / kBlock) and the strip w / (64 / kBlock). A is ldmatrix of the box itself, whose
// pixels are rows of 128 bytes (halo_box.cuh); B lies in shared memory as mma.sync takes it, 16 bytes a
// lane, and is made when the channels change:
//
//     stage 0: box | stage 1: box | B [block][tap][fragment][lane]
//
// B's columns are permuted so that a lane ends with kBlock / 4 neighbouring channels of a pixel.
// Of a tap and 16 positions x 16 channels: 4 wavefronts of ldmatrix, 2 products, and 4 / kBlocksM
// wavefronts of B. 3x3, 8 x 28 positions: 2 x 38 KB of boxes, 18 KB of B, two CTAs an SM.
//
// The next item's box is copied while this one is multiplied; two barriers an item, a third where the
// channels change.
//
// Zeros of F meet the channels of other groups in the block: an Inf or NaN of x spreads to the outputs of
// its block of channels.
//
// Refused, with a reason (plan.cc): groups of unlike input and output channels, of sizes that do not
// divide 16 or 32, channels that are not multiples of 8, boxes beyond the shared memory.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_GATHER_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_GATHER_CUH_

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

// kBlock: channels of a block. kBlocksM: of 16 positions, of a warp.
template <Op kOp, DType kType, int kBlock_, int kBlocksM_, int kCtasPerSm_>
struct Gather {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kBlock = kBlock_, kBlocksM = kBlocksM_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kBlocks = kChannels / kBlock, kStrips = kWarps / kBlocks;
  static constexpr int kStepsK = kBlock / 16, kBlocksN = kBlock / 8;
  // 16-byte pieces of B that a lane has of a tap.
  static constexpr int kPieces = kStepsK * kBlocksN / 2;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// B of a tile's channels, all taps. Word `half` of step kk and columns nb of lane 4 g + t is the pair of
// gathered channels 16 kk + 8 half + 2 t, of the result's channel g / 2 * 2 kBlocksN + 2 nb + g % 2.
template <class Tag>
__device__ __forceinline__ void FillFilter(const Params& params, const TilePlace& tile,
                                           typename Tag::T* to) {
  using T = typename Tag::T;
  const int32_t taps = params.axis[0].taps * params.axis[1].taps * params.axis[2].taps;
  const T* filter = static_cast<const T*>(params.filter) +
                    params.images_divmod.Div(tile.image) * params.filter_stride;
  constexpr int kElements = Tag::kPieces * 32 * 8;  // of a block and tap
  for (int32_t i = threadIdx.x; i < Tag::kBlocks * taps * kElements; i += kThreads) {
    const int e = i % 2, word = i / 2 % 4, lane = i / 8 % 32, piece = i / 256 % Tag::kPieces;
    const int32_t line = i / kElements, tap = line % taps, block = line / taps;
    const int fragment = piece * 4 + word, half = fragment % 2;
    const int nb = fragment / 2 % Tag::kBlocksN, kk = fragment / 2 / Tag::kBlocksN;
    const int g = lane / 4, t = lane % 4;
    const int32_t first = tile.first_channel + block * Tag::kBlock;
    const int32_t from = first + kk * 16 + half * 8 + 2 * t + e;
    const int32_t channel = first + g / 2 * 2 * Tag::kBlocksN + nb * 2 + g % 2;
    const int32_t group = channel / params.group;
    const bool exists =
        channel < params.channels && from < params.channels && from / params.group == group;
    const int64_t at = (params.flip ? taps - 1 - tap : tap) * params.tap_stride +
                       group * params.group_stride +
                       (from - group * params.group) * params.reduction_stride +
                       (channel - group * params.group) * params.channel_stride;
    to[i] = exists ? filter[at] : FromFloat<T>(0);
  }
}

// Adds the taps of one depth tap. `box`: the stage. base: the lane's pixel of every 16 positions under
// the first tap. filter: the lane's piece of the block's first tap.
template <class Tag>
__device__ __forceinline__ void AddTaps(const Params& params, uint32_t box, uint32_t filter,
                                        int chunk, int blocks, const int32_t (&base)[Tag::kBlocksM],
                                        float (&sums)[Tag::kBlocksM][Tag::kBlocksN][4]) {
  using T = typename Tag::T;
  const Axis &rows = params.axis[1], &columns = params.axis[2];
#pragma unroll 1
  for (int32_t r = 0; r < rows.taps; ++r) {
    int32_t under = r * rows.dilation * columns.box;
#pragma unroll 1
    for (int32_t s = 0; s < columns.taps; ++s) {
      uint32_t b[Tag::kPieces * 4];
#pragma unroll
      for (int i = 0; i < Tag::kPieces; ++i) {
        const uint4 piece = LoadChunk(filter + i * 512);
        b[i * 4] = piece.x, b[i * 4 + 1] = piece.y, b[i * 4 + 2] = piece.z, b[i * 4 + 3] = piece.w;
      }
#pragma unroll
      for (int m = 0; m < Tag::kBlocksM; ++m) {
        if (m >= blocks) break;
        const int32_t pixel = base[m] + under;
#pragma unroll
        for (int kk = 0; kk < Tag::kStepsK; ++kk) {
          uint32_t a[4];
          LoadMatrices(box + SwizzledPixel::Offset(pixel, chunk + kk * 2), a);
#pragma unroll
          for (int nb = 0; nb < Tag::kBlocksN; ++nb) {
            const int at = (kk * Tag::kBlocksN + nb) * 2;
            MultiplyAdd<T>(sums[m][nb], a, b[at], b[at + 1]);
          }
        }
      }
      filter += Tag::kPieces * 512;
      under += columns.dilation;
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    GatherKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  using Epilogue = typename Tag::Epilogue;
  constexpr int kCount = 2 * Tag::kBlocksN;  // channels of a lane
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  unsigned char* const filter = dynamic + 2 * params.stage_bytes;
  const int lane = threadIdx.x % 32, block = threadIdx.x / 32 % Tag::kBlocks;
  const int strip = threadIdx.x / 32 / Tag::kBlocks;
  const int32_t taps_of_depth = rows.taps * columns.taps;
  const uint32_t filter_at = SharedAddress(filter) +
                             block * params.axis[0].taps * taps_of_depth * (Tag::kPieces * 512) +
                             lane * 16;
  const int chunk = block * (Tag::kBlock / 8) + lane / 16;
  const Epilogue epilogue(params.epilogue);

  // 16 positions each: strip, strip + kStrips, ...
  const int32_t all_blocks = (params.tile_pixels + 15) / 16;
  const int blocks = (all_blocks - strip + Tag::kStrips - 1) / Tag::kStrips;
  int32_t base[Tag::kBlocksM];
#pragma unroll
  for (int m = 0; m < Tag::kBlocksM; ++m) {
    const int32_t position = (strip + m * Tag::kStrips) * 16 + lane % 16;
    int32_t row, column;
    params.tile_columns.Divmod(position, &row, &column);
    // Behind the last: any pixel of the box; what becomes of it is not stored.
    base[m] = position < params.tile_pixels ? BoxPixel(params, row, column) : 0;
  }

  int64_t held = -1;
  auto fill = [&](const Cursor& at, int stage) {
    if (!at.Done()) {
      FillBox<T, SwizzledPixel>(params, TilePlace(params, at.item, kChannels), at.step, 0, rows.box,
                                dynamic + stage * params.stage_bytes);
    }
    CopyAsyncCommit();
  };
  Cursor at(params);
  fill(at, 0);
  float sums[Tag::kBlocksM][Tag::kBlocksN][4] = {};
  for (int stage = 0; !at.Done(); stage ^= 1) {
    Cursor next = at;
    next.Next(params, 1);
    fill(next, stage ^ 1);
    CopyAsyncWait<1>();
    __syncthreads();
    const TilePlace tile(params, at.item, kChannels);
    const int64_t wanted =
        int64_t{params.images_divmod.Div(tile.image)} * params.channels + tile.first_channel;
    if (wanted != held) {
      FillFilter<Tag>(params, tile, reinterpret_cast<T*>(filter));
      held = wanted;
      __syncthreads();
    }
    AddTaps<Tag>(params, SharedAddress(dynamic) + stage * params.stage_bytes,
                 filter_at + at.step.depth_tap * taps_of_depth * (Tag::kPieces * 512), chunk,
                 blocks, base, sums);
    if (next.item != at.item) {
      const int32_t channel = tile.first_channel + block * Tag::kBlock + lane % 4 * kCount;
#pragma unroll
      for (int m = 0; m < Tag::kBlocksM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float channels[kCount];
#pragma unroll
          for (int c = 0; c < kCount; ++c) {
            channels[c] = sums[m][c / 2][half * 2 + c % 2];
            sums[m][c / 2][half * 2 + c % 2] = 0;
          }
          const int32_t position = (strip + m * Tag::kStrips) * 16 + half * 8 + lane / 4;
          int32_t row, column;
          params.tile_columns.Divmod(position, &row, &column);
          row += tile.row, column += tile.column;
          if (position >= params.tile_pixels || row >= rows.out || column >= columns.out ||
              channel >= params.channels) {
            continue;
          }
          const int64_t pixel =
              ((int64_t{tile.image} * params.axis[0].out + tile.depth) * rows.out + row) *
                  columns.out +
              column;
          if (params.out_is_f32) {
            StoreChannels<float>(params, epilogue, pixel, channel, channels);
          } else {
            StoreChannels<T>(params, epilogue, pixel, channel, channels);
          }
        }
      }
    }
    // The next pass fills this stage.
    __syncthreads();
    at = next;
  }
}

template <Op kOp, DType kType, int kBlock_, int kBlocksM_, int kCtasPerSm_>
template <class Tag>
Status Gather<kOp, kType, kBlock_, kBlocksM_, kCtasPerSm_>::Launch(const Plan& plan,
                                                                   const Operands& operands,
                                                                   void* stream) {
  return LaunchHaloGather<Params, GatherKernel<Tag>>(plan, operands, stream);
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_GATHER_CUH_
