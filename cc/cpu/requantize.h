// The epilogue of a convolution of 8-bit operands on the CPU, from int32 sums: core/epilogue.h, bit
// for bit what the CUDA kernels compute.
#ifndef JAXCONV_CPU_REQUANTIZE_H_
#define JAXCONV_CPU_REQUANTIZE_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "cpu/epilogue_terms.h"

namespace jaxconv::cpu {

// Writes elements [begin, begin + count), whole pixels, of a channels-last output from their sums:
// sums[0] belongs to element `begin`; `out` and the terms belong to the whole output. `sums` may be
// an int32 output itself. Sets and restores the calling thread's floating-point mode, because XLA's
// threads flush denormal numbers to zero.
void Requantize(const ConvProblem& problem, const EpilogueTerms& terms, const int32_t* sums,
                int64_t begin, int64_t count, void* out);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_REQUANTIZE_H_
