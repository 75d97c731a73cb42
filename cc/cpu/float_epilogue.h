// The epilogue of a convolution of floating-point operands on the CPU, from float32 sums.
#ifndef JAXCONV_CPU_FLOAT_EPILOGUE_H_
#define JAXCONV_CPU_FLOAT_EPILOGUE_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "cpu/epilogue_terms.h"

namespace jaxconv::cpu {

// Writes elements [begin, begin + count) of a channels-last output, whole pixels, and of pre from
// their sums: sums[0] is that of element `begin`; `out` and the terms are those of the whole
// output. `sums` may be the output itself, if that is float32.
void FinishSums(const ConvProblem& problem, const EpilogueTerms& terms, const float* sums,
                int64_t begin, int64_t count, void* out);

// The statistics of elements [begin, begin + count), whole pixels: every channel's mean and sum of
// squared deviations from it, (2, K). They are added up in double, in the order of the pixels, from
// those of a few pixels.
void Moments(const ConvProblem& problem, const void* out, int64_t begin, int64_t count,
             double* moments);

// Merges the moments of `count` pixels more into those of `total` pixels.
void MergeMoments(int64_t channels, int64_t total, const double* more, int64_t count,
                  double* moments);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_FLOAT_EPILOGUE_H_
