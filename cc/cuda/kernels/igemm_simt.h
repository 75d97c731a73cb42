// igemm_simt: implicit GEMM on the FP32 FMA units. See igemm_simt.cuh for the kernel. Plain C++.
#ifndef JAXCONV_CUDA_KERNELS_IGEMM_SIMT_H_
#define JAXCONV_CUDA_KERNELS_IGEMM_SIMT_H_

#include <cstdint>
#include <vector>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/device/igemm_params.h"
#include "cuda/select/kernel_row.h"

namespace jaxconv {

// "vec" loads 4 neighbouring channels at once, "scalar" one element. A thread computes 8x8 outputs,
// in the "wide" tiles 8x16.
enum class SimtTileId {
  kVec128x128,
  kVec128x128Wide,
  kVec128x64,
  kVec128x64Wide,
  kVec64x64,
  kScalar128x64,
  kScalar128x32,
};

// Its rows of the kernel table.
std::vector<KernelRow> IgemmSimtRows();

// One specialisation for each operation and operand type, each in its own file under instances/.
template <Op kOp, DType kType>
Status LaunchIgemmSimt(SimtTileId tile, const IgemmParams& params, int64_t ctas, void* stream);

// out[i] = partial[0][i] + partial[1][i] + ..., in that order. `partial` is (slices, elements)
// float.
Status LaunchSplitkReduce(const float* partial, int64_t elements, int64_t slices, void* out,
                          DType out_dtype, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_IGEMM_SIMT_H_
