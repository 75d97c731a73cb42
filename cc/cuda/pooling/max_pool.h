// Max pooling in one pass: the maxima of windows and their positions.
//
//     z        = x, or max(round((x - mean) * scale + offset), 0) (batch norm and ReLU)
//     maximum  = max of z over the window, with -inf in the padding
//     place    = the position of the selected element in its window (windows.h)
//     operand  = x at this position
//
// The window is searched in row-major order. An element replaces the selected one unless the
// selected one is greater or equal. So the first of equal elements is selected; in a window with
// NaN, the last NaN or an element after it. After ReLU, a maximum that is not above 0 has the place
// kNoPlace and the operand 0, because x has no gradient there.
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
  const float* mean;  // (channels,); null, like scale and offset, if z is x
  const float* scale;
  const float* offset;
  void* maxima;
  uint8_t* places;  // or null
  void* operands;   // or null; with places only
  int64_t walk;     // the most windows of a column that one thread computes (plan.h)
};

// Unimplemented: a type, windows or a number of channels that the kernels do not accept; operands
// whose address is no multiple of 16 bytes.
//
// Args:
//   sm90: whether the device runs code of sm_90a, which compares pairs of bfloat16.
Status LaunchMaxPool(DType dtype, const MaxPool& pool, bool sm90, void* stream);

// The same by kernels compiled for sm_90a, for checked operands.
Status LaunchMaxPoolSm90(DType dtype, const PassForm& form, const MaxPool& pool, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_POOLING_MAX_POOL_H_
