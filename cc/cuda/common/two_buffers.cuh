// A persistent CTA's tiles, double-buffered.
#ifndef JAXCONV_CUDA_COMMON_TWO_BUFFERS_CUH_
#define JAXCONV_CUDA_COMMON_TWO_BUFFERS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

// Tiles blockIdx.x, blockIdx.x + gridDim.x, ... While one buffer is read, the other is filled for
// the next tile. Place(params, index) is the position of a tile. `step` is the distance between the
// buffers in bytes, or 1.
template <class Place>
struct TwoBuffers {
  int32_t index = blockIdx.x;
  Place tile;
  uint32_t buffer = 0;  // the tile's buffer

  template <class Params>
  __device__ __forceinline__ explicit TwoBuffers(const Params& params) : tile(params, index) {}
  __device__ __forceinline__ uint32_t NextIndex() const { return index + gridDim.x; }
  __device__ __forceinline__ uint32_t Other(uint32_t step) const { return step - buffer; }
  // `next`: the place of tile NextIndex().
  __device__ __forceinline__ void Advance(const Place& next, uint32_t step) {
    buffer = Other(step);
    tile = next;
    index = NextIndex();
  }
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_TWO_BUFFERS_CUH_
