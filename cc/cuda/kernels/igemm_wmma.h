// igemm_wmma: implicit GEMM on the tensor cores of every GPU since sm_80. See igemm_wmma.cuh for
// the kernel. Plain C++.
#ifndef JAXCONV_CUDA_KERNELS_IGEMM_WMMA_H_
#define JAXCONV_CUDA_KERNELS_IGEMM_WMMA_H_

#include <cstdint>
#include <vector>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/device/igemm_wmma_params.h"
#include "cuda/select/kernel_row.h"

namespace jaxconv {

// Tiles copy 16 bytes at a time; "Half" 8; "ThinB" 16 of A and any width of B; "Narrow" any width.
enum class WmmaTileId {
  k128x256,
  k256x128,
  k128x128,
  k256x64,
  k128x64,
  k64x64,
  k256x16,
  k128x64Half,
  k256x16ThinB,
  k128x64Narrow,
  k128x16Narrow,
};

// Its rows of the kernel table.
std::vector<KernelRow> IgemmWmmaRows();

// One specialisation for each operation, operand type and tile, in the files under instances/.
template <Op kOp, DType kType, WmmaTileId kTile>
Status LaunchIgemmWmma(const IgemmWmmaParams& params, int64_t ctas, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_IGEMM_WMMA_H_
