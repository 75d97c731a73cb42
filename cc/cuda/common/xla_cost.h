// XLA's own convolution as a candidate: what it is predicted to take on a GPU.
#ifndef JAXCONV_CUDA_COMMON_XLA_COST_H_
#define JAXCONV_CUDA_COMMON_XLA_COST_H_

#include "core/conv_problem.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

// Microseconds of lax's convolution inside a program, or 0 where no prediction exists or its
// accuracy is below what the problem's precision asks for: then it is no candidate.
double PredictXlaMicroseconds(const ConvProblem& problem, const Gpu& gpu);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_XLA_COST_H_
