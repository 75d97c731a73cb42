// Patches: windows that do not overlap, without padding.
//
// Where a window's columns are as many as its stride, S neighbouring pixels of C channels are one
// pixel of S C channels, in memory as they lie:
//
//     x (N, H, W, C)   = (N, H, W / S, S C)
//     w (R, S, C, K)   = (R, 1, S C, K)         krsc: (K, R, S, C) = (K, R, 1, S C)
//
// The folded problem has the same results in the same places. Its pixels are S times as long, for
// copies of 16 bytes and for the k-blocks of a GEMM: a ViT's 3 channels become 48, a ConvNeXt's
// downsampling of 96 becomes 192.
//
// Where its rows are as many as their stride, the R rows of a window are an image:
//
//     x (N, H, W, C)   = (N H / R, R, W, C)
//     y (N, P, Q, K)   = (N P, 1, Q, K)
//
// without a stride, of which TMA takes at most 8 and which splits a data gradient into classes.
#ifndef JAXCONV_CUDA_COMMON_FOLDED_COLUMNS_H_
#define JAXCONV_CUDA_COMMON_FOLDED_COLUMNS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"

namespace jaxconv {

// False where the problem cannot be folded. FoldRows: along the outermost axis that has windows.
bool FoldColumns(const ConvProblem& problem, ConvProblem* folded);
bool FoldRows(const ConvProblem& problem, ConvProblem* folded);

// The kernel's plan for the problem, with folded columns or with folded columns and rows, whichever
// is predicted fastest. The choice does not depend on the slices, so that a call finds the plan
// that selection predicted.
Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_FOLDED_COLUMNS_H_
