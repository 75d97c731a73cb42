// What the kernels of block_diagonal share: the layout of pixels in shared memory and the warp's share
// of a tile.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_TILE_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_TILE_CUH_

#include <cstdint>

#include "cuda/block_diagonal/params.h"

namespace jaxconv::block_diagonal {

// A pixel of kChannels 16-bit channels. Its chunks of 16 bytes change places with the pixel, so that
// the same chunk of eight neighbouring pixels, a matrix of ldmatrix, lies in different banks.
struct SwizzledPixel {
  static constexpr int kBytes = kChannels * 2, kChunks = kBytes / 16, kChunkChannels = 8;
  __device__ static int32_t Offset(int32_t i, int chunk) {
    return i * kBytes + (chunk ^ (i & (kChunks - 1))) * 16;
  }
};

// The place of a position of the tile: its pixel of the box under the first tap.
__device__ __forceinline__ int32_t BoxPixel(const Params& params, int32_t row, int32_t column) {
  return row * params.axis[1].stride * params.axis[2].box + column * params.axis[2].stride;
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_TILE_CUH_
