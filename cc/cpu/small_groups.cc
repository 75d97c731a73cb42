// y[n, p, q, k] = sum over r, s, i < G of x[n, p * stride + r * dilation - pad, ..., k / G * G + i]
//                                         w[r, s, i, k]
//
// oneDNN pads such groups to vectors of 16 channels. Here a vector holds 16 / G whole groups. Two
// shuffles, of the 128-bit parts and within them, broadcast input channel i of every group to the
// lanes of its group; the result multiplies the vector of the filter's 16 output channels. A block
// of up to 16 pixels of a row has its sums in registers. For filter rows of 3 taps without stride
// and dilation, a shuffled input vector serves all three taps: 12 multiply-adds for 4 shuffles (G =
// 4), 24 for 10 (G = 8).
//
// The windows of a tile, a few rows of up to 64 columns, are first copied to scratch memory, 16
// channels at a time, with their padding. Blocks then need no bounds checks, and the pixel stride
// is one cache line. In the image it is C floats; if that is a power of two, neighbouring pixels
// share a few sets of L1.
//
// A data gradient of stride 1 is the same sum over y, with taps reversed and groups transposed.
//
// The loops over a block must be unrolled, or the sums go through memory.
#include "cpu/small_groups.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "cpu/geometry.h"

namespace jaxconv::cpu {
namespace {

constexpr int64_t kLanes = 16;
constexpr int kMaxPixels = 16;            // of a block
constexpr int64_t kTileColumns = 64;      // most columns
constexpr int64_t kTileBytes = 64 << 10;  // of copied windows, unless a single row takes more
constexpr int64_t kMaxScratch = 1 << 20;

// The sum over windows of `in`, for both operations.
struct Windows {
  explicit Windows(const ConvProblem& p)
      : rank(p.rank),
        in(p.in),
        out(p.out),
        filter(p.filter),
        stride(p.stride),
        dilation(p.dilation),
        pad(p.pad_lo) {
    if (p.op != Op::kDgrad) return;
    std::swap(in, out);
    for (int a = 0; a < 3; ++a) pad[a] = (filter[a] - 1) * dilation[a] - pad[a];
  }

  // Whether scratch memory holds the rows that consecutive output rows share only once.
  bool SharesRows() const { return stride[1] == 1 && dilation[1] == 1; }

  int64_t CopiedRows(int64_t rows) const { return SharesRows() ? rows - 1 + filter[1] : filter[1]; }

  int64_t CopiedColumns(int64_t columns) const {
    return (columns - 1) * stride[2] + (filter[2] - 1) * dilation[2] + 1;
  }

  int64_t TileColumns() const {
    const int64_t tiles = CeilDiv(out[2], kTileColumns);
    return CeilDiv(out[2], tiles);
  }

  int64_t TileBytes(int64_t rows) const {
    return filter[0] * CopiedRows(rows) * CopiedColumns(TileColumns()) * kLanes *
           static_cast<int64_t>(sizeof(float));
  }

  int64_t TileRows() const {
    if (!SharesRows()) return 1;
    int64_t rows = 1;
    while (rows < out[1] && TileBytes(rows + 1) <= kTileBytes) ++rows;
    return rows;
  }

  int rank;
  Spatial in, out, filter, stride, dilation, pad;
};

// Distances in floats.
struct Block {
  const float* x;  // in scratch memory: the first tap of the first pixel
  const float* w;  // packed, of these 16 channels
  float* y;
  int64_t pixel, next_pixel;   // from one pixel to the next, in x and in y
  int64_t plane, row, column;  // from one tap to the next, in x
  const Spatial* filter;
  __mmask16 channels;  // existing channels
};

// With shuffles without a mask, GCC 12 warns about its own header.
constexpr __mmask16 kAll = 0xffff;

// For groups of 8 channels: channels 4 part .. 4 part + 3, in both 128-bit parts of the group.
__attribute__((target("avx512f"))) inline __m512 Half(__m512 value, int part) {
  return part == 0 ? _mm512_maskz_shuffle_f32x4(kAll, value, value, 0xa0)
                   : _mm512_maskz_shuffle_f32x4(kAll, value, value, 0xf5);
}

// Broadcasts one element, or one per group, within every 128 bits.
template <int kWhich>
__attribute__((target("avx512f"))) inline __m512 Channel(__m512 value) {
  return _mm512_maskz_permute_ps(kAll, value, kWhich);
}

// Multiplies an input pixel `value` by the taps [0, kTaps) of a row in `filter`, and adds the
// products to the sums of output pixels at, at - 1, ..., if these belong to the block.
template <int kPixels, int kInPart, int kTaps>
__attribute__((target("avx512f"), always_inline)) inline void Multiply(
    __m512 value, const __m512 (&filter)[kTaps][kInPart], int at, __m512 (&sum)[kPixels]) {
  const __m512 channels[] = {Channel<kInPart == 2 ? 0xa0 : 0x00>(value),
                             Channel<kInPart == 2 ? 0xf5 : 0x55>(value), Channel<0xaa>(value),
                             Channel<0xff>(value)};
#pragma GCC unroll 4
  for (int i = 0; i < kInPart; ++i) {
#pragma GCC unroll 4
    for (int s = 0; s < kTaps; ++s) {
      if (at - s < 0 || at - s >= kPixels) continue;
      sum[at - s] = _mm512_fmadd_ps(channels[i], filter[s][i], sum[at - s]);
    }
  }
}

// kTaps: taps of a filter row that share the input pixels of a block; 1: each tap separately, for
// any extent, stride and dilation.
template <int kPixels, int kGroup, int kTaps>
__attribute__((target("avx512f"))) void ComputeBlock(const Block& b) {
  constexpr int kInPart = kGroup < 4 ? kGroup : 4, kParts = kGroup / kInPart;
  __m512 sum[kPixels];
#pragma GCC unroll 16
  for (int j = 0; j < kPixels; ++j) sum[j] = _mm512_setzero_ps();
  const float* w = b.w;
  for (int64_t r0 = 0; r0 < (*b.filter)[0]; ++r0) {
    for (int64_t r1 = 0; r1 < (*b.filter)[1]; ++r1) {
      const float* x = b.x + r0 * b.plane + r1 * b.row;
      for (int64_t s = 0; s < (*b.filter)[2]; s += kTaps, x += b.column) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
          __m512 filter[kTaps][kInPart];
#pragma GCC unroll 4
          for (int t = 0; t < kTaps; ++t) {
#pragma GCC unroll 4
            for (int i = 0; i < kInPart; ++i) {
              filter[t][i] = _mm512_loadu_ps(w + (t * kGroup + part * kInPart + i) * kLanes);
            }
          }
#pragma GCC unroll 20
          for (int j = 0; j < kPixels + kTaps - 1; ++j) {
            __m512 value = _mm512_loadu_ps(x + j * b.pixel);
            if constexpr (kParts > 1) value = Half(value, part);
            Multiply(value, filter, j, sum);
          }
        }
        w += kTaps * kGroup * kLanes;
      }
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j < kPixels; ++j) {
    _mm512_mask_storeu_ps(b.y + j * b.next_pixel, b.channels, sum[j]);
  }
}

using ComputeBlockFn = void (*)(const Block&);

using Blocks = std::array<ComputeBlockFn, kMaxPixels>;

template <int kGroup, int kTaps, int... kPixels>
constexpr Blocks BlocksOf(std::integer_sequence<int, kPixels...>) {
  return {ComputeBlock<kPixels + 1, kGroup, kTaps>...};
}

ComputeBlockFn FindBlock(int64_t group, bool row_of_three, int64_t pixels) {
  constexpr std::make_integer_sequence<int, kMaxPixels> kSizes;
  static constexpr Blocks kBlocks[][2] = {{BlocksOf<2, 1>(kSizes), BlocksOf<2, 3>(kSizes)},
                                          {BlocksOf<4, 1>(kSizes), BlocksOf<4, 3>(kSizes)},
                                          {BlocksOf<8, 1>(kSizes), BlocksOf<8, 3>(kSizes)}};
  const int which = group == 2 ? 0 : group == 4 ? 1 : 2;
  return kBlocks[which][row_of_three ? 1 : 0][pixels - 1];
}

// Copies up to 16 channels of the pixels [begin, end) of a row; pixels outside [0, extent) are
// zero.
__attribute__((target("avx512f"))) void CopyPixels(const float* row, int64_t channels,
                                                   __mmask16 existing, int64_t extent,
                                                   int64_t begin, int64_t end, float* to) {
  for (int64_t i = begin; i < end; ++i, to += kLanes) {
    const bool inside = row != nullptr && i >= 0 && i < extent;
    _mm512_storeu_ps(
        to, inside ? _mm512_maskz_loadu_ps(existing, row + i * channels) : _mm512_setzero_ps());
  }
}

// Output rows [p1, p1 + rows) and columns [q, q + columns) of plane p0.
struct Tile {
  int64_t p0, p1, rows, q, columns;
};

// Copies the windows of a tile to (filter[0], CopiedRows, CopiedColumns, 16). `image` begins at the
// first of the 16 channels.
void CopyWindows(const Windows& v, const Tile& tile, const float* image, int64_t channels,
                 __mmask16 existing, float* to) {
  const int64_t rows = v.CopiedRows(tile.rows), columns = v.CopiedColumns(tile.columns);
  const int64_t first = tile.q * v.stride[2] - v.pad[2];
  for (int64_t r0 = 0; r0 < v.filter[0]; ++r0) {
    const int64_t i0 = tile.p0 * v.stride[0] + r0 * v.dilation[0] - v.pad[0];
    for (int64_t r1 = 0; r1 < rows; ++r1, to += columns * kLanes) {
      const int64_t i1 = tile.p1 * v.stride[1] + r1 * v.dilation[1] - v.pad[1];
      const bool inside = i0 >= 0 && i0 < v.in[0] && i1 >= 0 && i1 < v.in[1];
      const float* row = inside ? image + (i0 * v.in[1] + i1) * v.in[2] * channels : nullptr;
      CopyPixels(row, channels, existing, v.in[2], first, first + columns, to);
    }
  }
}

void ComputeTile(const Windows& v, const Tile& tile, const float* windows, const float* w,
                 int64_t group, int64_t channels, __mmask16 existing, float* y) {
  const int64_t columns = v.CopiedColumns(tile.columns), rows = v.CopiedRows(tile.rows);
  Block block;
  block.w = w;
  block.pixel = v.stride[2] * kLanes;
  block.next_pixel = channels;
  block.plane = rows * columns * kLanes;
  block.row = columns * kLanes;
  block.column = v.dilation[2] * kLanes;
  block.filter = &v.filter;
  block.channels = existing;
  const int64_t blocks = CeilDiv(tile.columns, kMaxPixels);  // of almost equal size
  const bool row_of_three = v.filter[2] == 3 && v.stride[2] == 1 && v.dilation[2] == 1;
  for (int64_t t = 0; t < tile.rows; ++t) {
    float* row = y + ((tile.p0 * v.out[1] + tile.p1 + t) * v.out[2] + tile.q) * channels;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t begin = i * tile.columns / blocks, end = (i + 1) * tile.columns / blocks;
      block.x = windows + (t * columns + begin * v.stride[2]) * kLanes;
      block.y = row + begin * channels;
      FindBlock(group, row_of_three, end - begin)(block);
    }
  }
}

int64_t ScratchBytes(const ConvProblem& p) {
  const Windows windows(p);
  return windows.TileBytes(windows.TileRows());
}

Status Check(const ConvProblem& p) {
  static const bool runs = __builtin_cpu_supports("avx512f");
  if (!runs) return Status::Unimplemented("needs AVX-512");
  const int64_t group = p.c_per_group();
  if (group != p.k_per_group() || (group != 2 && group != 4 && group != 8)) {
    return Status::Unimplemented(
        "takes groups of 2, 4 or 8 input and as many output channels, got " +
        std::to_string(group) + " and " + std::to_string(p.k_per_group()));
  }
  if (p.op == Op::kDgrad && p.stride != Spatial{1, 1, 1}) {
    return Status::Unimplemented("the data gradient takes no stride");
  }
  if (ScratchBytes(p) > kMaxScratch) {
    return Status::Unimplemented("a row of windows takes more than 1 MB");
  }
  return {};
}

Status Pays(const ConvProblem& p) {
  const Spatial ones{1, 1, 1};
  const bool dense = p.taps() > 1 && p.stride == ones && p.dilation == ones;
  if (p.c < kLanes) return Status::Unimplemented("pays from 16 channels on");
  if (p.c_per_group() == 8 && (p.rank == 1 || !dense)) {
    return Status::Unimplemented(
        "pays for groups of 8 channels with several taps of two or three "
        "axes, without stride and dilation");
  }
  return {};
}

int64_t PackedElements(const ConvProblem& p) {
  return CeilDiv(p.c, kLanes) * p.taps() * p.c_per_group() * kLanes;
}

// Packs the filter (taps, channel of the group, K) to (vectors of 16 channels, taps, channel of the
// group, 16); for a data gradient it swaps the channels of a group.
void Pack(const ConvProblem& p, const float* w, float* packed) {
  const int64_t group = p.c_per_group(), taps = p.taps();
  const bool dgrad = p.op == Op::kDgrad;
  for (int64_t first = 0; first < p.c; first += kLanes) {
    const int64_t lanes = std::min(kLanes, p.c - first);
    for (int64_t t = 0; t < taps; ++t) {
      const float* tap = w + (dgrad ? taps - 1 - t : t) * group * p.k + first;
      for (int64_t i = 0; i < group; ++i, packed += kLanes) {
        std::fill_n(packed, kLanes, 0.0f);
        if (!dgrad) {
          std::copy_n(tap + i * p.k, lanes, packed);
          continue;
        }
        for (int64_t of_group = 0; of_group < std::min(group, lanes); ++of_group) {
          for (int64_t lane = of_group; lane < lanes; lane += group) {
            packed[lane] = tap[of_group * p.k + lane - of_group + i];
          }
        }
      }
    }
  }
}

void Compute(const ConvProblem& p, const float* from, const float* packed, float* to,
             int64_t row_begin, int64_t row_end, float* scratch) {
  const Windows v(p);
  Spatial begin{0, 0, 0}, end = v.out;
  begin[3 - v.rank] = row_begin;
  end[3 - v.rank] = row_end;
  const int64_t of_vector = p.taps() * p.c_per_group() * kLanes;
  const int64_t tile_rows = v.TileRows(), tile_columns = v.TileColumns();
  Tile tile;
  for (tile.p0 = begin[0]; tile.p0 < end[0]; ++tile.p0) {
    for (tile.p1 = begin[1]; tile.p1 < end[1]; tile.p1 += tile.rows) {
      tile.rows = std::min(tile_rows, end[1] - tile.p1);
      for (tile.q = begin[2]; tile.q < end[2]; tile.q += tile.columns) {
        tile.columns = std::min(tile_columns, end[2] - tile.q);
        for (int64_t c = 0; c < p.c; c += kLanes) {
          const int64_t lanes = std::min(kLanes, p.c - c);
          const auto existing = static_cast<__mmask16>((1u << lanes) - 1);
          CopyWindows(v, tile, from + c, p.c, existing, scratch);
          ComputeTile(v, tile, scratch, packed + c / kLanes * of_vector, p.c_per_group(), p.c,
                      existing, to + c);
        }
      }
    }
  }
}

}  // namespace

const RegionKernel kSmallGroups = {Check, Pays, PackedElements, Pack, ScratchBytes, Compute};

}  // namespace jaxconv::cpu
