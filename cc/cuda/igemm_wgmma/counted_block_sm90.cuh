// Shared parts of a consumer's statistics (statistics_sm90.cuh, sm_90a): the block of results in
// shared memory, and the slot that receives the sums.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_COUNTED_BLOCK_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_COUNTED_BLOCK_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/igemm_wgmma/params.h"
#include "cuda/igemm_wgmma/store_tile_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared_memory.cuh"

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

// The writer of the first slot's first channels also resets the counters of the merging kernel.
__device__ __forceinline__ void ResetMomentCounters(const Params& params, int32_t slot,
                                                    int32_t channel) {
  if (slot > 0 || channel > 0 || Thread() % 128 > 0) return;
  auto* const counters = reinterpret_cast<int32_t*>(params.epilogue.moments);
#pragma unroll 1
  for (int32_t i = 1; i <= params.epilogue.moment_counters; ++i) counters[-i] = 0;
}

// Two lanes, `bits` apart, hold two values each; one lane gets the sum of the first values, the
// other the sum of the second.
__device__ __forceinline__ float Exchange(float first, float second, bool takes_second, int bits) {
  const float got = __shfl_xor_sync(0xffffffff, takes_second ? first : second, bits);
  return (takes_second ? second : first) + got;
}

// A lane's addresses in a block of 64 rows of 128 bytes. Chunk c of row r lies at c ^ r % 8; blocks
// are aligned to 1024 bytes. Unsigned, because the remainder of a signed number takes five
// instructions.
struct BlockPlaces {
  uint32_t staged;   // for stmatrix, columns 0 to 15 of the warp's sixteen rows
  uint32_t counted;  // for ldmatrix, the warp's sixteen columns of rows 0 to 15
  uint32_t vectors;  // chunk lane % 8 of the warp's row lane / 8
  uint32_t lane;

  __device__ __forceinline__ BlockPlaces() : lane(Lane()) {
    const uint32_t warp = Thread() / 32u % 4;
    const uint32_t matrices = lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
    staged = warp * 2048 + matrices;
    counted = matrices ^ warp * 32;
    vectors = warp * 2048 + lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
  }
  // The vector of the warp's row 4 i + lane / 8.
  __device__ __forceinline__ uint32_t Vector(int i) const {
    return (vectors ^ i % 2 * 64) + i * 512;
  }
};

// Writes a warp's sixteen rows by 64 columns to shared memory.
template <typename T>
__device__ __forceinline__ void StageRows(uint32_t staged, const float* acc) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    StoreMatrices(staged ^ j * 16, PackPair<T>(acc[4 * j], acc[4 * j + 1]),
                  PackPair<T>(acc[4 * j + 2], acc[4 * j + 3]),
                  PackPair<T>(acc[4 * j + 4], acc[4 * j + 5]),
                  PackPair<T>(acc[4 * j + 6], acc[4 * j + 7]));
  }
}

// A lane's vectors of a tile, in a block of rows and in the output.
struct LaneVectors {
  BlockPlaces places;
  uint32_t row = Thread() / 32u % 4 * 16 + places.lane / 8;  // the first vector's row in a block
  int32_t column = places.lane % 8 * 8;                      // its column in a chunk
  char* out;  // the first vector of the tile's first block

  // `first`: the offset of the tile's first element in the output.
  __device__ __forceinline__ LaneVectors(const Params& params, int64_t first, uint32_t bytes)
      : out(static_cast<char*>(params.out) +
            (first + int64_t{row} * params.out_channels + column) * bytes) {}
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_COUNTED_BLOCK_SM90_CUH_
