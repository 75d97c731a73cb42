// depthwise, fprop and dgrad of long filters on the tensor cores (sm_80): 16-bit operands, stride 1.
//
// For one channel and one filter row r, 16 neighbouring outputs q of 8 output rows p are a product
//
//     out[q, p] += sum over j of T_r[q, j] x[p + r, q0 + j],     T_r[q, j] = filter[r, j - q]
//
// with a banded (Toeplitz) 16 x (15 + S) matrix: A of mma.m16n8k16, its rows q, and x as B, its columns
// the rows p. A filter of up to 17 columns takes two instructions for 128 outputs, of up to 33 three.
// In A, the word of lane 4 g + t at column block i is the pair filter[r, 2 t - g + 8 i] and the next:
// a[0] and a[3] of the first instruction are block 0, a[2] block 1, a[1] zero; the second has blocks
// 2, 1, 3, 2. So a lane loads as many words a filter row and channel as there are blocks, two to five.
//
// mma reads x by columns, NHWC stores it by channels. The box arrives as [pixel][channel]; a warp
// transposes 8 pixels x 8 channels with ldmatrix.trans, which leaves two neighbouring pixels of one
// channel in a word, and stores the words to planes [channel][row][column]:
//
//     box: pixels x kChannels | planes: kChannels x (rows x columns) | band: kChannels x R x 2 x kBand
//
// Rows of a plane are an odd number of 16 bytes apart and planes 16 bytes modulo 128, so that neither
// ldmatrix nor the stores conflict. The band lies twice, the second time shifted by one tap, because a
// word of A starts at an odd tap in odd rows g.
//
// Tile: strips of 8 rows x 32 columns and kChannels channels, blocks_across strips side by side and
// blocks_down below each other; a warp has one strip and 8 channels. Its two products share the columns
// of x between them (kMatrices of 8 x 8), and each thread ends with 8 neighbouring channels of a pixel
// and stores 16 bytes. Where shared memory is short, a box comes in pieces of stage_rows rows. The next
// item's first piece is copied while this item is multiplied. Two barriers a piece.
//
// Shared memory of 7x7 and 16 channels, 32 x 32 outputs: box and planes 38 x 40 x 32 bytes each, 98 KB,
// band 11 KB, so that two CTAs share an SM. Of a filter row, channel and strip: 7 wavefronts of loads
// and 4 products.
//
// Zeros of the band meet pixels outside of an output's window: an Inf or NaN of x spreads to the outputs
// of its block.
//
// Refused, with a reason (toeplitz_plan.cc): other types, strides and dilations, K != C, channels that
// are not multiples of 8, filters of more columns.
#ifndef JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_CUH_
#define JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/toeplitz_tile.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::depthwise {

// A pixel of kChannels 16-bit channels. Of two chunks, every other four pixels have them exchanged: the
// eight pixels of a transposed matrix then lie in different banks.
template <int kChannels_>
struct NarrowPixel {
  static constexpr int kBytes = kChannels_ * 2, kChunks = kBytes / 16, kChunkChannels = 8;
  __device__ static int32_t Offset(int32_t i, int chunk) {
    return i * kBytes + (kChunks == 2 ? chunk ^ (i >> 2 & 1) : chunk) * 16;
  }
};

// kChannels: of a tile. kBlocks: column blocks of the band that hold taps, of filters of up to
// 8 kBlocks - 7 columns.
template <Op kOp, DType kType, int kChannels_, int kBlocks_, int kCtasPerSm_>
struct Toeplitz {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kChannels = kChannels_, kBlocks = kBlocks_, kCtasPerSm = kCtasPerSm_;
  // A CTA alone on its SM has the registers for several pieces, and to load a filter row early.
  static constexpr bool kPieces = kCtasPerSm == 1;
  static constexpr int kUnroll = kPieces ? 2 : 1;  // filter rows at a time

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// The band of every channel and filter row: tap i at kBandStart + i, zeros around; then the same shifted by
// one tap.
template <class Tag>
__device__ __forceinline__ void FillBand(const Params& params, const TilePlace& tile,
                                         const Step& step, typename Tag::T* band) {
  using T = typename Tag::T;
  const int32_t rows = params.axis[1].taps, columns = params.axis[2].taps;
  const int32_t all = params.axis[0].taps * rows * columns;
  const T* filter = static_cast<const T*>(params.filter) +
                    params.images_divmod.Div(tile.image) * params.filter_stride;
  constexpr int kBand = BandTaps(Tag::kBlocks), kRow = 2 * kBand;
  for (int32_t i = threadIdx.x; i < Tag::kChannels * rows * kRow; i += kThreads) {
    const int32_t place = i % kRow, line = i / kRow;
    const int32_t row = line % rows, channel = tile.first_channel + line / rows;
    const int32_t column = place % kBand - kBandStart + place / kBand;
    const int32_t tap = (step.depth_tap * rows + row) * columns + column;
    const bool exists = column >= 0 && column < columns && channel < params.channels;
    const int64_t at = int64_t{params.flip ? all - 1 - tap : tap} * params.tap_stride +
                       int64_t{channel} * params.channel_stride;
    band[i] = exists ? filter[at] : FromFloat<T>(0);
  }
}

// `box_rows` rows of a box [pixel][channel] -> planes [channel][row][column]. Columns are a multiple of
// 8: eight pixels in a row are a matrix, four matrices a pass.
template <class Tag>
__device__ __forceinline__ void TransposeBox(const Params& params, int32_t box_rows, uint32_t box,
                                             uint32_t planes) {
  using P = NarrowPixel<Tag::kChannels>;
  const int lane = threadIdx.x % 32;
  const int32_t pixels = box_rows * params.axis[2].box;
  const int32_t passes = (pixels + 31) / 32 * P::kChunks;
  for (int32_t i = threadIdx.x / 32; i < passes; i += kWarps) {
    const int32_t chunk = i % P::kChunks, first = i / P::kChunks * 32;
    // Past the end a lane reads the last pixel; what it brings is not stored.
    uint32_t word[4];
    LoadMatricesTransposed(box + P::Offset(min(first + lane, pixels - 1), chunk), word);
    int32_t row, column;
    params.box_columns.Divmod(first, &row, &column);
    const uint32_t to = planes + (chunk * 8 + lane / 4) * params.plane_bytes + lane % 4 * 4;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if (first + m * 8 < pixels)
        StoreWord(to + row * params.plane_row_bytes + column * 2, word[m]);
      column += 8;
      if (column == params.axis[2].box) column = 0, ++row;
    }
  }
}

// B of a filter row and channel: kMatrices 8 x 8 blocks of pixels, 16 bytes from one to the next. The
// lane's address is that of row lane % 8 of block lane / 8.
template <int kMatrices>
__device__ __forceinline__ void LoadPixels(uint32_t address, uint32_t (&x)[kMatrices]) {
  static_assert(kMatrices > 4 && kMatrices <= 8);
  LoadMatrices(address, reinterpret_cast<uint32_t (&)[4]>(x[0]));
  LoadMatrices(address + 64, reinterpret_cast<uint32_t (&)[kMatrices - 4]>(x[4]));
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    ToeplitzKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  using Epilogue = typename Tag::Epilogue;
  using P = NarrowPixel<Tag::kChannels>;
  constexpr int kGroups = Tag::kChannels / 8, kBlocks = Tag::kBlocks;
  constexpr int kInstructions = ToeplitzInstructions(kBlocks),
                kMatrices = ToeplitzMatrices(kBlocks);
  constexpr int32_t kBandRowBytes = 2 * BandTaps(kBlocks) * int32_t{sizeof(T)};
  extern __shared__ __align__(1024) unsigned char dynamic[];
  T* const band = reinterpret_cast<T*>(dynamic + params.band_offset);
  const uint32_t box = SharedAddress(dynamic), planes = box + params.stage_bytes;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Epilogue epilogue(params.epilogue);
  const int group = threadIdx.x / 32 % kGroups, strip = threadIdx.x / 32 / kGroups;
  const int32_t strip_row = strip / params.blocks_across * kStripRows;
  const int32_t strip_column = strip % params.blocks_across * kStripColumns;
  const int32_t row_taps = params.axis[1].taps, channel_bytes = row_taps * kBandRowBytes;
  const uint32_t pixels_at = planes + group * 8 * params.plane_bytes +
                             (strip_row + lane % 8) * params.plane_row_bytes +
                             (strip_column + lane / 8 * 8) * 2;
  // The lane's word of block 0: tap 2 t - g, of the shifted copy in odd rows.
  const uint32_t taps_at =
      box + params.band_offset + group * 8 * channel_bytes +
      (g % 2 * BandTaps(kBlocks) + kBandStart + 2 * t - g - g % 2) * int32_t{sizeof(T)};

  int64_t held = -1;
  Cursor at(params);
  const int32_t box_rows = params.axis[1].box;
  auto rows_from = [&](int32_t row) {
    return Tag::kPieces ? min(params.stage_rows, box_rows - row) : box_rows;
  };
  auto fill = [&](const Cursor& cursor, int32_t row) {
    if (!cursor.Done()) {
      FillBox<T, P>(params, TilePlace(params, cursor.item, Tag::kChannels), cursor.step, row,
                    rows_from(row), dynamic);
    }
    CopyAsyncCommit();
  };
  fill(at, 0);
  float sums[2][8][4] = {};
  while (!at.Done()) {
    Cursor next = at;
    next.Next(params, 1);
    const TilePlace tile(params, at.item, Tag::kChannels);
    for (int32_t row = 0;; row += params.stage_rows) {
      CopyAsyncWait<0>();
      __syncthreads();
      TransposeBox<Tag>(params, rows_from(row), box, planes + row * params.plane_row_bytes);
      const int64_t wanted =
          (int64_t{params.images_divmod.Div(tile.image)} * params.channels + tile.first_channel) *
              params.axis[0].taps +
          at.step.depth_tap;
      if (wanted != held) FillBand<Tag>(params, tile, at.step, band);
      held = wanted;
      __syncthreads();
      const int32_t copied = Tag::kPieces ? row + params.stage_rows : box_rows;
      if (copied >= box_rows) break;
      fill(at, copied);
    }
    fill(next, 0);
    const int32_t channel = tile.first_channel + group * 8;
    const bool busy = strip < params.blocks_across * params.blocks_down &&
                      tile.row + strip_row < params.axis[1].out &&
                      tile.column + strip_column < params.axis[2].out && channel < params.channels;
    if (busy) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        uint32_t taps = taps_at + c * channel_bytes, pixels = pixels_at + c * params.plane_bytes;
#pragma unroll Tag::kUnroll
        for (int32_t r = 0; r < row_taps; ++r) {
          uint32_t block[kBlocks], x[kMatrices];
#pragma unroll
          for (int i = 0; i < kBlocks; ++i) block[i] = LoadWord(taps + i * 16);
          LoadPixels(pixels, x);
          auto a = [&](int i) { return i >= 0 && i < kBlocks ? block[i] : 0u; };
          auto b = [&](int i) { return i < kMatrices ? x[i] : 0u; };
#pragma unroll
          for (int k = 0; k < kInstructions; ++k) {
#pragma unroll
            for (int u = 0; u < 2; ++u) {
              const uint32_t words[4] = {a(2 * k), a(2 * k - 1), a(2 * k + 1), a(2 * k)};
              // Blocks 2 k and 2 k + 1 are zero: the pixels beyond the box are not read.
              const bool last = 2 * k >= kBlocks;
              MultiplyAdd<T>(sums[u][c], words, b(2 * u + 2 * k), last ? 0u : b(2 * u + 2 * k + 1));
            }
          }
          taps += kBandRowBytes;
          pixels += params.plane_row_bytes;
        }
      }
    }
    if (busy && next.item != at.item) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int32_t p = tile.row + strip_row + 2 * t + e % 2;
          const int32_t q = tile.column + strip_column + u * 16 + g + e / 2 * 8;
          float channels[8];
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            channels[c] = sums[u][c][e];
            sums[u][c][e] = 0;
          }
          if (p >= params.axis[1].out || q >= params.axis[2].out) continue;
          const int64_t pixel =
              ((int64_t{tile.image} * params.axis[0].out + tile.depth) * params.axis[1].out + p) *
                  params.axis[2].out +
              q;
          if (params.out_is_f32) {
            StoreChannels<float>(params, epilogue, pixel, channel, channels);
          } else {
            StoreChannels<T>(params, epilogue, pixel, channel, channels);
          }
        }
      }
    }
    at = next;
  }
}

template <Op kOp, DType kType, int kChannels_, int kBlocks_, int kCtasPerSm_>
template <class Tag>
Status Toeplitz<kOp, kType, kChannels_, kBlocks_, kCtasPerSm_>::Launch(const Plan& plan,
                                                                       const Operands& operands,
                                                                       void* stream) {
  return LaunchHaloGather<Params, ToeplitzKernel<Tag>>(plan, operands, stream);
}

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_CUH_
