// Forward convolutions with few output pixels, float32: windows that are the whole input (a
// classifier's last layers, and dense layers written as convolutions), and large filters on small
// maps. They are products of a few rows with a matrix, the filter.
#ifndef JAXCONV_CPU_FEW_PIXELS_H_
#define JAXCONV_CPU_FEW_PIXELS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv::cpu {

// Fails, with the reason, where the kernel does not take the problem: beyond 128 output pixels of
// all images, with groups, and without AVX-512.
Status CheckFewPixels(const ConvProblem& problem);

// Fails where oneDNN is as fast.
Status FewPixelsPays(const ConvProblem& problem);

// Partial sums of one task, of all independent convolutions.
int64_t FewPixelsPartialBytes(const ConvProblem& problem);

// Of one task.
int64_t FewPixelsScratchBytes(const ConvProblem& problem);

// Writes to `partial` (batch, pixels, K) what the rows of the filter matrix (taps C, K) of task
// `task` of `tasks` contribute.
void FewPixels(const ConvProblem& problem, int64_t task, int64_t tasks, const float* x,
               const float* w, float* scratch, float* partial);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_FEW_PIXELS_H_
