// Shared parts of a consumer's statistics (statistics_sm90.cuh, sm_90a): the block of results in
// shared memory, and the slot that receives the sums.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_COUNTED_BLOCK_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_COUNTED_BLOCK_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/igemm_wgmma/destination_sm90.cuh"
#include "cuda/igemm_wgmma/params.h"
#include "cuda/igemm_wgmma/staging_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"

namespace jaxconv::igemm_wgmma {

// A block of the staging: 64 rows of 64 columns.
inline constexpr int kBlockRows = 64, kBlockBytes = 8192;

// The two elements of a word. The argument is the word: given its halves, the compiler would keep
// each in a register of its own.
template <typename T>
__device__ __forceinline__ void UnpackWord(uint32_t word, float (&pair)[2]);
template <>
__device__ __forceinline__ void UnpackWord<__nv_bfloat16>(uint32_t word, float (&pair)[2]) {
  pair[0] = __uint_as_float(word << 16);
  pair[1] = __uint_as_float(word & 0xffff0000u);
}
template <>
__device__ __forceinline__ void UnpackWord<__half>(uint32_t word, float (&pair)[2]) {
  Neighbours<__half, 2>{word}.Unpack(pair);
}

// Adds a lane's numbers, less their pivot, to `sum` and `squares`.
template <int kCount>
__device__ __forceinline__ void AddAbout(const float* pivot, const float* values, float* sum,
                                         float* squares) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const float apart = values[e] - pivot[e];
    sum[e] += apart;
    squares[e] = fmaf(apart, apart, squares[e]);
  }
}

// The slot that receives a consumer's sums after a tile, if any. If a CTA stays in one range of
// columns, the sums of its first tiles are joined, and the consumer writes them to its slot after
// the last of these tiles. Each other tile has its own slot.
template <int kWarpgroup>
__device__ __forceinline__ bool SlotOf(const Params& params, const TilePlace& place,
                                       int32_t* slot) {
  const int32_t joined = params.epilogue.joined_tiles, n_tiles = params.n_tiles.divisor;
  if (place.m_tile >= joined) {
    *slot = params.epilogue.joined_slots + place.m_tile - joined;
    return true;
  }
  const int32_t index = place.m_tile * n_tiles + place.n_tile;
  *slot = params.n_tiles.Div(blockIdx.x) * 2 + kWarpgroup;
  return index + 2 * static_cast<int32_t>(gridDim.x) >= joined * n_tiles;
}

// Two lanes, `bits` apart, hold two values each; one lane gets the sum of the first values, the
// other the sum of the second.
__device__ __forceinline__ float Exchange(float first, float second, bool takes_second, int bits) {
  const float got = __shfl_xor_sync(0xffffffff, takes_second ? first : second, bits);
  return (takes_second ? second : first) + got;
}

// A warp's sixteen rows of a block, in the staging and, as a destination, in the output, whose rows
// are in order.
template <typename T>
struct CountedRows {
  const uint32_t lane = Lane(), warp = Thread() / 32u % 4;
  RoundedRows<64> staged;
  const uint32_t pitch;   // of a row, in bytes
  const int64_t first;    // of the lane's first vector in the tile's first block, in bytes
  const int32_t columns;  // of the output from the tile's first on
  // The first row of the stored block in the tile, and the number of its rows that are outputs.
  int32_t row = 0, rows = 0;

  // `row0`: the tile's first row; `staging`: a block's address.
  __device__ __forceinline__ CountedRows(const Params& params, const TilePlace& place,
                                         int32_t n_first, int32_t row0, uint32_t staging)
      : staged{staging + warp * 2048, lane},
        pitch(static_cast<uint32_t>(params.out_channels) * uint32_t{sizeof(T)}),
        first((place.OutputOffset(params, n_first) + staged.Column() +
               (row0 + int64_t{OfBlock(0)}) * params.out_channels) *
              int64_t{sizeof(T)}),
        columns(params.gemm_n - n_first) {}
  // The row of vector i in a block.
  __device__ __forceinline__ int32_t OfBlock(int i) const {
    return static_cast<int32_t>(warp * 16 + staged.Row(i));
  }
  __device__ __forceinline__ bool Stored(int i, int c) const {
    return OfBlock(i) < (c + staged.Column() < columns ? rows : 0);
  }
  __device__ __forceinline__ uint4* At(void* out, int i, int c) const {
    return reinterpret_cast<uint4*>(static_cast<char*>(out) + first +
                                    (uint64_t{pitch} * (row + i * 4) + c * sizeof(T)));
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_COUNTED_BLOCK_SM90_CUH_
