// Forward convolutions with few output channels, float32: the last layer of a decoder or of a
// segmentation network.
#ifndef JAXCONV_CPU_FEW_OUTPUTS_H_
#define JAXCONV_CPU_FEW_OUTPUTS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv::cpu {

// Fails, with the reason, where the kernel does not take the problem: beyond 8 output channels, with
// groups, and without AVX-512.
Status CheckFewOutputs(const ConvProblem& problem);

// Fails where oneDNN is as fast.
Status FewOutputsPays(const ConvProblem& problem);

// The filter of one independent convolution, (taps, C, K), as (taps, K, C).
void PackFewOutputs(const ConvProblem& problem, const float* w, float* packed);

// Computes the output rows [row_begin, row_end) of one image from the packed filter. `x` and `y`
// point at the image; rows count along the outermost of the problem's spatial axes.
void FewOutputs(const ConvProblem& problem, const float* x, const float* packed, float* y,
                int64_t row_begin, int64_t row_end);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_FEW_OUTPUTS_H_
