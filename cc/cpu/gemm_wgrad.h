// The weight gradient as matrix products, dw[tap] = x[tap]^T dy, where x[tap] are the pixels of x
// that the tap multiplies with those of dy. float32 operands, inputs not dilated.
//
// A task owns a range of input channels for all taps or, of few channels, for some taps, so there
// are no partial sums. Rows of dy of at least 192 pixels are multiplied with x in place; for
// shorter ones x[tap] is gathered first.
#ifndef JAXCONV_CPU_GEMM_WGRAD_H_
#define JAXCONV_CPU_GEMM_WGRAD_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv::cpu {

// Fails where oneDNN's own weight gradient, in as many tasks as given, is faster.
Status GemmWgradPays(const ConvProblem& problem, int64_t onednn_tasks);

// How many tasks the work divides into, at most `most`.
int64_t GemmWgradTasks(const ConvProblem& problem, int64_t most);

// Of one task.
int64_t GemmWgradScratchBytes(const ConvProblem& problem, int64_t tasks);

// Overwrites the part of dw that belongs to `task`.
Status GemmWgradTask(const ConvProblem& problem, int64_t task, int64_t tasks, const float* x,
                     const float* dy, float* scratch, float* dw);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_GEMM_WGRAD_H_
