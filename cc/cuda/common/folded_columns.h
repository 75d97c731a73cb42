// Windows that do not overlap and have no padding, such as the patches of a ViT.
//
// If S equals the column stride, S neighbouring pixels of C channels are one pixel of S C channels,
// without moving data:
//
//     x (N, H, W, C)   = (N, H, W / S, S C)
//     w (R, S, C, K)   = (R, 1, S C, K)         krsc: (K, R, S, C) = (K, R, 1, S C)
//
// The folded problem has the same results in the same places. Its pixels are S times as long, which
// suits 16-byte copies and the k-blocks of a GEMM: the 3 channels of a ViT become 48, the 96 of a
// ConvNeXt downsampling 192.
//
// If R equals the row stride, each row of windows is a separate image of R rows:
//
//     x (N, H, W, C)   = (N H / R, R, W, C)
//     y (N, P, Q, K)   = (N P, 1, Q, K)
//
// This removes the stride, which TMA limits to 8 and which splits a dgrad into residue classes.
#ifndef JAXCONV_CUDA_COMMON_FOLDED_COLUMNS_H_
#define JAXCONV_CUDA_COMMON_FOLDED_COLUMNS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"

namespace jaxconv {

// Returns false if the problem cannot be folded. FoldRows folds the outermost axis that has
// windows.
bool FoldColumns(const ConvProblem& problem, ConvProblem* folded);
bool FoldRows(const ConvProblem& problem, ConvProblem* folded);

// The kernel's fastest predicted plan: for the problem, with folded columns, or with folded columns
// and rows. The choice does not depend on `slices`, so that a call gets the plan that selection
// predicted.
Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_FOLDED_COLUMNS_H_
