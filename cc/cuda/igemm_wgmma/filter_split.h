// The filter for 3xTF32 (three_tf32_sm90.cuh): K-major, each number split into two parts.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_FILTER_SPLIT_H_
#define JAXCONV_CUDA_IGEMM_WGMMA_FILTER_SPLIT_H_

#include <cstdint>

#include "core/status.h"

namespace jaxconv::igemm_wgmma {

// `matrices` matrices of `rows` by `columns` float32 elements, columns being the reduction. An
// element lies at matrix * matrix_stride + row * row_stride + column, or, where it is transposed,
// at matrix * matrix_stride + column * row_stride + row. Rows, columns and strides are multiples of
// 4.
struct FilterSplit {
  int64_t matrices = 0, rows = 0, columns = 0;
  int64_t matrix_stride = 0, row_stride = 0;
  bool transposed = false;
  // Elements of a row of the result: columns, filled up with zeros to a multiple of 16.
  int64_t pitch = 0;

  // Bytes of the result.
  int64_t bytes() const { return 2 * matrices * rows * pitch * int64_t{sizeof(float)}; }
};

// Writes to `out` all matrices of big parts, then all of small parts. Within 16 columns, column 4 t
// + q lies at 4 q + t, so that a thread's four neighbouring channels of the other operand are its
// fragments of two instructions.
Status LaunchFilterSplit(const void* filter, const FilterSplit& split, void* out, void* stream);

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_FILTER_SPLIT_H_
