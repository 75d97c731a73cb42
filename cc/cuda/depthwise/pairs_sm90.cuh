// depthwise, fprop and dgrad at stride 1: products of two taps at a time on tensor cores (sm_90a).
//
// Of 8 channels, two neighbouring taps of a filter row are 16 rows of a matrix B with 8 columns: two
// diagonals. A row of A is a pixel under the first tap and its neighbour under the second:
//
//     out[pixel][c] += sum over k < 8 of x[pixel + s][k] w[s][k] (k == c) + x[pixel + s + 1][k] w[s + 1][k] (k == c)
//
// One m16n8k16 is 256 multiply-adds, where the FMA pipe has 32 an instruction; the last tap of a row of an odd
// number is one m16n8k8. Pixels are read as they lie, by ldmatrix, without conversion, and sums lie as the result does.
//
// A warp has 8 channels and 16 columns of pixels, or 8 of two images, and walks down them. Its B stays in
// registers. A row of pixels is read once, for all filter rows R:
//
//     slot p of the sums: output row i - (R - 1) + p, to which row i of pixels adds filter row R - 1 - p
//
// After a row slot 0 is complete, and every slot is the next row's slot above it: the first product of a sum reads
// slot p + 1 and writes slot p.
//
//     box [row][image][column][channel], kPairsGroup rows an mbarrier | barriers
//
// A CTA has one tile, all of whose box it asks for at its start; those that share an SM are apart in time. Box
// rows have a multiple of 8 pixels, so that TMA's swizzle is the same in all. Results take the place of the
// pixels: no other warp reads them, and they leave by TMA, a row at a time.
//
// Zeros of B meet the other channels: an Inf or NaN of x spreads to the 8 channels of its block.
//
// Refused, with a reason (pairs_plan.cc): other filters, strides, dilation, depth; what TMA cannot walk.
#ifndef JAXCONV_CUDA_DEPTHWISE_PAIRS_SM90_CUH_
#define JAXCONV_CUDA_DEPTHWISE_PAIRS_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/depthwise/pairs_plan.h"
#include "cuda/depthwise/params.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::depthwise {

// The filter of a warp's 8 channels as B: a lane has the taps of channel lane / 4 where that column meets its rows.
template <class Tag>
struct PairedTaps {
  static constexpr int kR = Tag::kFilterRows, kS = Tag::kFilterColumns, kPairs = Tag::kPairs;
  uint32_t word[kR][kS];

  __device__ __forceinline__ PairedTaps(const Params& params, int32_t filter, int32_t channel,
                                        int lane) {
    const int column = lane / 4;
    const bool meets = column / 2 == lane % 4;
    const auto* from = static_cast<const uint16_t*>(params.filter) +
                       filter * params.filter_stride +
                       int64_t{min(channel + column, params.channels - 1)} * params.channel_stride;
    constexpr int kTaps = kR * kS;
    const int32_t step = params.flip ? -params.tap_stride : params.tap_stride;
    if (params.flip) from += int64_t{kTaps - 1} * params.tap_stride;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      const uint32_t bits = meets ? from[tap * step] : 0;
      word[tap / kS][tap % kS] = bits << column % 2 * 16;
    }
  }
};

// The sums of a warp's column, and what a row of pixels adds to them.
template <class Tag>
struct PairedSums {
  static constexpr int kR = Tag::kFilterRows, kS = Tag::kFilterColumns, kPairs = Tag::kPairs;
  using T = typename Tag::T;
  float slot[kR][4] = {};

  // Row i of a tile of `rows` output rows. kEdge: some of whose filter rows meet none.
  template <bool kEdge>
  __device__ __forceinline__ void Add(const uint32_t (&a)[kPairs][4], const PairedTaps<Tag>& taps,
                                      int32_t i, int32_t rows) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
#pragma unroll
      for (int p = 0; p < kR; ++p) {
        const int r = kR - 1 - p, s = 2 * j;
        if (kEdge && !Inside(i - r, rows)) continue;
        if (j == 0) {
#pragma unroll
          for (int v = 0; v < 4; ++v) slot[p][v] = p + 1 < kR ? slot[p + 1 < kR ? p + 1 : p][v] : 0;
        }
        if (s + 1 < kS) {
          MultiplyAdd<T>(slot[p], a[j], taps.word[r][s], taps.word[r][s + 1 < kS ? s + 1 : s]);
        } else {
          const uint32_t half[2] = {a[j][0], a[j][1]};
          MultiplyAdd<T>(slot[p], half, taps.word[r][s]);
        }
      }
    }
  }

  // A row of zeros.
  __device__ __forceinline__ void Shift() {
#pragma unroll
    for (int p = 0; p < kR; ++p) {
#pragma unroll
      for (int v = 0; v < 4; ++v) slot[p][v] = p + 1 < kR ? slot[p + 1 < kR ? p + 1 : p][v] : 0;
    }
  }
};

template <class Tag>
__global__ void __launch_bounds__(Tag::kCtaThreads, Tag::kCtasPerSm)
    PairsKernel(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap map,
                const __grid_constant__ CUtensorMap out_map) {
  using T = typename Tag::T;
  constexpr int kR = Tag::kFilterRows, kPairs = Tag::kPairs, kBytes = Tag::kPixelBytes;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const uint32_t box = SharedAddress(dynamic);
  const uint32_t barriers = box + params.stages * params.stage_bytes;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

  // Channel tiles are the fastest: neighbours share cache lines.
  int32_t image, row, column, first_channel;
  params.channel_tiles.Divmod(static_cast<int32_t>(blockIdx.x), &image, &first_channel);
  columns.tiles.Divmod(image, &image, &column);
  rows.tiles.Divmod(image, &image, &row);
  first_channel *= Tag::kChannels, column *= columns.tile, row *= rows.tile;
  image *= params.tile_images;
  const int32_t above = rows.pad - row;  // rows of the box before the image's first
  const int32_t count = min(rows.tile, rows.out - row);

  if (warp == 0 && ElectOne()) {
    for (int32_t s = 0; s < params.stages; ++s) BarrierInit(barriers + s * 8, 1);
    BarrierInitFence();
    PrefetchTensorMap(&map);
    PrefetchTensorMap(&out_map);
  }
  __syncthreads();
  WaitForInputs();
  if (warp == 0 && ElectOne()) {
    for (int32_t s = 0; s < params.stages; ++s) {
      BarrierArriveExpect(barriers + s * 8, params.stage_bytes);
      CopyTile4d(box + s * params.stage_bytes, &map, barriers + s * 8, first_channel,
                 column - columns.pad, image, s * kPairsGroup - above);
    }
  }
  __syncwarp();
  const PairedTaps<Tag> taps(params, params.images_divmod.Div(image), first_channel + warp * 8,
                             lane);

  // The lane's address in ldmatrix of a pair of taps: pixels 0-7, 8-15 (of a second image: 0-7), and the same
  // of the second tap. Columns that do not exist read others.
  auto chunk = [&](int32_t pixel) {
    const int32_t swizzle = kBytes == 128 ? pixel & 7 : pixel >> 1 & 3;
    return pixel * kBytes + ((warp ^ swizzle) << 4);
  };
  const int32_t second = params.tile_images == 2 ? columns.box : 8;  // pixels to the second half
  const int32_t row_bytes = params.stage_bytes / kPairsGroup;
  uint32_t offset[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int32_t half = lane / 8 % 2, at = lane % 8 + lane / 16 + 2 * j;
    offset[j] = box + (params.tile_images == 2 ? chunk(half * second + min(at, columns.box - 1))
                                               : chunk(min(half * second + at, columns.box - 1)));
  }
  const uint32_t out = box + chunk(lane / 4) + lane % 4 * 4;

  PairedSums<Tag> sums;
  int32_t at = 0;  // of row i
#pragma unroll 1
  for (int32_t i = 0; i < count + kR - 1; ++i, at += row_bytes) {
    if (i % kPairsGroup == 0) BarrierWait(barriers + i / kPairsGroup * 8, 0);
    if (Inside(i - above, rows.in)) {
      uint32_t a[kPairs][4];
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        if (2 * j + 1 < Tag::kFilterColumns) {
          LoadMatrices(offset[j] + at, a[j]);
        } else {
          uint32_t two[2];
          LoadMatrices(offset[j] + at, two);
          a[j][0] = two[0], a[j][1] = two[1], a[j][2] = a[j][3] = 0;
        }
      }
      if (i >= kR - 1 && i < count) {
        sums.template Add<false>(a, taps, i, count);
      } else {
        sums.template Add<true>(a, taps, i, count);
      }
    } else {
      sums.Shift();
    }
    const int32_t done = i - (kR - 1);
    if (done < 0) continue;
    const uint32_t to = out + at - (kR - 1) * row_bytes;
    StoreWord(to, PackPair<T>(sums.slot[0][0], sums.slot[0][1]));
    StoreWord(to + second * kBytes, PackPair<T>(sums.slot[0][2], sums.slot[0][3]));
    if (done % kPairsGroup != kPairsGroup - 1 && done != count - 1) continue;
    FenceForCopies();
    __syncthreads();
    if (warp == 0) {
      if (ElectOne()) {
        for (int32_t y = done / kPairsGroup * kPairsGroup; y <= done; ++y) {
          for (int32_t n = 0; n < params.tile_images; ++n) {
            StoreTile4d(&out_map, box + y * row_bytes + n * second * kBytes, first_channel, column,
                        image + n, row + y);
          }
        }
        CommitStores();
      }
      __syncwarp();
    }
  }
  if (warp == 0 && ElectOne()) WaitForStoresToRead();
}

// Boxes [row][image][column][channel] of the gathered tensor, or rows of an image's tile of the result.
inline Status EncodeRows(DType dtype, const void* address, int32_t channels, int32_t width,
                         int32_t height, int64_t images, const int32_t (&box)[4],
                         CUtensorMap* map) {
  DenseTensor tensor;
  tensor.dtype = dtype;
  tensor.rank = 4;
  tensor.address = address;
  tensor.extent[0] = channels;
  tensor.extent[1] = width;
  tensor.extent[2] = images;
  tensor.extent[3] = height;
  tensor.stride[1] = channels;
  tensor.stride[2] = int64_t{channels} * width * height;
  tensor.stride[3] = int64_t{channels} * width;
  return EncodeTiledMap(tensor, box, map);
}

// kFilterRows_ x kFilterColumns_ taps at stride 1, kChannelBlocks_ (4 or 8) blocks of 8 channels, a warp each.
template <Op kOp, DType kType, int kFilterRows_, int kFilterColumns_, int kChannelBlocks_,
          int kCtasPerSm_>
struct Pairs {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kFilterRows = kFilterRows_, kFilterColumns = kFilterColumns_;
  static constexpr int kPairs = (kFilterColumns + 1) / 2;
  static constexpr int kChannels = 8 * kChannelBlocks_, kPixelBytes = kChannels * 2;
  static constexpr int kCtasPerSm = kCtasPerSm_, kCtaThreads = 32 * kChannelBlocks_;
  static_assert(kPixelBytes == 64 || kPixelBytes == 128);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<LaunchParams>();
    Params params = launch.kernel;
    params.filter = operands.rhs;
    params.out = operands.out;
    BindEpilogue(operands, &params.epilogue);
    const Axis &rows = params.axis[1], &columns = params.axis[2];
    CUtensorMap map, out_map;
    JAXCONV_RETURN_IF_ERROR(EncodeRows(kType, operands.lhs, params.channels, columns.in, rows.in,
                                       params.images,
                                       {kChannels, columns.box, params.tile_images, kPairsGroup},
                                       &map));
    JAXCONV_RETURN_IF_ERROR(EncodeRows(kType, operands.out, params.channels, columns.out, rows.out,
                                       params.images, {kChannels, columns.tile, 1, 1}, &out_map));
    LaunchConfig config;
    config.grid = static_cast<unsigned>(launch.ctas);
    config.threads = Tag::kCtaThreads;
    config.shared_bytes = launch.shared_bytes;
    config.overlaps = true;
    return ::jaxconv::Launch<PairsKernel<Tag>>(plan.kernel->name, config, stream, params, map,
                                               out_map);
  }
};

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_PAIRS_SM90_CUH_
