// Accumulators -> epilogue -> global memory.
#ifndef JAXCONV_CUDA_IGEMM_SIMT_STORE_TILE_CUH_
#define JAXCONV_CUDA_IGEMM_SIMT_STORE_TILE_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_simt/simt_tile.cuh"

namespace jaxconv::igemm_simt {

// Applies an epilogue to the accumulators, in registers. Row r of the tile is output pixel
// dst_row(r), < 0: no row. Columns run from n_first to n_end; column 0 is output channel
// channel_first and lies at `base` in row 0 of the output.
template <class Tile, typename Out, class Epilogue, typename DstRow>
__device__ __forceinline__ void FinishAccumulators(float (&acc)[8][Tile::kThreadN],
                                                   const Epilogue& epilogue, DstRow dst_row,
                                                   int64_t base, int64_t row_stride, int n_first,
                                                   int n_end, int channel_first) {
  const int row = Tile::FirstRow();
  const int column = n_first + Tile::FirstColumn();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int32_t dst = dst_row(row + (i / 4) * Tile::kLanesM * 4 + i % 4);
#pragma unroll
    for (int j = 0; j < Tile::kThreadN; ++j) {
      const int n = column + j / 4 * Tile::kLanesN * 4 + j % 4;
      const OutputPlace place{base + dst * row_stride + n, dst, channel_first + n,
                              dst >= 0 && n < n_end};
      acc[i][j] = epilogue.template operator()<Out>(acc[i][j], place);
    }
  }
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
    for (int part = 0; part < Tile::kThreadN / 4; ++part) {
      const int n = column + part * Tile::kLanesN * 4;
      if constexpr (kQuads) {
        if (n < n_end) StoreQuad(to + n, &acc[i][part * 4]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (n + e < n_end) to[n + e] = FromFloat<Out>(acc[i][part * 4 + e]);
        }
      }
    }
  }
}

}  // namespace jaxconv::igemm_simt

#endif  // JAXCONV_CUDA_IGEMM_SIMT_STORE_TILE_CUH_
