// The block of a tile that a warp, or half a warp, of direct.cuh or wgrad.cuh computes.
#ifndef JAXCONV_CUDA_DEPTHWISE_WARP_BLOCK_CUH_
#define JAXCONV_CUDA_DEPTHWISE_WARP_BLOCK_CUH_

#include <cstdint>

#include "cuda/depthwise/params.h"

namespace jaxconv::depthwise {

// The image of the tile, and the block's first output in the tile.
struct WarpBlock {
  int32_t image, row, column;
  __device__ __forceinline__ WarpBlock(const Params& params, int32_t index, int32_t rows,
                                       int32_t columns) {
    const int32_t line = index / params.blocks_across;
    image = line / params.blocks_down;
    row = line % params.blocks_down * rows;
    column = index % params.blocks_across * columns;
  }
};

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_WARP_BLOCK_CUH_
