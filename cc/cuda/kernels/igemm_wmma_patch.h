// The rows of igemm_wmma for few channels: see igemm_wmma_patch.cuh for the kernels. Plain C++.
#ifndef JAXCONV_CUDA_KERNELS_IGEMM_WMMA_PATCH_H_
#define JAXCONV_CUDA_KERNELS_IGEMM_WMMA_PATCH_H_

#include <cstdint>
#include <vector>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/device/patch_params.h"
#include "cuda/select/kernel_row.h"

namespace jaxconv {

// The extent of the GEMM that has few channels, as a CTA sees it: C * S columns in dgrad, C * R * S
// rows in wgrad. fprop has one tile.
enum class PatchTileId { kFprop, kDgrad16, kDgrad24, kDgrad48, kWgrad32, kWgrad64, kWgrad192 };

// Its rows of the kernel table.
std::vector<KernelRow> IgemmWmmaPatchRows();

// One specialisation for each operand type and tile, in the files under instances/. ctas: of the
// grid's x; 0: as many as the device holds. grid_y: of its y.
template <DType kType, PatchTileId kTile>
Status LaunchPatch(const PatchParams& params, int64_t shared_bytes, int64_t ctas, int64_t grid_y,
                   void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_IGEMM_WMMA_PATCH_H_
