// XLA's own convolution as a candidate: its predicted time on a GPU.
#ifndef JAXCONV_CUDA_COMMON_XLA_COST_H_
#define JAXCONV_CUDA_COMMON_XLA_COST_H_

#include <string_view>

#include "core/conv_problem.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

// What XLA's kernels for a convolution compute and move, in microseconds at the GPU's full rates.
// The first three fields name the line of the calibration (cuda/calibration) that says which shares
// of these rates the kernels reach.
struct XlaTerms {
  std::string_view problem_class, operations, operands;
  double compute_us = 0;  // FLOPs, those of padded tiles included, at the rate of a pipe
  double memory_us = 0;   // bytes of every tensor at the DRAM rate
  double passes_us = 0;   // kernels before and after: transposes, zeros between pixels, reductions
};

// The terms of a convolution without its epilogue. Returns false if XLA is no candidate: nothing
// like the problem was measured, or the measured error exceeds the problem's precision.
bool XlaTermsOf(const ConvProblem& problem, const Gpu& gpu, XlaTerms* terms);

// Microseconds of lax's convolution inside a program, with the copies and layout changes around it,
// and the pass over its result where the problem has an epilogue. 0 if XLA is no candidate.
double PredictXlaMicroseconds(const ConvProblem& problem, const Gpu& gpu);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_XLA_COST_H_
