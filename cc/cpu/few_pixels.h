// Forward convolutions whose window is the whole input, of few images, float32: a classifier's last
// layers, and dense layers written as convolutions. They are products of a few rows with a matrix.
#ifndef JAXCONV_CPU_FEW_PIXELS_H_
#define JAXCONV_CPU_FEW_PIXELS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv::cpu {

// Fails, with the reason, where the kernel does not take the problem: unless an image has one output
// pixel that meets every input element, beyond 8 images, with groups, and without AVX-512.
Status CheckFewPixels(const ConvProblem& problem);

// Partial sums of one task, of all independent convolutions.
int64_t FewPixelsPartialBytes(const ConvProblem& problem);

// Writes to `partial` (batch, n, K) what the rows of the filter matrix (taps C, K) of task `task` of
// `tasks` contribute.
void FewPixels(const ConvProblem& problem, int64_t task, int64_t tasks, const float* x,
               const float* w, float* partial);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_FEW_PIXELS_H_
