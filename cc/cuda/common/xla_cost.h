// XLA's own convolution as a candidate: its predicted time on a GPU.
#ifndef JAXCONV_CUDA_COMMON_XLA_COST_H_
#define JAXCONV_CUDA_COMMON_XLA_COST_H_

#include "core/conv_problem.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

// Microseconds of lax's convolution inside a program, with the copies and layout changes around it,
// and the pass over its result where the problem has an epilogue. 0 if XLA is no candidate: no such
// problem was measured, or the measured error exceeds the problem's precision.
double PredictXlaMicroseconds(const ConvProblem& problem, const Gpu& gpu);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_XLA_COST_H_
