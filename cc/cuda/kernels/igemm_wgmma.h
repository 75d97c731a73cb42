// igemm_wgmma: implicit GEMM by wgmma and the tensor copy engine, for sm_90 alone. See
// igemm_wgmma_sm90.cuh for the kernel. Plain C++.
#ifndef JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_H_
#define JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_H_

#include <vector>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/device/igemm_wgmma_params.h"
#include "cuda/select/kernel_row.h"

namespace jaxconv {

// "Pingpong": the warpgroups take turns at tiles of their own. "Rows": the taps of a filter row
// share a load of activations. "Columns": pixels are the columns of the product, in pingpong.
// "Resident": rows, and the filter stays in shared memory. "One tap": for filters of one tap, where
// it stays there too, but in 128x128; "C128": of at most 128 channels. "Cluster": the CTAs of a
// cluster split a tile's reduction (igemm_wgmma_cluster_sm90.cuh). "WgradRows": rows in wgrad, a
// kernel of its own.
enum class WgmmaTileId {
  k128x256,
  k256x128,
  k128x320,
  k128x192,
  k192x128,
  k128x128,
  k128x128Pingpong,
  k192x128Pingpong,
  k128x64Pingpong,
  k128x128PingpongRows,
  k256x64Columns,
  k256x64ColumnsRows,
  k224x64ColumnsRows,
  k192x64ColumnsResident,
  k128x64ColumnsResident,
  k64x256PingpongOneTap,
  k64x64Cluster,
  k192x64WgradRows,
  // Of float32 operands: twice the steps.
  k128x64PingpongResidentF32,
  // wgrad of float32 operands, by mma.sync.
  k128x256Mma,
  k256x128Mma,
  k128x64Mma,
  k64x256PingpongOneTapC128,
  k128x128PingpongOneTap,
  k256x64ColumnsOneTap,
};

// Its rows of the kernel table.
std::vector<KernelRow> IgemmWgmmaRows();

// One specialisation for each operation, operand type and tile, in the files under instances/.
template <Op kOp, DType kType, WgmmaTileId kTile>
Status LaunchIgemmWgmma(const IgemmWgmmaParams& params, const WgmmaOperands& operands,
                        void* stream);

// The same of the tiles that a cluster shares; fprop and dgrad.
template <Op kOp, DType kType, WgmmaTileId kTile>
Status LaunchIgemmWgmmaCluster(const IgemmWgmmaParams& params, const WgmmaOperands& operands,
                               void* stream);

// Counters of the tiles that are taken, all 0 when the kernel after it starts.
Status LaunchWgmmaDrawReset(int32_t* drawn, void* stream);

// The same for wgrad in rows (igemm_wgmma_wgrad_sm90.cuh).
template <DType kType>
Status LaunchWgmmaWgradRows(const IgemmWgmmaParams& params, const WgmmaOperands& operands,
                            void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_H_
