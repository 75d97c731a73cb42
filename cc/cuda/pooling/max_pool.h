// Max pooling in one pass: the maxima of windows, and where they are.
//
//     z        = x, or max(round((x - mean) * scale + offset), 0), which is batch norm and ReLU
//     maximum  = max of z over the window, -inf in the padding
//     place    = the number of the element that is taken, windows.h
//     operand  = x there
//
// In row-major order an element is left for a later one unless it is greater or equal: of equal
// ones the first is taken, and of a window with NaN one behind the last NaN, or that NaN. Behind a
// ReLU the place is kNoPlace, and the operand 0, where the maximum is not above 0: x has no gradient
// there.
#ifndef JAXCONV_CUDA_POOLING_MAX_POOL_H_
#define JAXCONV_CUDA_POOLING_MAX_POOL_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/pass.h"
#include "cuda/pooling/windows.h"

namespace jaxconv {

struct MaxPool {
  PoolWindows windows;
  const void* x;
  const float* mean;  // (channels,), or null, as scale and offset: z is x
  const float* scale;
  const float* offset;
  void* maxima;
  uint8_t* places;  // or null
  void* operands;   // or null; with places only
  int64_t walk;     // windows of a thread at most (plan.h)
};

// Unimplemented: a type, windows or a number of channels that the kernels do not take, operands
// that do not lie on multiples of 16 bytes.
//
// Args:
//   sm90: whether the device runs code of sm_90a, which compares pairs of bfloat16.
Status LaunchMaxPool(DType dtype, const MaxPool& pool, bool sm90, void* stream);

// The same of kernels that are compiled for sm_90a, of checked operands.
Status LaunchMaxPoolSm90(DType dtype, const PassForm& form, const MaxPool& pool, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_POOLING_MAX_POOL_H_
