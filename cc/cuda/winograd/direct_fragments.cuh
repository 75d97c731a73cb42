// Fragments of mma.sync m16n8k16 that each lane loads directly, 16 bytes at a time, from rows of
// float16 in global or shared memory, without ldmatrix, exchange or barrier.
//
// The channels may have any order along the reduction if both operands share it. Lane 4 g + t loads
// channels 8 t to 8 t + 7 of a k-block of 32 channels of row g: four lanes read 64 contiguous bytes
// of a row, two whole sectors. The 16 bytes are the lane's fragments of two instructions:
//
//     instruction   k = 2t, 2t + 1        k = 2t + 8, 2t + 9
//     0             channels 8t, 8t + 1   channels 8t + 2, 8t + 3
//     1             8t + 4, 8t + 5        8t + 6, 8t + 7
//
// The columns of the result may have any order too. A lane holds columns 2t and 2t + 1 of each
// block of 8 columns. The assignment of channels makes a lane's columns of two neighbouring blocks
// four consecutive channels, 4t to 4t + 3 of 16, which it stores at once.
#ifndef JAXCONV_CUDA_WINOGRAD_DIRECT_FRAGMENTS_CUH_
#define JAXCONV_CUDA_WINOGRAD_DIRECT_FRAGMENTS_CUH_

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/mma.cuh"
#include "cuda/winograd/pkf_params.h"

namespace jaxconv::winograd {

// The channel that is column g of n-block `block`.
__device__ __forceinline__ int ChannelOfColumn(int block, int g) {
  return block / 2 * 16 + g / 2 * 4 + block % 2 * 2 + g % 2;
}

// Returns zeros if the row ends before the lane's channels: the next row may hold Inf or NaN.
__device__ __forceinline__ uint4 LoadEightChannels(const __half* from, bool inside) {
  return inside ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
}

// acc += A B for one instruction, half of a k-block. a: the lane's channels of rows g and g + 8.
template <int kHalf>
__device__ __forceinline__ void MultiplyHalf(const uint4 (&a)[2], const uint4& b, float (&acc)[4]) {
  if constexpr (kHalf == 0) {
    const uint32_t fragment[4] = {a[0].x, a[1].x, a[0].y, a[1].y};
    MultiplyAdd<__half>(acc, fragment, b.x, b.y);
  } else {
    const uint32_t fragment[4] = {a[0].z, a[1].z, a[0].w, a[1].w};
    MultiplyAdd<__half>(acc, fragment, b.z, b.w);
  }
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_DIRECT_FRAGMENTS_CUH_
