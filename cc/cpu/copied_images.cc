#include "cpu/copied_images.h"

#include <algorithm>
#include <cstring>

#include "cpu/block_loops.h"
#include "cpu/geometry.h"

namespace jaxconv::cpu {
namespace {

constexpr uint8_t kSignBit = 0x80;

// Output channels whose offsets are one unit of work: two cache lines of an HWIO filter row.
constexpr int64_t kChannels = 128;
// The most filter elements added in 16 bits: 256 * -128 is the least 16-bit number.
constexpr int64_t kRowsIn16Bits = 256;

struct Bytes {
  const uint8_t* from;
  int64_t count;
  uint8_t* to;
};

JAXCONV_LOOP FlipLoop(const Bytes& bytes) {
  const uint8_t* __restrict from = bytes.from;  // char pointers may alias anything, `bytes`
                                                // included
  uint8_t* __restrict to = bytes.to;
  const int64_t count = bytes.count;
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] ^ kSignBit;
}

// Rows of a filter, `stride` elements apart; a row is one channel, or one element of each channel.
struct FilterRows {
  const int8_t* w;
  int64_t rows, stride, count;
  uint32_t* offsets;
};

JAXCONV_LOOP AddRowsLoop(const FilterRows& all) {
  std::fill_n(all.offsets, all.count, 0u);
  for (int64_t begin = 0; begin < all.rows; begin += kRowsIn16Bits) {
    int16_t partial[kChannels] = {};
    const int64_t end = std::min(all.rows, begin + kRowsIn16Bits);
    for (int64_t row = begin; row < end; ++row) {
      const int8_t* w = all.w + row * all.stride;
      for (int64_t i = 0; i < all.count; ++i) partial[i] = static_cast<int16_t>(partial[i] + w[i]);
    }
    for (int64_t i = 0; i < all.count; ++i) {
      all.offsets[i] += 128 * static_cast<uint32_t>(partial[i]);
    }
  }
}

JAXCONV_LOOP SumRowsLoop(const FilterRows& all) {
  for (int64_t row = 0; row < all.rows; ++row) {
    const int8_t* w = all.w + row * all.stride;
    uint32_t sum = 0;
    for (int64_t i = 0; i < all.count; ++i) sum += static_cast<uint32_t>(w[i]);
    all.offsets[row] = 128 * sum;
  }
}

struct Terms {
  const uint32_t* terms;
  int64_t count;
  uint32_t* sums;
};

JAXCONV_LOOP SubtractLoop(const Terms& terms) {
  for (int64_t i = 0; i < terms.count; ++i) terms.sums[i] -= terms.terms[i];
}

JAXCONV_FOR_PROCESSORS(Flip, FlipLoop, const Bytes&)
JAXCONV_FOR_PROCESSORS(AddRows, AddRowsLoop, const FilterRows&)
JAXCONV_FOR_PROCESSORS(SumRows, SumRowsLoop, const FilterRows&)
JAXCONV_FOR_PROCESSORS(Subtract, SubtractLoop, const Terms&)

}  // namespace

ConvProblem WithoutPadding(const ConvProblem& p) {
  ConvProblem copied = p;
  for (int a = 0; a < 3; ++a) {
    copied.in[a] = (p.out[a] - 1) * p.stride[a] + (p.filter[a] - 1) * p.dilation[a] + 1;
    copied.pad_lo[a] = copied.pad_hi[a] = 0;
  }
  return copied;
}

void CopyImages(const ConvProblem& p, bool flip, const void* x, void* copy) {
  static const auto flip_bytes = FlipForThisProcessor();
  const Spatial extents = WithoutPadding(p).in;
  const auto* from = static_cast<const uint8_t*>(x);
  auto* to = static_cast<uint8_t*>(copy);
  const auto pad = [&](int64_t elements) {
    std::memset(to, flip ? kSignBit : 0, elements);
    to += elements;
  };
  const auto take = [&](const uint8_t* row, int64_t elements) {
    if (flip) {
      flip_bytes({row, elements, to});
    } else {
      std::memcpy(to, row, elements);
    }
    to += elements;
  };
  if (extents == p.in && p.pad_lo == Spatial{0, 0, 0}) return take(from, p.x_elements());
  const int64_t row = extents[2] * p.c, left = std::min(p.pad_lo[2], extents[2]);
  const int64_t middle = std::clamp<int64_t>(extents[2] - left, 0, p.in[2]);
  for (int64_t image = 0; image < p.n; ++image) {
    for (int64_t e0 = 0; e0 < extents[0]; ++e0) {
      for (int64_t e1 = 0; e1 < extents[1]; ++e1) {
        const int64_t i0 = e0 - p.pad_lo[0], i1 = e1 - p.pad_lo[1];
        if (i0 < 0 || i0 >= p.in[0] || i1 < 0 || i1 >= p.in[1]) {
          pad(row);
          continue;
        }
        pad(left * p.c);
        take(from + ((image * p.in[0] + i0) * p.in[1] + i1) * p.in[2] * p.c, middle * p.c);
        pad(row - (left + middle) * p.c);
      }
    }
  }
}

int64_t OffsetBlocks(const ConvProblem& p) { return CeilDiv(p.k, kChannels); }

void MakeOffsets(const ConvProblem& p, const void* w, int64_t block, uint32_t* offsets) {
  const int64_t begin = block * kChannels, channels = std::min(kChannels, p.k - begin);
  const int64_t terms = p.taps() * p.c_per_group();
  const auto* first = static_cast<const int8_t*>(w);
  if (p.filter_layout == FilterLayout::kKrsc) {
    static const auto sum_rows = SumRowsForThisProcessor();
    return sum_rows({first + begin * terms, channels, terms, terms, offsets + begin});
  }
  static const auto add_rows = AddRowsForThisProcessor();
  add_rows({first + begin, terms, p.k, channels, offsets + begin});
}

void SubtractOffsets(const ConvProblem& p, const uint32_t* offsets, int64_t pixels, void* sums) {
  static const auto subtract = SubtractForThisProcessor();
  uint32_t terms[kBlock];
  EachBlock(
      p.k, 0, pixels,
      [&](int64_t channel, int64_t channels, int64_t repeated) {
        RepeatTerm(offsets, channel, channels, repeated, terms);
      },
      [&](int64_t element, int64_t count) {
        subtract({terms, count, static_cast<uint32_t*>(sums) + element});
      });
}

}  // namespace jaxconv::cpu
