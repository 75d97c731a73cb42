// Instances for channel counts that are not multiples of 8: the operands are copied into the
// workspace with their channels rounded up to 16, an instance that copies 16 bytes at a time
// computes there, and its result is copied back without the padding.
//
// The copies cost two passes over a tensor. In return the instance runs at full throughput, of
// which kernels with narrower copies reach a third to a half. Padding never reaches the result:
// zeros are multiplied by zeros, and the padded outputs are dropped.
#ifndef JAXCONV_CUDA_COMMON_PADDED_CHANNELS_H_
#define JAXCONV_CUDA_COMMON_PADDED_CHANNELS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "core/status.h"
#include "cuda/common/kernel.h"

namespace jaxconv {

// The padded form of an instance, which must outlive it.
KernelDesc PaddedKernel(const KernelDesc& kernel, const char* name);

// A copy of a matrix of 16-bit elements in blocks of rows: to[block][row][column] =
// from[block][row][column] where that exists, else 0.
struct PitchedCopy {
  int64_t elements = 0;  // of `to`; 0: nothing is copied
  int32_t from_rows = 1, from_columns = 1;
  FastDivmod to_rows, to_columns;
  const void* from = nullptr;
  void* to = nullptr;  // aligned to 16 bytes
};

// The parameter block of a padded plan.
struct PaddedParams {
  PitchedCopy lhs, rhs, out;                                 // without their pointers
  int64_t rhs_offset = 0, out_offset = 0, inner_offset = 0;  // bytes in the workspace; lhs is first
  Plan inner;                                                // on padded channels
};

// Enqueues both copies in one launch.
Status LaunchPitchedCopies(const PitchedCopy& first, const PitchedCopy& second, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_PADDED_CHANNELS_H_
