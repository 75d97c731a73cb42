// Forward and data-gradient kernels of float32 that compute the regions of a task themselves.
#ifndef JAXCONV_CPU_REGION_KERNEL_H_
#define JAXCONV_CPU_REGION_KERNEL_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv::cpu {

struct RegionKernel {
  // Fails, with the reason, where the kernel does not take the problem.
  Status (*check)(const ConvProblem& problem);
  // Fails where oneDNN is as fast.
  Status (*pays)(const ConvProblem& problem);
  // Elements of the packed filter of one independent convolution, and the packing.
  int64_t (*packed_elements)(const ConvProblem& problem);
  void (*pack)(const ConvProblem& problem, const float* w, float* packed);
  int64_t (*scratch_bytes)(const ConvProblem& problem);  // of one task
  // Computes the rows [row_begin, row_end) of one image `to` of the result, y or for a data
  // gradient x, from an image `from` of the other. Rows count along the outermost of the problem's
  // spatial axes.
  void (*compute)(const ConvProblem& problem, const float* from, const float* packed, float* to,
                  int64_t row_begin, int64_t row_end, float* scratch);
};

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_REGION_KERNEL_H_
