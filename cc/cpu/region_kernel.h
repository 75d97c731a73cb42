// Forward and data-gradient kernels for float32 that compute regions without oneDNN.
#ifndef JAXCONV_CPU_REGION_KERNEL_H_
#define JAXCONV_CPU_REGION_KERNEL_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv::cpu {

struct RegionKernel {
  // Fails, with the reason, if the kernel does not accept the problem.
  Status (*check)(const ConvProblem& problem);
  // Fails if oneDNN is as fast.
  Status (*pays)(const ConvProblem& problem);
  // The elements of one independent convolution's packed filter, and the packing function.
  int64_t (*packed_elements)(const ConvProblem& problem);
  void (*pack)(const ConvProblem& problem, const float* w, float* packed);
  int64_t (*scratch_bytes)(const ConvProblem& problem);  // of one task
  // Computes rows [row_begin, row_end) of the result image `to` (y, or x for a data gradient) from
  // the operand image `from`. Rows count along the outermost of the problem's spatial axes.
  void (*compute)(const ConvProblem& problem, const float* from, const float* packed, float* to,
                  int64_t row_begin, int64_t row_end, float* scratch);
};

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_REGION_KERNEL_H_
