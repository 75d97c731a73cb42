// The weight gradient as matrix products, dw[tap] = x[tap]^T dy, where x[tap] holds the pixels of x
// that the tap pairs with those of dy. float32 operands, no input dilation.
//
// A task has a range of input channels for all taps or, with few channels, for some taps, so there
// are no partial sums. Rows of dy of at least 192 pixels are multiplied by x in place; for shorter
// ones x[tap] is gathered first.
#ifndef JAXCONV_CPU_GEMM_WGRAD_H_
#define JAXCONV_CPU_GEMM_WGRAD_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv::cpu {

// Fails if oneDNN's own weight gradient with this many tasks is faster.
Status GemmWgradPays(const ConvProblem& problem, int64_t onednn_tasks);

// The number of tasks, at most `most`, into which the work divides.
int64_t GemmWgradTasks(const ConvProblem& problem, int64_t most);

// Bytes of one task's scratch memory.
int64_t GemmWgradScratchBytes(const ConvProblem& problem, int64_t tasks);

// Computes the part of dw that belongs to `task`.
Status GemmWgradTask(const ConvProblem& problem, int64_t task, int64_t tasks, const float* x,
                     const float* dy, float* scratch, float* dw);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_GEMM_WGRAD_H_
