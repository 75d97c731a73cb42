// Accumulators -> global memory.
#ifndef JAXCONV_CUDA_DEVICE_EPILOGUE_CUH_
#define JAXCONV_CUDA_DEVICE_EPILOGUE_CUH_

#include <cstdint>

#include "cuda/device/element.cuh"
#include "cuda/device/simt_tile.cuh"

namespace jaxconv {

__device__ inline void StoreQuad(float* to, const float* quad) {
  *reinterpret_cast<float4*>(to) = make_float4(quad[0], quad[1], quad[2], quad[3]);
}
template <typename T>
__device__ inline void StoreQuad(T* to, const float* quad) {
  T elements[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) elements[i] = FromFloat<T>(quad[i]);
  uint2 packed;
  memcpy(&packed, elements, sizeof(packed));
  *reinterpret_cast<uint2*>(to) = packed;
}

// Row r of the tile goes to out + dst_row(r) * row_stride; dst_row < 0 is no row. Columns from
// n_first to n_end. kQuads: n_end and row_stride are multiples of 4 and `out` is aligned to four
// elements.
template <class Tile, bool kQuads, typename Out, typename DstRow>
__device__ __forceinline__ void StoreTile(const float (&acc)[8][Tile::kThreadN], Out* out,
                                          DstRow dst_row, int64_t row_stride, int n_first,
                                          int n_end) {
  const int row = Tile::FirstRow();
  const int column = n_first + Tile::FirstColumn();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int32_t dst = dst_row(row + (i / 4) * Tile::kLanesM * 4 + i % 4);
    if (dst < 0) continue;
    Out* to = out + dst * row_stride;
#pragma unroll
    for (int half = 0; half < Tile::kThreadN / 4; ++half) {
      const int n = column + half * Tile::kLanesN * 4;
      if constexpr (kQuads) {
        if (n < n_end) StoreQuad(to + n, &acc[i][half * 4]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (n + e < n_end) to[n + e] = FromFloat<Out>(acc[i][half * 4 + e]);
        }
      }
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_DEVICE_EPILOGUE_CUH_
