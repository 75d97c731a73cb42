// The epilogue of a convolution of floating-point operands on the CPU, from float32 sums.
#ifndef JAXCONV_CPU_FLOAT_EPILOGUE_H_
#define JAXCONV_CPU_FLOAT_EPILOGUE_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "cpu/epilogue_terms.h"

namespace jaxconv::cpu {

// Writes elements [begin, begin + count), whole pixels, of a channels-last output and of pre from
// their sums: sums[0] belongs to element `begin`; `out` and the terms belong to the whole output.
// `sums` may be a float32 output itself.
void FinishSums(const ConvProblem& problem, const EpilogueTerms& terms, const float* sums,
                int64_t begin, int64_t count, void* out);

// The statistics (2, K) of elements [begin, begin + count), whole pixels: every channel's mean and
// sum of squared deviations from it. The moments of a few pixels at a time are merged in double, in
// order of the pixels.
void Moments(const ConvProblem& problem, const void* out, int64_t begin, int64_t count,
             double* moments);

// Merges the moments of `count` more pixels into those of `total` pixels.
void MergeMoments(int64_t channels, int64_t total, const double* more, int64_t count,
                  double* moments);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_FLOAT_EPILOGUE_H_
