// imma_few_channels: 8-bit convolution of 4 input channels on mma.sync (sm_80). int32 sums of s8 or
// u8 activations and an s8 filter, then the epilogue of core/epilogue.h; y in nhwc or nchw32.
//
// GEMM: rows are pixels of y, columns output channels. A filter row is one instruction's reduction:
// 32 bytes are 8 neighbouring pixels of x; a filter of up to 8 columns has taps for the first
// pixels and zeros for the rest. A fragment of A therefore consists of words of the halo tile: in
// row g of a block, thread t reads pixels 2 t and 2 t + 1 of the window of output g. Nothing is
// gathered or copied twice, and overlapping windows of neighbouring outputs cause no bank
// conflicts.
//
// The filter stays in registers, 8 words for each of its 3 or 7 rows. Its output channels are
// permuted so that a thread's sums belong to 8 neighbouring channels, which it stores at once.
//
// Tile: tile_rows rows of y by blocks_across blocks of 16 pixels (plan.cc), 32 output channels;
// each of 4 warps computes a block at a time. CTA b processes tiles b, b + gridDim.x, ..., which
// all have the same channels. Shared memory: two halo tiles. Registers: 56 for the filter, 16 sums,
// 16 scales and biases; at most 128.
//
// Synchronisation: a tile's halo is copied (cp.async, zeros outside x) while the previous tile is
// multiplied; after the one barrier of a tile, its halo has arrived and the previous one is free.
//
// Refused (plan.cc): groups, batched filters, dilated inputs, three axes, more than 7 rows or 8
// columns of taps, output channels that are not multiples of 8.
#ifndef JAXCONV_CUDA_IMMA_FEW_CHANNELS_HALO_CUH_
#define JAXCONV_CUDA_IMMA_FEW_CHANNELS_HALO_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/requantize.cuh"
#include "cuda/common/two_buffers.cuh"
#include "cuda/imma_few_channels/params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::imma_few_channels {

// The digits of a tile index.
struct TilePlace {
  int32_t part, row, column, image;  // row and column: of y
  __device__ __forceinline__ TilePlace(const Params& params, int32_t index) {
    int32_t across, down;
    params.parts.Divmod(index, &index, &part);
    params.across.Divmod(index, &index, &across);
    params.down.Divmod(index, &image, &down);
    row = down * params.tile_rows;
    column = across * static_cast<int32_t>(params.blocks_across.divisor) * kBlockPixels;
  }
};

// Starts to copy a tile's halo.
__device__ __forceinline__ void CopyHalo(const Params& params, const TilePlace& tile,
                                         uint32_t halo) {
  const Axis &rows = params.rows, &columns = params.columns;
  const int32_t first_row = tile.row * rows.stride - rows.pad;
  const int32_t first_column = tile.column * columns.stride - columns.pad - params.lead;
  const int32_t lane = threadIdx.x % 32;
  const int64_t row_bytes = int64_t{columns.in} * kPixelBytes;
  const char* const image = static_cast<const char*>(params.x) + tile.image * (rows.in * row_bytes);
  const int32_t end = params.halo_copies;
  for (int32_t r = threadIdx.x / 32; r < params.halo_rows; r += kWarps) {
    const int32_t row = first_row + r;
    // In a row outside the image, all columns are outside.
    const bool inside = static_cast<uint32_t>(row) < static_cast<uint32_t>(rows.in);
    const uint32_t width = inside ? columns.in : 0;
    const char* const from = image + (inside ? row : 0) * row_bytes;
    const uint32_t to = halo + (r * end + lane) * 16;
    int32_t column = first_column + lane * kCopyPixels;
    if (params.vector) {
#pragma unroll 1
      for (int32_t i = lane; i < end; i += 32, column += 32 * kCopyPixels) {
        const bool valid = static_cast<uint32_t>(column) < width;
        CopyAsync<16>(to + (i - lane) * 16, OffsetBytes(from, valid ? column : 0, kPixelBytes),
                      valid);
      }
    } else {
#pragma unroll 1
      for (int32_t i = lane; i < end; i += 32, column += 32 * kCopyPixels) {
#pragma unroll
        for (int p = 0; p < kCopyPixels; ++p) {
          const bool valid = static_cast<uint32_t>(column + p) < width;
          CopyAsync<4>(to + (i - lane) * 16 + p * 4,
                       OffsetBytes(from, valid ? column + p : 0, kPixelBytes), valid);
        }
      }
    }
  }
}

// The fragments of B for a CTA's channels: two words for each filter row and 8 columns.
template <int kRows>
struct FilterRows {
  uint32_t of[kRows][kChannels / 8][2];

  __device__ __forceinline__ FilterRows(const Params& params, int32_t first_channel) {
    const int32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const char* const w = static_cast<const char*>(params.w);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kChannels / 8; ++j) {
        const int32_t channel = first_channel + g / 2 * 8 + j * 2 + g % 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t s = t * 2 + half;
          const bool inside =
              r < params.rows.taps && s < params.columns.taps && channel < params.channels;
          const int64_t at =
              int64_t{channel} * params.w_row + (r * params.columns.taps + s) * kPixelBytes;
          of[r][j][half] = inside ? __ldg(reinterpret_cast<const uint32_t*>(w + at)) : 0;
        }
      }
    }
  }
};

// Computes a block of 16 pixels by 32 channels. `window`: the address of the first row's taps for
// this lane's pixel; `row`: bytes to those of the next row. kStride: the column stride, without
// dilation, so that offsets are immediate; 0: any. Rows past the filter's last read the last row
// again; their taps are zeros.
template <typename T, int kStride, int kRows>
__device__ __forceinline__ void MultiplyBlock(const Params& params, const FilterRows<kRows>& filter,
                                              uint32_t window, uint32_t row,
                                              int32_t (&acc)[kChannels / 8][4]) {
  const uint32_t next_tap = (kStride > 0 ? 1 : params.columns.dilation) * kPixelBytes;
  const uint32_t half_block = 8 * (kStride > 0 ? kStride : params.columns.stride) * kPixelBytes;
  uint32_t a[kRows][4];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    a[r][0] = LoadWord(window);
    a[r][1] = LoadWord(window + half_block);
    a[r][2] = LoadWord(window + next_tap);
    a[r][3] = LoadWord(window + half_block + next_tap);
    if (r + 1 < params.rows.taps) window += row;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kChannels / 8; ++j) {
      MultiplyAdd<T>(acc[j], a[r], filter.of[r][j][0], filter.of[r][j][1]);
    }
  }
}

using Terms = SharedTerms<kChannels>;
static_assert(Terms::kBytes == kTermsBytes);

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    HaloKernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const uint32_t halo = SharedAddress(dynamic) + Terms::kBytes;
  const Axis &rows = params.rows, &columns = params.columns;
  const int32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pitch = params.halo_copies * 16;
  const uint32_t halo_bytes = params.halo_rows * pitch;

  TwoBuffers<TilePlace> walk(params);
  if (walk.index < params.tiles) CopyHalo(params, walk.tile, halo);
  CopyAsyncCommit();
  // The grid is a multiple of the parts, so a CTA's channels never change.
  const int32_t channel = walk.tile.part * kChannels + t * 8;
  const bool inside = channel < params.channels;
  const FilterRows<Tag::kRows> filter(params, walk.tile.part * kChannels);
  const Terms terms{SharedAddress(dynamic), walk.tile.part * kChannels};
  terms.Copy(params.requantize, threadIdx.x, params.channels);
  const uint32_t of_lane = params.lead * kPixelBytes + g * columns.stride * kPixelBytes +
                           t * 2 * columns.dilation * kPixelBytes;

  while (walk.index < params.tiles) {
    CopyAsyncWait<0>();
    __syncthreads();
    const TilePlace next(params, walk.NextIndex());
    if (walk.NextIndex() < params.tiles) CopyHalo(params, next, halo + walk.Other(halo_bytes));
    CopyAsyncCommit();
    const TilePlace& tile = walk.tile;
    const int32_t blocks_across = static_cast<int32_t>(params.blocks_across.divisor);
#pragma unroll 1
    for (int32_t block = threadIdx.x / 32; block < params.tile_rows * blocks_across;
         block += kWarps) {
      int32_t down, along;
      params.blocks_across.Divmod(block, &down, &along);
      const int32_t p = tile.row + down, q = tile.column + along * kBlockPixels + g;
      if (p >= rows.out || q - g >= columns.out) continue;
      const uint32_t window = halo + walk.buffer + of_lane + down * rows.stride * pitch +
                              along * kBlockPixels * columns.stride * kPixelBytes;
      int32_t acc[kChannels / 8][4] = {};
      MultiplyBlock<typename Tag::T, Tag::kStride>(params, filter, window, rows.dilation * pitch,
                                                   acc);
      OutputPixel pixels[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t pixel = p * columns.out + q + i * 8;
        pixels[i].at = q + i * 8 < columns.out ? tile.image * params.requantize.image_stride +
                                                     pixel * params.requantize.pixel_stride
                                               : -1;
      }
      ForRequantizePath(params.requantize, [&](auto path) {
        constexpr RequantizePath kPath = decltype(path)::value;
        Residual<2> residual;
        if constexpr (HasResidual(kPath)) {
          LoadResidual(params.requantize, pixels, channel, inside, &residual);
        }
        RequantizeEight<kPath>(params.requantize, pixels, channel, inside, terms, residual,
                               [&](int i, int e) { return acc[e / 2][i * 2 + e % 2]; });
      });
    }
    walk.Advance(next, halo_bytes);
  }
}

template <Op kOp, DType kType, int kRows_, int kStride_, int kCtasPerSm_>
struct Halo {
  static_assert(kOp == Op::kFprop);
  static constexpr int kRows = kRows_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kStride = kStride_;
  using T = std::conditional_t<kType == DType::kU8, uint8_t, int8_t>;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<LaunchParams>();
    Params params = launch.kernel;
    params.x = operands.lhs;
    params.w = operands.rhs;
    BindRequantize(operands, &params.requantize);
    LaunchConfig config;
    config.grid = static_cast<unsigned>(launch.ctas);
    config.threads = kThreads;
    config.shared_bytes = launch.shared_bytes;
    return jaxconv::Launch<HaloKernel<Tag>>(plan.kernel->name, config, stream, params);
  }
};

}  // namespace jaxconv::imma_few_channels

#endif  // JAXCONV_CUDA_IMMA_FEW_CHANNELS_HALO_CUH_
