// Rows of other families for channel counts that are not multiples of 8: the operands are copied
// into the workspace with their channels rounded up to 16, a row that copies 16 bytes at a time
// computes there, and its result is copied back without the padding. Plain C++.
//
// The copies cost two passes over a tensor; what they buy is a row's whole rate, where narrow
// copies reach a third to a half of it. Padding never meets the result: zeros are multiplied with
// zeros, and what the padded outputs hold is dropped.
#ifndef JAXCONV_CUDA_KERNELS_PADDED_CHANNELS_H_
#define JAXCONV_CUDA_KERNELS_PADDED_CHANNELS_H_

#include <cstdint>
#include <vector>

#include "core/fast_divmod.h"
#include "core/status.h"
#include "cuda/select/kernel_row.h"

namespace jaxconv {

// Those of `rows` that serve so, each under its name and "_padded".
std::vector<KernelRow> PaddedRows(const std::vector<KernelRow>& rows);

// A copy of a matrix of 16-bit elements, cut into blocks of rows: to[block][row][column] is
// from[block][row][column] where that exists, and 0 elsewhere.
struct PitchedCopy {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t elements = 0;  // of `to`
  int32_t from_rows = 1, from_columns = 1;
  FastDivmod to_rows, to_columns;
};

// Both in one launch. A copy of no elements is left out; `to` is aligned to 16 bytes.
Status LaunchPitchedCopies(const PitchedCopy& first, const PitchedCopy& second, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_PADDED_CHANNELS_H_
