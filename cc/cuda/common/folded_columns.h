// Patches: windows that do not overlap along W.
//
// Where a window's columns are as many as its stride, without padding, S neighbouring pixels of C
// channels are one pixel of S C channels, in memory as they lie:
//
//     x (N, H, W, C)   = (N, H, W / S, S C)
//     w (R, S, C, K)   = (R, 1, S C, K)         krsc: (K, R, S, C) = (K, R, 1, S C)
//
// The folded problem has the same results in the same places. Its pixels are S times as long, for
// copies of 16 bytes and for the k-blocks of a GEMM: a ViT's 3 channels become 48, a ConvNeXt's
// downsampling of 96 becomes 192.
#ifndef JAXCONV_CUDA_COMMON_FOLDED_COLUMNS_H_
#define JAXCONV_CUDA_COMMON_FOLDED_COLUMNS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"

namespace jaxconv {

// False where the problem cannot be folded.
bool FoldColumns(const ConvProblem& problem, ConvProblem* folded);

// The kernel's plan for the problem or for its folded form, whichever is predicted faster. The choice
// does not depend on the slices, so that a call finds the plan that selection predicted.
Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_FOLDED_COLUMNS_H_
