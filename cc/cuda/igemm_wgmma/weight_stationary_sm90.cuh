// igemm_wgmma, weight-stationary: filter-row with a filter that stays in shared memory for the
// kernel's life, the instances *_weight_stationary (sm_90a).
//
// The kernel is that of filter_row_sm90.cuh. Its producer loads the filter's k-blocks with the first
// tile; Stationary(k): k-block k has arrived, waited for in a consumer's first tile.
//
// Shared memory of 128x64 swap-AB: 7 stages of 17 KB, 9 k-blocks of 8 KB, 16 KB of staging; of
// 128x64 in float32: 4 stages of 17 KB, 18 k-blocks of 8 KB, no staging. Registers as in
// pingpong_sm90.cuh. Refused, beside what filter_row_sm90.cuh refuses: filters that do not fit,
// groups, batches.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WEIGHT_STATIONARY_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WEIGHT_STATIONARY_SM90_CUH_

#include "cuda/igemm_wgmma/filter_row_sm90.cuh"
#include "cuda/igemm_wgmma/swap_ab_tile_sm90.cuh"
#include "cuda/igemm_wgmma/wgmma_tile_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// For float32 operands: results are stored from the fragments, without staging.
template <Op kOp, DType kType, int kBlocks, int kN, int kStages, int kStationary>
struct WeightStationary
    : FilterRowForm<kOp, kType,
                    WgmmaTile<2, true, kBlocks, kN, 0, kStages, true, 0, kStationary, 0>> {};

template <Op kOp, DType kType, int kPixels, int kStages, int kStationary>
struct SwapAbWeightStationary
    : FilterRowForm<kOp, kType, SwapAbTile<kPixels, kStages, true, 0, kStationary>> {};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WEIGHT_STATIONARY_SM90_CUH_
