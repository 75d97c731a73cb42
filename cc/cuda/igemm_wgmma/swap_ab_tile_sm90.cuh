// A tile with the operands swapped: the filter is A, the pixels are B (sm_90a). For few output
// channels.
//
// With 64 channels as columns, m64n64k16 reads 2 KB of pixels and 2 KB of the filter in 32 cycles,
// and needs a descriptor every 32 cycles. With the filter's 64 channels as rows and up to 256
// pixels as columns, an instruction lasts 128 cycles and reads 2 + 8 KB. The result is transposed:
// rows are channels, and stmatrix transposes it back on its way to rows of channels
// (store_swap_ab_sm90.cuh).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_SWAP_AB_TILE_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_SWAP_AB_TILE_SM90_CUH_

#include <cstdint>

#include "cuda/igemm_wgmma/wgmma_tile_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// Two consumer warpgroups in pingpong, each with a tile of 64 channels by kTileM pixels. TileLayout
// explains the other parameters.
template <int kTileM_, int kStages_, bool kFilterRow_ = false, int kFilterSlots_ = 0,
          int kStationary_ = 0, int kStagingBytes_ = 2048>
struct SwapAbTile : TileLayout<2, true, kTileM_, 64, kStages_, kFilterRow_, kFilterSlots_,
                               kStationary_, kStagingBytes_> {
  static constexpr bool kSwapAb = true;

  struct Accumulators {
    float of[kTileM_ / 2];
  };

  // One k-block. `a`: the pixels; `b`: the filter.
  template <typename T, bool kMnMajorA, bool kMnMajorB>
  static __device__ __forceinline__ void Multiply(Accumulators& acc, uint32_t a, uint32_t b,
                                                  bool accumulate) {
    static_assert(!kMnMajorA, "a row of pixels runs along the reduction");
    const uint64_t pixels = KMajorDescriptor(a);
    const uint64_t filter = kMnMajorB ? MnMajorDescriptor<8192>(b) : KMajorDescriptor(b);
    constexpr int kStepFilter = (kMnMajorB ? 2048 : 32) >> 4;
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Wgmma<kTileM_, T, kMnMajorB, false>(acc.of, filter + k * kStepFilter, pixels + k * (32 >> 4),
                                          accumulate || k > 0);
    }
    WgmmaCommit();
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_SWAP_AB_TILE_SM90_CUH_
