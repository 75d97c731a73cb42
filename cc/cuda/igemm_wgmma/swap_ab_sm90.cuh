// igemm_wgmma, swap-AB: 64 output channels as rows and up to 256 pixels as columns, for few output
// channels, the instances *_swap_ab (sm_90a).
//
// The kernel is that of pingpong_sm90.cuh, the tile that of swap_ab_tile_sm90.cuh. Shared memory of
// 256x64: 5 stages of (32 + 8) KB, 16 KB of staging, barriers. Registers: producer 40, consumers
// 232. Named barriers 3 and 4 order the staging of a tile.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_SWAP_AB_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_SWAP_AB_SM90_CUH_

#include "cuda/igemm_wgmma/pingpong_sm90.cuh"
#include "cuda/igemm_wgmma/swap_ab_tile_sm90.cuh"

namespace jaxconv::igemm_wgmma {

template <Op kOp, DType kType, int kPixels, int kStages>
struct SwapAb : PingpongForm<kOp, kType, SwapAbTile<kPixels, kStages>> {};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_SWAP_AB_SM90_CUH_
