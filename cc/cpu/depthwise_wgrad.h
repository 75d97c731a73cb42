// The weight gradient of a depthwise convolution (one input and one output channel per group),
// float32.
#ifndef JAXCONV_CPU_DEPTHWISE_WGRAD_H_
#define JAXCONV_CPU_DEPTHWISE_WGRAD_H_

#include <cstdint>

#include "core/conv_problem.h"

namespace jaxconv::cpu {

// Whether this processor runs the kernel (AVX-512).
bool DepthwiseWgradRuns();

// Adds to `dw` (spatial, C) the contribution of output rows [row_begin, row_end) of one image. `x`
// and `dy` point to the image; rows count along the outermost of the problem's spatial axes.
void DepthwiseWgradAdd(const ConvProblem& problem, const float* x, const float* dy, float* dw,
                       int64_t row_begin, int64_t row_end);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_DEPTHWISE_WGRAD_H_
