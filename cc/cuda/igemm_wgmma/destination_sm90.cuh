// Where a tile's results go, the third part of a store (sm_90a).
//
// OutputRow (tile_walk.cuh) decodes a tile's row to the number of a row of the output, which takes
// some forty instructions. So each lane decodes one row for its warp (PixelRows, TileStore::DecodedRow), and
// shuffles distribute the numbers. RowVectors then has the places of a lane's vectors.
//
// Pointwise tiles go to boxes of the output by TMA (store_swap_ab_sm90.cuh, slot_store_sm90.cuh).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_DESTINATION_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_DESTINATION_SM90_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_wgmma {

// The output rows of a swap-AB tile's pixels, of which a warp stores four of every sixteen.
template <Op kOp, class Tile>
struct PixelRows {
  static constexpr int kDecoded = (Tile::kTileM / 16 + 7) / 8;
  int32_t decoded[kDecoded];

  __device__ __forceinline__ PixelRows(const Params& params, const ResidueClass& of,
                                       const TilePlace& place) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int i = 0; i < kDecoded; ++i) {
      decoded[i] = OutputRow<kOp>(
          params, of, place.m_tile * Tile::kTileM + (i * 8 + lane / 4) * 16 + warp * 4 + lane % 4);
    }
  }
  __device__ __forceinline__ int32_t operator()(int sixteen, int pixel) const {
    return __shfl_sync(0xffffffff, decoded[sixteen / 8], sixteen % 8 * 4 + pixel);
  }
};

// The places of a lane's vectors of a staging in the output, or in a tensor like it, in bytes. T: the
// tensor's type.
template <typename T, class Staging>
struct RowVectors {
  const Staging& staged;
  const uint32_t pitch;   // of a row
  const int64_t first;    // of the lane's column in row 0
  const int32_t columns;  // of the output from the tile's first on
  int32_t row[Staging::kVectors] = {};

  __device__ __forceinline__ RowVectors(const Params& params, const TilePlace& place,
                                        int32_t n_first, const Staging& staged)
      : staged(staged),
        pitch(static_cast<uint32_t>(params.out_channels) * uint32_t{sizeof(T)}),
        first((place.OutputOffset(params, n_first) + staged.Column()) * int64_t{sizeof(T)}),
        columns(params.gemm_n - n_first) {}
  // row_of(i): the output row of vector i, or negative.
  template <typename RowOf>
  __device__ __forceinline__ void Find(RowOf row_of) {
#pragma unroll
    for (int i = 0; i < Staging::kVectors; ++i) row[i] = row_of(i);
  }
  __device__ __forceinline__ bool Stored(int i, int c) const {
    return row[i] >= 0 && c + staged.Column() < columns;
  }
  // A vector that is stored.
  template <typename Tensor>
  __device__ __forceinline__ auto* At(Tensor* tensor, int i, int c) const {
    using Byte = std::conditional_t<std::is_const_v<Tensor>, const char, char>;
    using Vector = std::conditional_t<std::is_const_v<Tensor>, const uint4, uint4>;
    return reinterpret_cast<Vector*>(
        static_cast<Byte*>(tensor) +
        (uint64_t{static_cast<uint32_t>(row[i])} * pitch + (first + c * int64_t{sizeof(T)})));
  }
};

struct NothingSeen {
  template <typename... Nothing>
  __device__ __forceinline__ void operator()(Nothing&&...) const {}
};

// Copies a lane's vectors from the staging to the output, kAtOnce in flight. `out`: the output's
// first element; `seen(i, vector)` is called for every vector.
template <int kAtOnce, class Staging, class Destination, class Seen = NothingSeen>
__device__ __forceinline__ void StoreVectors(const Staging& staged, void* out,
                                             const Destination& to, int c, Seen&& seen = {}) {
#pragma unroll
  for (int v = 0; v < Staging::kVectors; v += kAtOnce) {
    uint4 chunk[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) chunk[i] = LoadChunk(staged.Vector(v + i));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (to.Stored(v + i, c)) *to.At(out, v + i, c) = chunk[i];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) seen(v + i, chunk[i]);
  }
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_DESTINATION_SM90_CUH_
