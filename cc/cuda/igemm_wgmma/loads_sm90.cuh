// TMA loads of the activations and of the filter (sm_90a).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_LOADS_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_LOADS_SM90_CUH_

#include <cstdint>

#include "cuda/igemm_wgmma/params.h"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/tma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// Channels of a k-block: 128 bytes, one row of a box in shared memory.
template <typename T>
inline constexpr int32_t kKBlockChannels = 128 / sizeof(T);
// Whether B is MN-major: the filter (tap, C, K) has gemm_n innermost in fprop, the reduction in
// dgrad. wgmma takes TF32 K-major only, so fprop in float32 reads a transposed filter.
template <Op kOp, typename T>
inline constexpr bool kMnMajorFilter = kOp != Op::kDgrad && sizeof(T) == 2;
// Bytes of 64 rows of a box.
inline constexpr int kBoxBytes = 64 * 128;

// Loads a box of pixels from `at` on, 128 bytes of their channels from `c` on.
template <BoxTarget kTarget = BoxTarget::kShared>
__device__ __forceinline__ void LoadBox(int32_t rank, uint32_t shared, const CUtensorMap* map,
                                        uint32_t barrier, int32_t c, const PixelPlace& at,
                                        uint16_t off0, uint16_t off1, uint16_t off2) {
  switch (rank) {
    case 0:
      CopyTile2d<kTarget>(shared, map, barrier, c, at.x);
      break;
    case 1:
      CopyIm2col1d<kTarget>(shared, map, barrier, c, at.x, at.image, off0);
      break;
    case 2:
      CopyIm2col2d<kTarget>(shared, map, barrier, c, at.x, at.y, at.image, off0, off1);
      break;
    default:
      CopyIm2col3d<kTarget>(shared, map, barrier, c, at.x, at.y, at.z, at.image, off0, off1, off2);
  }
}

// Loads the activations of a k-block: the pixels from `at` on under its tap (filter-row: its row of
// taps).
template <typename T, BoxTarget kTarget = BoxTarget::kShared, bool kFilterRow>
__device__ __forceinline__ void LoadActivations(const Params& params, const ResidueClass& of,
                                                const KBlock<kFilterRow>& k_block, uint32_t shared,
                                                const CUtensorMap* map, uint32_t barrier,
                                                int32_t channel, const PixelPlace& at) {
  LoadBox<kTarget>(params.rank, shared, map, barrier,
                   channel + k_block.channel_block * kKBlockChannels<T>, at,
                   kFilterRow ? 0 : of.offset0[0] + k_block.t0 * of.offset_step[0],
                   of.offset0[1] + k_block.t1 * of.offset_step[1],
                   of.offset0[2] + k_block.t2 * of.offset_step[2]);
}

// The boxes of 64 columns in a tile. Boxes wholly past the last column are not loaded; the values
// in their place in shared memory reach no stored result.
template <class Tile>
__device__ __forceinline__ int FilterBoxes(const Params& params, int32_t n_first) {
  return min(Tile::kTileN / 64, (params.gemm_n - n_first + 63) / 64);
}

// The filter under one tap: `boxes` of 64 columns from column n on, a k-block of the reduction from
// `channel` on. fprop has K along n and C along the reduction, dgrad the reverse; the map is (K, C,
// tap), or (C, K, tap) for fprop in float32 and for a filter stored as krsc, which has one group. A
// group's channels begin at its own offset along K.
template <Op kOp, typename T, class Tile, BoxTarget kTarget = BoxTarget::kShared>
__device__ __forceinline__ void LoadFilter(uint32_t shared, const CUtensorMap* map,
                                           uint32_t barrier, int boxes, int32_t n, int32_t channel,
                                           int32_t channel_of_group, int32_t tap) {
  constexpr bool kMnMajor = kMnMajorFilter<kOp, T>;
  if constexpr (kOp == Op::kFprop) n += channel_of_group;
  if constexpr (kOp == Op::kDgrad) channel += channel_of_group;
#pragma unroll
  for (int i = 0; i < Tile::kTileN / 64; ++i) {
    if (i >= boxes) break;
    const int32_t column = n + i * 64;
    CopyTile3d<kTarget>(shared + i * kBoxBytes, map, barrier, kMnMajor ? column : channel,
                        kMnMajor ? channel : column, tap);
  }
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_LOADS_SM90_CUH_
