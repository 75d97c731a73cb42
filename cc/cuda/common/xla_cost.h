// XLA's own convolution as a candidate: its predicted time on a GPU.
#ifndef JAXCONV_CUDA_COMMON_XLA_COST_H_
#define JAXCONV_CUDA_COMMON_XLA_COST_H_

#include <string_view>

#include "core/conv_problem.h"
#include "cuda/common/gpu.h"
#include "cuda/common/predicted_time.h"

namespace jaxconv {

// The counts of XLA's kernels for a convolution, and the name of its line in the calibration.
struct XlaTerms {
  std::string_view form, operations, operands;
  // tensor_cores: FLOPs, those of padded tiles included, at the rate of a pipe. dram: bytes of
  // every tensor. launch: kernels before and after: transposes, zeros between pixels, reductions.
  TimeTerms time;
};

// The terms of a convolution without its epilogue. Returns false if XLA is no candidate: no similar
// problem was measured, or the measured error exceeds the problem's precision.
bool XlaTermsOf(const ConvProblem& problem, const Gpu& gpu, XlaTerms* terms);

// Microseconds of lax's convolution inside a program, with the copies and layout changes around it,
// and the pass over its result where the problem has an epilogue. 0 if XLA is no candidate.
double PredictXlaMicroseconds(const ConvProblem& problem, const Gpu& gpu);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_XLA_COST_H_
