// Forward convolutions with few output pixels, float32: windows that are the whole input (a
// classifier's last layers, and dense layers written as convolutions), and large filters on small
// maps. They are products of a matrix with few rows and the filter matrix.
#ifndef JAXCONV_CPU_FEW_PIXELS_H_
#define JAXCONV_CPU_FEW_PIXELS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv::cpu {

// Fails, with the reason, if the kernel does not accept the problem: more than 128 output pixels
// over all images, groups, no AVX-512.
Status CheckFewPixels(const ConvProblem& problem);

// Fails if oneDNN is as fast.
Status FewPixelsPays(const ConvProblem& problem);

// Bytes of one task's partial sums, for all independent convolutions.
int64_t FewPixelsPartialBytes(const ConvProblem& problem);

// Bytes of one task's scratch memory.
int64_t FewPixelsScratchBytes(const ConvProblem& problem);

// Writes to `partial` (batch, pixels, K) the contribution of the filter matrix's (taps C, K) rows
// that belong to task `task` of `tasks`.
void FewPixels(const ConvProblem& problem, int64_t task, int64_t tasks, const float* x,
               const float* w, float* scratch, float* partial);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_FEW_PIXELS_H_
