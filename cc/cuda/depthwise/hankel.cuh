// depthwise, wgrad of long filters on the tensor cores (sm_80): 16-bit operands, stride 1.
//
// For one channel and one row of x, the sums of 16 filter columns s and 8 filter rows r are a
// product
//
//     dw[r, s] += sum over q of H[s, q] dy[row - r, q],     H[s, q] = x[row, q + s - pad]
//
// with a Hankel matrix H as A of mma.m16n8k16, and eight rows of dy as B. Taps and columns may have
// any order in A and B if both agree. Lane 4 g + t takes columns 8 t ... 8 t + 7 of a strip of 32,
// and taps 2 g and 2 g + 1 of 16. All its pairs x[q + s], x[q + s + 1] for two instructions then
// lie in five consecutive words of the row of x; prmt forms the pairs of odd columns from two
// words, so H is never stored. Its words of dy are 16 contiguous bytes.
//
// A warp has one channel and 8 kRowBlocks x 16 kColumnBlocks taps, whose sums stay in registers
// over all tiles of the CTA. It advances through x in steps of 8 rows, in eight passes with
// different first rows. A block of eight rows of dy that serves filter rows 0-7 at one step then
// serves filter rows 8-15 at the next, so each block is loaded once for all filter rows. Products
// whose rows of dy are all outside the tile are skipped, and rows of x outside the tensor are
// neither stored nor visited.
//
//     x planes: 8 x rows x (32 strips + 16 kColumnBlocks) | dy planes: 8 x rows x 32 strips | zeros
//
// The planes are [channel][row][column]. Threads load two neighbouring pixels of 8 channels, 16
// bytes each, and store a word to each of 8 planes: neighbouring lanes have neighbouring words, no
// bank conflict. The row pitch of dy is an odd multiple of 16 bytes, and column n of B is row n / 2
// + n % 2 * 4, so that eight lanes that load 16 bytes each use different banks. Rows of B outside
// the tile read the zeros.
//
// 31x31 on 56x56, tiles of 28 rows: 98 KB, two CTAs an SM, one of which loads while the other
// multiplies. A row of x and a strip take 11 loads, 14 wavefronts and up to 16 products.
//
// A CTA processes tiles slice, slice + slices, ...; common/splitk_reduce.cuh adds the slices, with
// the same bits in every run. Larger filters, and the taps along the depth of rank 3, are divided
// into parts with separate CTAs.
//
// Zeros of dy multiply pixels of x, so an Inf or NaN of x spreads to all taps of its channel.
//
// Refused, with a reason (hankel_plan.cc): other types, strides and dilations.
#ifndef JAXCONV_CUDA_DEPTHWISE_HANKEL_CUH_
#define JAXCONV_CUDA_DEPTHWISE_HANKEL_CUH_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/depthwise/hankel_tile.h"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/share.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::depthwise {

// kColumnBlocks, kRowBlocks: the taps of a part, in blocks of 16 columns and 8 rows.
template <Op kOp, DType kType, int kColumnBlocks_, int kRowBlocks_, int kCtasPerSm_>
struct Hankel {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kColumnBlocks = kColumnBlocks_, kRowBlocks = kRowBlocks_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr int kRows = HankelRows(kRowBlocks), kColumns = HankelColumns(kColumnBlocks);
  static_assert(kWarps == kHankelChannels);
  // Pairs of pixels that a thread loads before it stores the first; fewer with three CTAs an SM,
  // which have fewer registers.
  static constexpr int kInFlight = kCtasPerSm < 3 ? 4 : 2;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// Two neighbouring pixels of a row; either may not exist.
template <typename T>
struct PixelPair {
  const T *first, *second;
  bool has_first, has_second;
};

// Eight channels of a pixel. kPlain: they are 16 aligned bytes. ChannelOf: the position of channel
// e in the pixel, or -1.
template <typename T, bool kPlain, class ChannelOf>
__device__ __forceinline__ uint4 LoadPixel(const T* pixel, bool exists,
                                           const ChannelOf& channel_of) {
  uint4 words = make_uint4(0, 0, 0, 0);
  if (!exists) return words;
  if constexpr (kPlain) {
    return __ldg(reinterpret_cast<const uint4*>(pixel));
  } else {
    T elements[kHankelChannels];
#pragma unroll
    for (int e = 0; e < kHankelChannels; ++e) {
      const int32_t channel = channel_of(e);
      elements[e] = channel >= 0 ? pixel[channel] : FromFloat<T>(0);
    }
    memcpy(&words, elements, sizeof(words));
    return words;
  }
}

// The layout of a tensor's channels in shared memory, [channel][row][word].
struct Planes {
  uint32_t at;
  int32_t plane_bytes, row_bytes, rows;
  const FastDivmod& words;  // of a row
};

// Fills planes. PairOf: the pixels at a row and word. A thread loads kPairs pairs before it stores
// the first.
template <typename T, bool kPlain, int kPairs, class PairOf, class ChannelOf>
__device__ __forceinline__ void FillPlanes(const Planes& planes, const PairOf& pair_of,
                                           const ChannelOf& channel_of) {
  constexpr int kInFlight = kPlain ? kPairs : 1;
  const auto words = static_cast<int32_t>(planes.words.divisor);
  int32_t row, word, row_step, word_step;
  planes.words.Divmod(threadIdx.x, &row, &word);
  planes.words.Divmod(kThreads, &row_step, &word_step);
  while (row < planes.rows) {
    uint4 first[kInFlight], second[kInFlight];
    uint32_t to[kInFlight];
    bool stored[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const PixelPair<T> pair = pair_of(row, word);
      stored[j] = row < planes.rows;
      first[j] = LoadPixel<T, kPlain>(pair.first, stored[j] && pair.has_first, channel_of);
      second[j] = LoadPixel<T, kPlain>(pair.second, stored[j] && pair.has_second, channel_of);
      to[j] = planes.at + row * planes.row_bytes + word * 4;
      row += row_step;
      word += word_step;
      if (word >= words) word -= words, ++row;
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (!stored[j]) break;
      const uint32_t a[4] = {first[j].x, first[j].y, first[j].z, first[j].w};
      const uint32_t b[4] = {second[j].x, second[j].y, second[j].z, second[j].w};
#pragma unroll
      for (int c = 0; c < kHankelChannels; ++c) {
        StoreWord(to[j] + c * planes.plane_bytes,
                  __byte_perm(a[c / 2], b[c / 2], c % 2 == 0 ? 0x5410 : 0x7632));
      }
    }
  }
}

// A warp's view of a strip. Rows of x start at the one that the first tap row reads for the first
// row of dy.
struct Strip {
  int32_t first_row, last_row;  // rows of x in shared memory
  int32_t dy_rows;              // of the tile
  // Addresses of the lane's words: of row first_row of x; of row 0 of dy, plus the lane's row in a
  // block; of the zeros.
  uint32_t x, dy, zeros;
  int32_t x_row_bytes, dy_row_bytes, lane_row;
};

// The upper half of a word and the lower half of the next. As inline assembly, because the compiler
// would repeat the instruction for every product.
__device__ __forceinline__ uint32_t OddPair(uint32_t word, uint32_t next) {
  uint32_t pair;
  asm volatile("prmt.b32 %0, %1, %2, 0x5432;" : "=r"(pair) : "r"(word), "r"(next));
  return pair;
}

template <class Tag>
__device__ __forceinline__ void MultiplyStrip(
    const Strip& strip, float (&sums)[Tag::kRowBlocks][Tag::kColumnBlocks][4]) {
  constexpr int kN = Tag::kRowBlocks, kM = Tag::kColumnBlocks;
  const int32_t starts = min(strip.first_row + 8, strip.last_row);
#pragma unroll 1
  for (int32_t start = strip.first_row; start < starts; ++start) {
    // Blocks of dy, and whether they have a row of the tile.
    uint32_t dy[kN][4];
    bool any[kN];
    // Loads the block of dy that filter rows 0-7 use at a row of x: its first row is `row` - 7.
    auto load = [&](int32_t row, int slot) {
      any[slot] = static_cast<uint32_t>(row) < static_cast<uint32_t>(strip.dy_rows + 7);
      const int32_t first = row - 7;
      const bool inside =
          static_cast<uint32_t>(first + strip.lane_row) < static_cast<uint32_t>(strip.dy_rows);
      const uint4 chunk = LoadChunk(inside ? strip.dy + first * strip.dy_row_bytes : strip.zeros);
      dy[slot][0] = chunk.x, dy[slot][1] = chunk.y, dy[slot][2] = chunk.z, dy[slot][3] = chunk.w;
    };
#pragma unroll
    for (int j = 1; j < kN; ++j) load(start - 8 * j, kN - j);
    uint32_t x = strip.x + (start - strip.first_row) * strip.x_row_bytes;
#pragma unroll 1
    for (int32_t first = start; first < strip.last_row; first += 8 * kN) {
#pragma unroll
      for (int u = 0; u < kN; ++u) {
        const int32_t row = first + 8 * u;
        if (row >= strip.last_row) break;
        load(row, u);
        uint32_t a[kHankelSteps][kM][4];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          uint32_t words[2 * kHankelSteps + 1];
#pragma unroll
          for (int i = 0; i < 2 * kHankelSteps + 1; ++i) words[i] = LoadWord(x + (8 * m + i) * 4);
#pragma unroll
          for (int i = 0; i < 2 * kHankelSteps; ++i) {
            a[i / 2][m][i % 2 * 2] = words[i];
            a[i / 2][m][i % 2 * 2 + 1] = OddPair(words[i], words[i + 1]);
          }
        }
        x += 8 * strip.x_row_bytes;
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          // Filter rows 8 j ... 8 j + 7.
          const int slot = (u - j + kN) % kN;
          if (!any[slot]) continue;
#pragma unroll
          for (int k = 0; k < kHankelSteps; ++k) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
              MultiplyAdd<typename Tag::T>(sums[j][m], a[k][m], dy[slot][2 * k],
                                           dy[slot][2 * k + 1]);
            }
          }
        }
      }
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    HankelKernel(const __grid_constant__ HankelParams params) {
  using T = typename Tag::T;
  constexpr int kM = Tag::kColumnBlocks, kN = Tag::kRowBlocks;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &depths = params.axis[0], &rows = params.axis[1], &columns = params.axis[2];
  const Share share(params, params.tap_parts, kHankelChannels);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const uint32_t planes = SharedAddress(dynamic);
  // The part's first taps, and its number of rows.
  const int32_t first_tap = share.part % params.parts_of_row * Tag::kColumns;
  int32_t rest = share.part / params.parts_of_row;
  const int32_t row_parts = (rows.taps + Tag::kRows - 1) / Tag::kRows;
  const int32_t first_row_tap = rest % row_parts * Tag::kRows;
  const int32_t depth_tap = rest / row_parts;
  const int32_t row_taps = min(Tag::kRows, rows.taps - first_row_tap);

  Strip strip;
  strip.zeros = planes + params.zeros_offset + t * 16;
  strip.x_row_bytes = static_cast<int32_t>(params.box_columns.divisor) * 4;
  strip.dy_row_bytes = params.dy_row_bytes;
  strip.lane_row = g / 2 + g % 2 * 4;
  const uint32_t x_at = planes + warp * params.x_plane_bytes + (g + 4 * t) * 4;
  const uint32_t dy_at = planes + params.dy_offset + warp * params.dy_plane_bytes +
                         strip.lane_row * params.dy_row_bytes + t * 16;
  if (threadIdx.x < kHankelZeroBytes / 16) {
    StoreChunk(planes + params.zeros_offset + threadIdx.x * 16, {0, 0, 0, 0});
  }

  float sums[kN][kM][4] = {};
  for (int32_t item = share.slice; item < params.items; item += params.slices) {
    const TilePlace tile(params, item, kHankelChannels);
    const int32_t image = tile.image + share.filter * params.images;
    const int32_t depth =
        ElementAt(depths, tile.depth * depths.stride + depth_tap * depths.dilation - depths.pad);
    // Row 0 of x, and the first row past the tensor.
    const int32_t x_row = tile.row + first_row_tap - rows.pad;
    const int32_t x_end = (rows.in - 1) * static_cast<int32_t>(rows.in_dilation.divisor) + 1;
    strip.dy_rows = min(rows.tile, rows.out - tile.row);
    strip.first_row = max(0, -x_row);
    strip.last_row = min(strip.dy_rows + row_taps - 1, x_end - x_row);
    if (depth < 0 || strip.first_row >= strip.last_row) continue;

    const T* x = static_cast<const T*>(params.gathered) + (int64_t{image} * depths.in + depth) *
                                                              rows.in * columns.in *
                                                              params.gathered_channels;
    const T* dy =
        static_cast<const T*>(params.walked) +
        (int64_t{image} * depths.out + tile.depth) * rows.out * columns.out * params.channels;
    const int32_t first_x_row = x_row + strip.first_row;
    const int32_t x_column = tile.column + first_tap - columns.pad;
    const Planes x_planes{planes, params.x_plane_bytes, strip.x_row_bytes,
                          strip.last_row - strip.first_row, params.box_columns};
    const Planes dy_planes{planes + params.dy_offset, params.dy_plane_bytes, params.dy_row_bytes,
                           strip.dy_rows, params.dy_words};
    const int32_t channel = share.first_channel;
    if (params.vector && rows.in_dilation.divisor == 1 && columns.in_dilation.divisor == 1) {
      // All of these rows exist; invalid addresses are not read.
      auto pair = [&](const T* first_pixel, int32_t width, int32_t row, int32_t column) {
        const T* pixel = first_pixel + int64_t{row * width + column} * params.channels;
        return PixelPair<T>{pixel, pixel + params.channels, Inside(column, width),
                            Inside(column + 1, width)};
      };
      auto all = [](int) { return 0; };
      FillPlanes<T, true, Tag::kInFlight>(
          x_planes,
          [&](int32_t row, int32_t word) {
            return pair(x + channel, columns.in, first_x_row + row, x_column + 2 * word);
          },
          all);
      FillPlanes<T, true, Tag::kInFlight>(
          dy_planes,
          [&](int32_t row, int32_t word) {
            return pair(dy + channel, columns.out, tile.row + row, tile.column + 2 * word);
          },
          all);
    } else {
      auto pair = [](const T* pixels, int32_t width, int32_t row, int32_t first, int32_t second,
                     int32_t channels) {
        auto pixel = [&](int32_t column) {
          return pixels + int64_t{max(row, 0) * width + max(column, 0)} * channels;
        };
        return PixelPair<T>{pixel(first), pixel(second), row >= 0 && first >= 0,
                            row >= 0 && second >= 0};
      };
      FillPlanes<T, false, 1>(
          x_planes,
          [&](int32_t row, int32_t word) {
            const int32_t u = x_column + 2 * word;
            return pair(x, columns.in, ElementAt(rows, first_x_row + row), ElementAt(columns, u),
                        ElementAt(columns, u + 1), params.gathered_channels);
          },
          [&](int e) {
            return channel + e < params.channels ? params.repeat.Div(channel + e) : -1;
          });
      FillPlanes<T, false, 1>(
          dy_planes,
          [&](int32_t row, int32_t word) {
            const int32_t column = tile.column + 2 * word;
            auto inside = [&](int32_t i) { return i < columns.out ? i : -1; };
            return pair(dy, columns.out, tile.row + row, inside(column), inside(column + 1),
                        params.channels);
          },
          [&](int e) { return channel + e < params.channels ? channel + e : -1; });
    }
    __syncthreads();
    for (int32_t s = 0; s < params.strips; ++s) {
      if (tile.column + s * kHankelColumns >= columns.out) break;
      strip.x = x_at + s * kHankelColumns * 2;
      strip.dy = dy_at + s * kHankelColumns * 2;
      MultiplyStrip<Tag>(strip, sums);
    }
    // The next pass overwrites the planes.
    __syncthreads();
  }

  // Stores the sums as [tap][channel], so that the channels of a tap are stored together. They may
  // overwrite the zeros.
  __syncthreads();
  auto* shared_sums = reinterpret_cast<float*>(dynamic);
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = 8 * j + 7 - t - e % 2 * 4, s = 16 * m + 2 * g + e / 2;
        shared_sums[(r * Tag::kColumns + s) * kHankelSumPitch + warp] = sums[j][m][e];
      }
    }
  }
  __syncthreads();
  const int32_t row_before = depth_tap * rows.taps + first_row_tap;
  float* out = static_cast<float*>(params.out) +
               (int64_t{share.slice} * params.filters + share.filter) * depths.taps * rows.taps *
                   columns.taps * params.channels;
  for (int i = threadIdx.x; i < Tag::kRows * Tag::kColumns * kHankelChannels; i += kThreads) {
    const int tap = i / kHankelChannels, c = i % kHankelChannels;
    const int32_t r = tap / Tag::kColumns, s = first_tap + tap % Tag::kColumns;
    const int32_t channel = share.first_channel + c;
    if (r >= row_taps || s >= columns.taps || channel >= params.channels) continue;
    out[(int64_t{row_before + r} * columns.taps + s) * params.channels + channel] =
        shared_sums[tap * kHankelSumPitch + c];
  }
}

template <Op kOp, DType kType, int kColumnBlocks_, int kRowBlocks_, int kCtasPerSm_>
template <class Tag>
Status Hankel<kOp, kType, kColumnBlocks_, kRowBlocks_, kCtasPerSm_>::Launch(
    const Plan& plan, const Operands& operands, void* stream) {
  return LaunchHaloWgrad<HankelParams, HankelKernel<Tag>, Epilogue>(plan, operands, stream);
}

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_HANKEL_CUH_
