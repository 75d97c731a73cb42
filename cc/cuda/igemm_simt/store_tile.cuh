// Accumulators -> epilogue -> global memory.
#ifndef JAXCONV_CUDA_IGEMM_SIMT_STORE_TILE_CUH_
#define JAXCONV_CUDA_IGEMM_SIMT_STORE_TILE_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_simt/simt_tile.cuh"

namespace jaxconv::igemm_simt {

// Row r of the tile goes to out + base + dst_row(r) * row_stride; dst_row < 0 is no row. Columns
// from n_first to n_end, of which column 0 is output channel channel_first. kQuads: n_end and
// row_stride are multiples of 4 and out + base is aligned to four elements.
template <class Tile, bool kQuads, typename Out, class Epilogue, typename DstRow>
__device__ __forceinline__ void StoreTile(const float (&acc)[8][Tile::kThreadN], Out* out,
                                          const Epilogue& epilogue, DstRow dst_row, int64_t base,
                                          int64_t row_stride, int n_first, int n_end,
                                          int channel_first) {
  Out* const first = out + base;
  const int row = Tile::FirstRow();
  const int column = n_first + Tile::FirstColumn();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int32_t dst = dst_row(row + (i / 4) * Tile::kLanesM * 4 + i % 4);
    if (dst < 0) continue;
    Out* to = first + dst * row_stride;
#pragma unroll
    for (int part = 0; part < Tile::kThreadN / 4; ++part) {
      const int n = column + part * Tile::kLanesN * 4;
      auto finished = [&](int e) {
        const OutputPlace place{base + dst * row_stride + n + e, dst, channel_first + n + e, true};
        return epilogue.template operator()<Out>(acc[i][part * 4 + e], place);
      };
      if constexpr (kQuads) {
        if (n < n_end) {
          const float quad[4] = {finished(0), finished(1), finished(2), finished(3)};
          StoreQuad(to + n, quad);
        }
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (n + e < n_end) to[n + e] = FromFloat<Out>(finished(e));
        }
      }
    }
  }
}

}  // namespace jaxconv::igemm_simt

#endif  // JAXCONV_CUDA_IGEMM_SIMT_STORE_TILE_CUH_
