// depthwise, fprop and dgrad of long filters on the tensor cores (sm_80): 16-bit operands, stride
// 1.
//
// For one channel and one filter row r, 16 neighbouring outputs q of 8 output rows p are a product
//
//     out[q, p] += sum over j of T_r[q, j] x[p + r, q0 + j],     T_r[q, j] = filter[r, j - q]
//
// with a banded (Toeplitz) 16 x (15 + S) matrix: A of mma.m16n8k16, its rows q, and x as B, its
// columns the rows p. A filter of up to 17 columns takes two instructions for 128 outputs, of up to
// 33 columns three. In A, the word of lane 4 g + t at column block i holds the taps filter[r, 2 t -
// g + 8 i] and its successor. In the first instruction a[0] and a[3] are block 0, a[2] is block 1,
// a[1] is zero; the second has blocks 2, 1, 3, 2. A lane therefore loads one word for each block,
// two to five for a filter row and channel. With two blocks the second instruction is m16n8k8, with
// block 1 only.
//
// mma needs neighbouring columns of x in a word, but NHWC stores neighbouring channels. The box
// arrives as [pixel][channel]; a warp transposes 8 pixels x 8 channels by ldmatrix.trans, which
// leaves two neighbouring pixels of one channel in a word, and stores the words to planes
// [channel][row][column]:
//
//     box: pixels x kChannels | planes: kChannels x (rows x columns) | band: R x kChannels x 2 x kBand
//
// The row pitch of a plane is an odd multiple of 16 bytes and the plane pitch 16 bytes modulo 128,
// so that neither ldmatrix nor the stores have bank conflicts. Shared memory holds a second copy of
// the band, shifted by one tap, because in odd rows g a word of A starts at an odd tap.
//
// Tile: strips of 8 rows x 16 kProducts columns and kChannels channels, blocks_across strips side
// by side and blocks_down below each other; a warp has one strip and 8 channels. The products of a
// strip share the taps and the columns of x (kMatrices blocks of 8 x 8). Each thread ends with 8
// neighbouring channels of a pixel and stores 16 bytes. If shared memory is short, the box is
// copied in parts of stage_rows rows. The next item's first part is copied while this item is
// multiplied. There are two barriers a part.
//
// Shared memory for 7x7, 16 channels, 32 x 32 outputs: box and planes 38 x 40 x 32 bytes each, 98
// KB, band 11 KB, so that two CTAs share an SM. For 31x31, 8 channels, 56 x 64 outputs: planes 86 x
// 96 x 16 bytes, 143 KB, a quarter of a box 34 KB, band 48 KB.
//
// For a filter row, channel and strip:
//                      products   wavefronts of loads   instructions
//     9 columns           4              7                   13
//     17                  4              9                   15
//     33                  6             13                   21
//     33, wide           12             17                   28
//
// The band's zeros multiply pixels outside an output's window, so an Inf or NaN of x spreads to the
// outputs of its block.
//
// Refused, with a reason (toeplitz_plan.cc): other types, strides and dilations, K != C, channels
// that are not multiples of 8, filters of more columns.
#ifndef JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_CUH_
#define JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_CUH_

#include <cstdint>
#include <cstring>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/toeplitz_tile.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::depthwise {

// A pixel of kChannels 16-bit channels. With two chunks, they are swapped in every other group of
// four pixels, so that the eight pixels of a transposed matrix lie in different banks.
template <int kChannels_>
struct NarrowPixel {
  static constexpr int kBytes = kChannels_ * 2, kChunks = kBytes / 16, kChunkChannels = 8;
  __device__ static int32_t Offset(int32_t i, int chunk) {
    return i * kBytes + (kChunks == 2 ? chunk ^ (i >> 2 & 1) : chunk) * 16;
  }
};

// kChannels: channels of a tile. kBlocks: column blocks of the band that hold taps, for filters of
// up to 8 kBlocks - 7 columns. kProducts: products of 16 columns, side by side in a strip.
template <Op kOp, DType kType, int kChannels_, int kBlocks_, int kProducts_, int kCtasPerSm_>
struct Toeplitz {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kChannels = kChannels_, kBlocks = kBlocks_, kProducts = kProducts_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  // A CTA alone on its SM has enough registers for several parts of a box, and to load ahead
  // outside of the products.
  static constexpr bool kPieces = kCtasPerSm == 1;
  static constexpr int kUnroll = kPieces ? 4 : 1;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// Channels that a warp sums at a time. Independent products hide each other's latency; more
// channels would leave no registers for loads ahead.
inline constexpr int kPass = 4;

// The band of filter row r and channel c begins at element (r kChannels + c) kBandRow: tap i lies
// at kBandStart + i, and the shifted copy BandTaps further.
template <class Tag>
constexpr int kBandRow = 2 * BandTaps(Tag::kBlocks);

// Clears the whole band, once: all filters of a problem have their taps in the same places.
template <class Tag>
__device__ __forceinline__ void ClearBand(const Params& params, uint32_t band) {
  const int32_t bytes = params.axis[1].taps * Tag::kChannels * kBandRow<Tag> * 2;
  const uint32_t zeros[4] = {};
  for (int32_t i = threadIdx.x * 16; i < bytes; i += kThreads * 16) StoreChunk(band + i, zeros);
}

// Stores the taps of a tile's channels in both copies: each warp takes filter rows, each lane a
// column and 8 channels. Channels past the last are not written; no result depends on them.
template <class Tag>
__device__ __forceinline__ void FillBand(const Params& params, const TilePlace& tile,
                                         const Step& step, typename Tag::T* band) {
  using T = typename Tag::T;
  constexpr int kChunks = Tag::kChannels / 8;
  const int32_t rows = params.axis[1].taps, columns = params.axis[2].taps;
  const int32_t last = params.axis[0].taps * rows * columns - 1;
  const int lane = Lane(), chunk = lane % kChunks;
  const int32_t channel = tile.first_channel + chunk * 8;
  if (channel >= params.channels) return;
  const T* filter = static_cast<const T*>(params.filter) +
                    params.images_divmod.Div(tile.image) * params.filter_stride +
                    int64_t{channel} * params.channel_stride;
#pragma unroll Tag::kUnroll
  for (int32_t row = threadIdx.x / 32; row < rows; row += kWarps) {
#pragma unroll 1
    for (int32_t column = lane / kChunks; column < columns; column += 32 / kChunks) {
      const int32_t tap = (step.depth_tap * rows + row) * columns + column;
      const T* from = filter + int64_t{params.flip ? last - tap : tap} * params.tap_stride;
      alignas(16) T taps[8];
      if (params.channel_stride == 1) {
        const uint4 chunk_of_tap = __ldg(reinterpret_cast<const uint4*>(from));
        memcpy(taps, &chunk_of_tap, sizeof(taps));
      } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) taps[c] = from[int64_t{c} * params.channel_stride];
      }
      T* to = band + (row * Tag::kChannels + chunk * 8) * kBandRow<Tag> + kBandStart + column;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        to[c * kBandRow<Tag>] = taps[c];
        to[c * kBandRow<Tag> + BandTaps(Tag::kBlocks) - 1] = taps[c];
      }
    }
  }
}

// Transposes `box_rows` rows of a box [pixel][channel] to planes [channel][row][column]. The number
// of columns is a multiple of 8; a matrix is eight pixels of a row by eight channels. A warp takes
// a row, four matrices a pass.
template <class Tag>
__device__ __forceinline__ void TransposeBox(const Params& params, int32_t box_rows, uint32_t box,
                                             uint32_t planes) {
  using P = NarrowPixel<Tag::kChannels>;
  constexpr int kAcross = 4 / P::kChunks;  // blocks of 8 pixels a pass
  // A block of two chunks may remain.
  constexpr int kRest = ToeplitzMatrices(Tag::kBlocks, Tag::kProducts) % kAcross;
  static_assert(kRest == 0 || (kRest == 1 && P::kChunks == 2));
  const int lane = Lane(), warp = Thread() / 32, matrix = lane / 8;
  const int32_t columns = params.axis[2].box, row_bytes = columns * P::kBytes;
  const int32_t passes = columns / (kAcross * 8), second_chunk = 8 * params.plane_bytes;
  uint32_t from_row =
      box + warp * row_bytes + P::Offset(matrix / P::kChunks * 8 + lane % 8, matrix % P::kChunks);
  uint32_t to_row =
      planes + warp * params.plane_row_bytes + lane / 4 * params.plane_bytes + lane % 4 * 4;
#pragma unroll 1
  for (int32_t row = warp; row < box_rows; row += kWarps) {
    uint32_t from = from_row, to = to_row;
    // Stores the word of matrix m: block m / kChunks, chunk m % kChunks.
    auto store = [&](int m, uint32_t word) {
      StoreWord((m % P::kChunks == 1 ? to + second_chunk : to) + m / P::kChunks * 16, word);
    };
#pragma unroll Tag::kUnroll
    for (int32_t pass = 0; pass < passes; ++pass) {
      uint32_t word[4];
      LoadMatricesTransposed(from, word);
#pragma unroll
      for (int m = 0; m < 4; ++m) store(m, word[m]);
      from += kAcross * 8 * P::kBytes;
      to += kAcross * 16;
    }
    if constexpr (kRest == 1) {
      uint32_t word[2];
      LoadMatricesTransposed(from, word);
      store(0, word[0]);
      store(1, word[1]);
    }
    from_row += kWarps * row_bytes;
    to_row += kWarps * params.plane_row_bytes;
  }
}

// Loads B of a filter row and channel: kMatrices blocks of 8 x 8 pixels, 16 bytes apart. The lane's
// address is that of row lane % 8 of block lane / 8.
template <int kMatrices, int kFirst = 0>
__device__ __forceinline__ void LoadPixels(uint32_t address, uint32_t (&x)[kMatrices]) {
  constexpr int kLeft = kMatrices - kFirst, kCount = kLeft >= 4 ? 4 : kLeft >= 2 ? 2 : 1;
  LoadMatrices(address + kFirst * 16, reinterpret_cast<uint32_t (&)[kCount]>(x[kFirst]));
  if constexpr (kLeft > kCount) LoadPixels<kMatrices, kFirst + kCount>(address, x);
}

// Adds a filter row of kPass channels to a warp's strip. A word of the band occurs twice in A,
// whose four registers are consecutive, so one of them holds a copy; other registers are zero.
// `zero` and `zeros` (two a channel) are 0 at run time only: if the compiler knew that two operands
// are equal, it would rematerialise them for each product. As opaque values the zeros stay in their
// registers.
template <class Tag>
__device__ __forceinline__ void MultiplyFilterRow(uint32_t taps, uint32_t pixels,
                                                  int32_t plane_bytes, uint32_t zero,
                                                  const uint32_t (&zeros)[kPass][2],
                                                  float (*sums)[Tag::kProducts][4]) {
  using T = typename Tag::T;
  constexpr int kBlocks = Tag::kBlocks, kInstructions = ToeplitzInstructions(kBlocks);
  constexpr int kMatrices = ToeplitzMatrices(kBlocks, Tag::kProducts);
#pragma unroll
  for (int c = 0; c < kPass; ++c) {
    uint32_t block[kBlocks], x[kMatrices];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) block[i] = LoadWord(taps + c * kBandRow<Tag> * 2 + i * 16);
    LoadPixels(pixels + c * plane_bytes, x);
#pragma unroll
    for (int k = 0; k < kInstructions; ++k) {
      // Blocks 2 k - 1 to 2 k + 1 of the band; with two blocks, the second instruction has only the
      // first of these.
      if constexpr (kBlocks == 2) {
        if (k == 1) {
          const uint32_t words[2] = {zeros[c][1], block[1] ^ zero};
#pragma unroll
          for (int u = 0; u < Tag::kProducts; ++u) {
            MultiplyAdd<T>(sums[c][u], words, x[2 * u + 2]);
          }
          continue;
        }
      }
      const uint32_t words[4] = {block[2 * k], k > 0 ? block[2 * k - 1] ^ zero : zeros[c][0],
                                 2 * k + 1 < kBlocks ? block[2 * k + 1] : zeros[c][1],
                                 block[2 * k] ^ zero};
#pragma unroll
      for (int u = 0; u < Tag::kProducts; ++u) {
        MultiplyAdd<T>(sums[c][u], words, x[2 * u + 2 * k], x[2 * u + 2 * k + 1]);
      }
    }
  }
}

// Stores the outputs of a warp's strip. `first`: its first output and the first of its eight
// channels.
template <typename Out, class Tag, class Epilogue>
__device__ __forceinline__ void StoreStrip(const Params& params, const Epilogue& epilogue,
                                           const TilePlace& first,
                                           const float (&sums)[8][Tag::kProducts][4]) {
  const int lane = Lane(), g = lane / 4, t = lane % 4;
  const int32_t height = params.axis[1].out, width = params.axis[2].out;
  const int32_t row = first.row + 2 * t, column = first.column + g, channel = first.first_channel;
  int64_t pixel =
      ((int64_t{first.image} * params.axis[0].out + first.depth) * height + row) * width + column;
  Out* line = static_cast<Out*>(params.out) + pixel * params.channels + channel;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Out* to = line;
#pragma unroll
    for (int j = 0; j < 2 * Tag::kProducts; ++j) {
      const bool inside = row + i < height && column + j * 8 < width;
      alignas(16) Out elements[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const OutputPlace place{(pixel + j * 8) * params.channels + channel + c,
                                static_cast<int32_t>(pixel) + j * 8, channel + c, inside};
        elements[c] =
            FromFloat<Out>(epilogue.template operator()<Out>(sums[c][j / 2][j % 2 * 2 + i], place));
      }
      uint4 pieces[sizeof(Out) / 2];
      memcpy(pieces, elements, sizeof(elements));
      if (inside) {
#pragma unroll
        for (int piece = 0; piece < int{sizeof(Out)} / 2; ++piece) {
          reinterpret_cast<uint4*>(to)[piece] = pieces[piece];
        }
      }
      to += int64_t{params.channels} * 8;
    }
    pixel += width;
    line += int64_t{width} * params.channels;
  }
}

// A warp's strip and its eight channels in the tile. Recomputed at each use, because the products
// need the registers.
template <class Tag>
struct WarpStrip {
  int index;
  int32_t row, column, channel;
  __device__ __forceinline__ explicit WarpStrip(const Params& params) {
    constexpr int kGroups = Tag::kChannels / 8;
    const int warp = Thread() / 32;
    index = warp / kGroups;
    channel = warp % kGroups * 8;
    params.strips_across.Divmod(index, &row, &column);
    row *= kStripRows;
    column *= StripColumns(Tag::kProducts);
  }
};

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    ToeplitzKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  using Epilogue = typename Tag::Epilogue;
  using P = NarrowPixel<Tag::kChannels>;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const uint32_t box = SharedAddress(dynamic), planes = box + params.stage_bytes;
  const Epilogue epilogue(params.epilogue);
  // C = K is a multiple of 8, so the compiler removes the other cases of FillBox and Cursor.
  HaloParams known = params;
  known.vector = known.reduce = 1;
  const uint32_t zero = params.repeat.divisor - 1;

  int32_t held = -1;  // the first channel whose taps the band holds, counted over all filters
  Cursor at(params);
  const int32_t box_rows = params.axis[1].box;
  auto rows_from = [&](int32_t row) {
    return Tag::kPieces ? min(params.stage_rows, box_rows - row) : box_rows;
  };
  auto fill = [&](const Cursor& cursor, int32_t row) {
    if (!cursor.Done()) {
      FillBox<T, P>(known, TilePlace(known, cursor.item, Tag::kChannels), cursor.step, row,
                    rows_from(row), dynamic);
    }
    CopyAsyncCommit();
  };
  fill(at, 0);
  ClearBand<Tag>(params, box + params.band_offset);
  float sums[8][Tag::kProducts][4] = {};
  while (!at.Done()) {
    Cursor next = at;
    next.Next(known, 1);
    const TilePlace tile(params, at.item, Tag::kChannels);
    for (int32_t row = 0;; row += params.stage_rows) {
      CopyAsyncWait<0>();
      __syncthreads();
      TransposeBox<Tag>(params, rows_from(row), box, planes + row * params.plane_row_bytes);
      const int32_t wanted =
          params.images_divmod.Div(tile.image) * params.channels + tile.first_channel;
      if (wanted != held || params.axis[0].taps > 1)
        FillBand<Tag>(params, tile, at.step, reinterpret_cast<T*>(dynamic + params.band_offset));
      held = wanted;
      __syncthreads();
      const int32_t copied = Tag::kPieces ? row + params.stage_rows : box_rows;
      if (copied >= box_rows) break;
      fill(at, copied);
    }
    bool busy;
    {
      const WarpStrip<Tag> strip(params);
      busy = strip.index < params.blocks_across * params.blocks_down &&
             tile.row + strip.row < params.axis[1].out &&
             tile.column + strip.column < params.axis[2].out &&
             tile.first_channel + strip.channel < params.channels;
    }
    fill(next, 0);
    if (busy) {
      const WarpStrip<Tag> strip(params);
      const int lane = Lane(), g = lane / 4, t = lane % 4;
      uint32_t pixels = planes + strip.channel * params.plane_bytes +
                        (strip.row + lane % 8) * params.plane_row_bytes +
                        (strip.column + lane / 8 * 8) * 2;
      // The lane's word of block 0: tap 2 t - g, from the shifted copy in odd rows.
      uint32_t taps = box + params.band_offset + strip.channel * kBandRow<Tag> * 2 +
                      (g % 2 * BandTaps(Tag::kBlocks) + kBandStart + 2 * t - g - g % 2) * 2;
#pragma unroll
      for (int c = 0; c < 8; c += kPass) {
        uint32_t zeros[kPass][2];
#pragma unroll
        for (int i = 0; i < 2 * kPass; ++i) zeros[i / 2][i % 2] = (taps + i) & zero;
#pragma unroll 1
        for (int32_t r = 0; r < params.axis[1].taps; ++r) {
          MultiplyFilterRow<Tag>(taps, pixels, params.plane_bytes, zero, zeros, sums + c);
          taps += Tag::kChannels * kBandRow<Tag> * 2;
          pixels += params.plane_row_bytes;
        }
        taps += (kPass - params.axis[1].taps * Tag::kChannels) * kBandRow<Tag> * 2;
        pixels += kPass * params.plane_bytes - params.axis[1].taps * params.plane_row_bytes;
      }
      if (next.item != at.item) {
        const WarpStrip<Tag> strip(params);
        TilePlace first(params, at.item + static_cast<int32_t>(zero), Tag::kChannels);
        first.row += strip.row, first.column += strip.column;
        first.first_channel += strip.channel;
        if (params.out_is_f32) {
          StoreStrip<float, Tag>(params, epilogue, first, sums);
        } else {
          StoreStrip<T, Tag>(params, epilogue, first, sums);
        }
#pragma unroll
        for (auto& channel : sums) {
#pragma unroll
          for (auto& sum : channel) sum[0] = sum[1] = sum[2] = sum[3] = 0;
        }
      }
    }
    at = next;
  }
}

template <Op kOp, DType kType, int kChannels_, int kBlocks_, int kProducts_, int kCtasPerSm_>
template <class Tag>
Status Toeplitz<kOp, kType, kChannels_, kBlocks_, kProducts_, kCtasPerSm_>::Launch(
    const Plan& plan, const Operands& operands, void* stream) {
  return LaunchHaloGather<Params, ToeplitzKernel<Tag>>(plan, operands, stream);
}

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_CUH_
