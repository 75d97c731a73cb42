// igemm_wgmma, patches: dgrad of windows that do not overlap, the instances *_pingpong_patches
// (sm_90a). A pixel of dy times the filter is a whole patch of dx.
//
//     rows = pixels of dy, columns = elements of a patch, (r, s, c), reduction = K
//
// The kernel is that of pingpong_sm90.cuh. Its store puts row r of a patch, S C elements, at its
// place in row r of the patch's pixels (TileStore::Rows); rows are multiples of 16 bytes.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_PATCHES_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_PATCHES_SM90_CUH_

#include "cuda/igemm_wgmma/pingpong_sm90.cuh"
#include "cuda/igemm_wgmma/wgmma_tile_sm90.cuh"

namespace jaxconv::igemm_wgmma {

template <class Tile>
struct PatchTile : Tile {
  static constexpr bool kPatches = true;
};

template <Op kOp, DType kType, int kBlocks, int kN, int kStages, int kStagingBytes>
struct Patches
    : PingpongForm<
          kOp, kType,
          PatchTile<WgmmaTile<2, true, kBlocks, kN, 0, kStages, false, 0, 0, kStagingBytes>>> {};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_PATCHES_SM90_CUH_
