// Copies from global to swizzled shared memory: the packed filter, and the pixels of x under its
// taps.
//
// The reduction is the packed filter's row: one flat index over (tap, block of 32 channels), in the
// layout's order. A thread always copies the same column of a k-block, so it tracks one tap and one
// block from k-block to k-block, adds the tap's offset from the table once, and then needs a mask
// and an address for each of its rows. The padding, rows past the last, and the reduction past its
// end are zeros.
#ifndef JAXCONV_CUDA_IMMA_NCHW32_LOADERS_CUH_
#define JAXCONV_CUDA_IMMA_NCHW32_LOADERS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/mma_tile.cuh"
#include "cuda/imma_nchw32/params.h"
#include "cuda/ptx/cp_async.cuh"

namespace jaxconv::imma_nchw32 {

// An output pixel: the pixel of x under tap 0, which may lie outside, and a mask with one bit for
// each tap coordinate of each padded axis, set if it lies inside x. A tap is inside if all its bits
// are set. Bit 31 is never set.
struct GatherPixel {
  int32_t pixel;
  uint32_t taps;
};

// The tap coordinates r with 0 <= first + r * dilation < in, as bits.
__device__ __forceinline__ uint32_t TapsInside(const Axis& axis, int32_t first) {
  const auto dilation = static_cast<int32_t>(axis.dilation.divisor);
  const int32_t low = first < 0 ? axis.dilation.Div(dilation - 1 - first) : 0;
  const int32_t left = axis.in - first;  // first + r * dilation < in
  const int32_t high = min(axis.mask_bits, left > 0 ? axis.dilation.Div(left + dilation - 1) : 0);
  return high > low ? ((uint32_t{1} << (high - low)) - 1) << low : 0;
}

__device__ __forceinline__ GatherPixel LocatePixel(const Params& params, int32_t row) {
  if (row >= params.rows) return {0, 0};  // pixel 0 is a valid address, even if no tap is masked
  int32_t rest = row, first[3];
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    params.axis[a].out.Divmod(rest, &rest, &first[a]);
    first[a] = first[a] * params.axis[a].stride - params.axis[a].pad;
  }
  GatherPixel result{0, 0};
  int32_t bit = 0;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    result.pixel = result.pixel * params.axis[a].in + first[a];
    result.taps |= TapsInside(params.axis[a], first[a]) << bit;
    bit += params.axis[a].mask_bits;
  }
  result.pixel += rest * params.image_pixels;
  return result;
}

// Distributes an operand of a stage over a CTA's threads: each has one column of kBytes and kPasses
// rows.
template <class Operand, int kThreads, int kBytes>
struct Owner {
  static constexpr int kColumns = Operand::kRowBytes / kBytes;
  static constexpr int kRowsOfPass = kThreads / kColumns;
  static constexpr int kPasses = Operand::kRows / kRowsOfPass;
  static_assert(kRowsOfPass * kColumns == kThreads && kPasses * kRowsOfPass == Operand::kRows);

  __device__ static int Column() { return threadIdx.x % kColumns; }
  __device__ static int Row() { return threadIdx.x / kColumns; }
};

// B: rows are output channels. A block of 32 channels is permuted so that a thread's sums in four
// neighbouring mma tiles belong to eight neighbouring channels: column 2 t + e of tile j is channel
// 8 t + 2 j + e.
template <class Tile, class Operand>
class FilterLoader {
 public:
  __device__ __forceinline__ FilterLoader(const Params& params, int32_t group, int32_t n_first)
      : row_bytes_(params.w_row),
        rows_left_(params.channels - n_first - Own::Row()),
        k_left_(params.w_row - Own::Column() * 16),
        offset_(Operand::Offset(Permuted(Own::Row()), Own::Column())),
        source_(static_cast<const char*>(params.w) + group * params.w_group +
                int64_t{n_first + Own::Row()} * params.w_row + Own::Column() * 16) {}

  template <int kPart, int kParts>
  __device__ __forceinline__ void Issue(uint32_t operand) {
    const int32_t rows = k_left_ > 0 ? rows_left_ : 0;
#pragma unroll
    for (int i = Own::kPasses * kPart / kParts; i < Own::kPasses * (kPart + 1) / kParts; ++i) {
      const int row = Permuted(i * Own::kRowsOfPass);
      CopyAsync<16>((operand + offset_ + row * Operand::kRowBytes) ^ (Operand::Swizzle(row) * 16),
                    OffsetBytes(source_, i * Own::kRowsOfPass, row_bytes_),
                    i * Own::kRowsOfPass < rows);
    }
  }
  __device__ __forceinline__ void Advance() {
    source_ += Operand::kRowBytes;
    k_left_ -= Operand::kRowBytes;
  }

 private:
  using Own = Owner<Operand, Tile::kThreads, 16>;
  // The row of shared memory that holds a channel. It permutes the bits of the channel number, so
  // it applies to rows within a pass and to passes separately.
  __device__ static constexpr int Permuted(int channel) {
    return channel / 32 * 32 + channel % 8 / 2 * 8 + channel % 32 / 8 * 2 + channel % 2;
  }

  int32_t row_bytes_, rows_left_, k_left_;
  uint32_t offset_;
  const char* source_;
};

// A: rows are output pixels. kBytes of a copy: 16, half a block of 32 channels; or 4, a pixel of 4
// channels, where neighbouring threads copy neighbouring taps of one output pixel.
template <class Tile, class Operand, int kBytes>
class GatherLoader {
 public:
  __device__ __forceinline__ GatherLoader(const Params& params, int32_t group,
                                          const GatherPixel* table)
      : params_(params),
        offset_(Operand::Offset(Own::Row(), Own::Column() * kBytes / 16) +
                Own::Column() * kBytes % 16),
        k_left_(params.w_row - Own::Column() * kBytes) {
    const int32_t block = kBytes == 4 ? Own::Column() : Own::Column() / 2;
    source_ = OffsetBytes(static_cast<const char*>(params.x) + group * params.x_group,
                          params.first[block], Unit()) +
              (kBytes == 4 ? 0 : Own::Column() % 2 * 16);
    params.inner.Divmod(block, &outer_, &inner_);
    bits_ = k_left_ > 0 ? params.tap[Tap()].bits : kEnd;
#pragma unroll
    for (int i = 0; i < Own::kPasses; ++i) row_[i] = table[Own::Row() + i * Own::kRowsOfPass];
  }

  template <int kPart, int kParts>
  __device__ __forceinline__ void Issue(uint32_t operand) {
    const int32_t pixel_bytes = kBytes == 4 ? 4 : params_.pixel_units * 32;
#pragma unroll
    for (int i = Own::kPasses * kPart / kParts; i < Own::kPasses * (kPart + 1) / kParts; ++i) {
      CopyAsync<kBytes>(operand + offset_ + i * Own::kRowsOfPass * Operand::kRowBytes,
                        OffsetBytes(source_, row_[i].pixel, pixel_bytes),
                        (bits_ & ~row_[i].taps) == 0);
    }
  }

  // Computes the source in the next k-block, long before its use.
  __device__ __forceinline__ void Advance() {
    k_left_ -= Operand::kRowBytes;
    const auto extent = static_cast<int32_t>(params_.inner.divisor);
    inner_ += params_.inner_step;
    const bool carry = inner_ >= extent;
    inner_ -= carry ? extent : 0;
    outer_ += params_.outer_step + carry;
    const auto& tap = params_.tap[Tap()];
    source_ = OffsetBytes(source_, carry ? tap.arrival[1] : tap.arrival[0], Unit());
    bits_ = k_left_ > 0 ? tap.bits : kEnd;
  }

 private:
  using Own = Owner<Operand, Tile::kThreads, kBytes>;
  static_assert(Operand::Swizzle(Own::kRowsOfPass) == 0);

  __device__ static constexpr int32_t Unit() { return kBytes == 4 ? 4 : 32; }
  __device__ __forceinline__ int32_t Tap() const {
    return kBytes == 4 || params_.taps_inside != 0 ? inner_ : outer_;
  }

  const Params& params_;
  uint32_t offset_;
  int32_t k_left_, inner_, outer_;
  const char* source_;
  uint32_t bits_;
  GatherPixel row_[Own::kPasses];
};

// Both operands, with the interface that MmaMainloop needs.
template <class Tile, class A, class B>
struct Loader {
  A a;
  B b;

  __device__ __forceinline__ void Prepare() {}
  template <int kPart, int kParts>
  __device__ __forceinline__ void IssuePart(uint32_t slot) {
    a.template Issue<kPart, kParts>(slot);
    b.template Issue<kPart, kParts>(slot + Tile::kBytesOfA);
  }
  __device__ __forceinline__ void Advance() {
    a.Advance();
    b.Advance();
  }
  __device__ __forceinline__ void Finish(uint32_t) {}
};

}  // namespace jaxconv::imma_nchw32

#endif  // JAXCONV_CUDA_IMMA_NCHW32_LOADERS_CUH_
