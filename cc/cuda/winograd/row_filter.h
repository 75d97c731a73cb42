// The layout of the transformed filter for fused_row_sm90.cuh.
#ifndef JAXCONV_CUDA_WINOGRAD_ROW_FILTER_H_
#define JAXCONV_CUDA_WINOGRAD_ROW_FILTER_H_

#include <cstdint>

#include "core/fast_divmod.h"

namespace jaxconv::winograd {

// U of the one-dimensional F(m, 3), float16:
//
//     [group][columns / 128][reduction / 32][filter row 3][point m + 2][128 columns / 8]
//         [32 of the reduction / 8][8 columns][8 of the reduction]
//
// The last four axes are wgmma's operand B without a swizzle: matrices of 8 columns by 16 bytes.
// All points of a filter row and 32 of the reduction are therefore contiguous, and TMA loads them
// at full throughput in boxes with rows of 512 bytes; rows of 64 bytes take 1.8 cycles each, longer
// than the products (docs/notes/winograd.md).
//
// Columns 8 j + 2 t + e of 32 hold the output channels 8 t + 2 j + e. A wgmma thread holds columns
// 8 j + 2 t and 8 j + 2 t + 1 for every j, hence eight neighbouring channels, and stores 16 bytes
// from registers.
//
// Columns and the reduction are padded to multiples of 128 and 32: the reduction with zeros, which
// the kernel multiplies, the columns with arbitrary values.
struct RowFilter {
  static constexpr int64_t kColumns = 128, kReduction = 32, kTaps = 3;
  static constexpr int64_t kPointElements = kColumns * kReduction;

  int64_t points = 6;
  int64_t column_blocks = 1, reduction_blocks = 1;  // of a group

  RowFilter() = default;
  RowFilter(int64_t points, int64_t columns, int64_t reduction)
      : points(points),
        column_blocks((columns + kColumns - 1) / kColumns),
        reduction_blocks((reduction + kReduction - 1) / kReduction) {}

  // Elements of a group.
  int64_t elements() const {
    return column_blocks * reduction_blocks * kTaps * points * kPointElements;
  }

  // The offset of an element of group 0: filter row r, point, output channel k, channel c of the
  // reduction.
  JAXCONV_HOST_DEVICE int64_t Offset(int32_t r, int32_t point, int32_t k, int32_t c) const {
    const int32_t column = k % 128 / 32 * 32 + k / 2 % 4 * 8 + k / 8 % 4 * 2 + k % 2;
    const int64_t block = ((k / 128 * reduction_blocks + c / 32) * kTaps + r) * points + point;
    return block * kPointElements + (column / 8 * 4 + c % 32 / 8) * 64 + column % 8 * 8 + c % 8;
  }
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_ROW_FILTER_H_
