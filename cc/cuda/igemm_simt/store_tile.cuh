// Accumulators -> epilogue -> global memory.
#ifndef JAXCONV_CUDA_IGEMM_SIMT_STORE_TILE_CUH_
#define JAXCONV_CUDA_IGEMM_SIMT_STORE_TILE_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_simt/simt_tile.cuh"

namespace jaxconv::igemm_simt {

// Stores row r of the tile to out + dst_row(r) * row_stride; dst_row(r) < 0: the row does not
// exist. Columns from n_first to n_end. kQuads: n_end and row_stride are multiples of 4 and `out`
// is aligned to four elements.
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

// The same with the fused epilogue; `base` is the offset of column 0 in row 0 of the output, whose
// channel is channel_first. The loop over rows is not unrolled, so that the code has one copy of
// the epilogue; a uniform branch picks the accumulators.
template <class Tile, bool kQuads, typename Out, typename DstRow>
__device__ __forceinline__ void StoreFusedTile(const float (&acc)[8][Tile::kThreadN], Out* out,
                                               const FusedEpilogue& epilogue, DstRow dst_row,
                                               int64_t base, int64_t row_stride, int n_first,
                                               int n_end, int channel_first) {
  constexpr int kParts = Tile::kThreadN / 4;
  const int first_row = Tile::FirstRow();
  const int column = n_first + Tile::FirstColumn();
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    float row[Tile::kThreadN];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k != i) continue;
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; ++j) row[j] = acc[k][j];
    }
    const int32_t dst = dst_row(first_row + (i / 4) * Tile::kLanesM * 4 + i % 4);
    if (dst < 0) continue;
    const int64_t at = base + dst * row_stride;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int n = column + part * Tile::kLanesN * 4;
      float quad[4] = {row[part * 4], row[part * 4 + 1], row[part * 4 + 2], row[part * 4 + 3]};
      if constexpr (kQuads) {
        if (n >= n_end) continue;
        Neighbours<Out, 4> residual{};
        if (epilogue.params.residual != nullptr) residual = epilogue.Residual<Out, 4>(at + n);
        epilogue.Scale(epilogue.Terms<4>(channel_first + n), quad);
        epilogue.Add<Out>(quad, residual, at + n);
        Activate<Out>(epilogue.params.activation, epilogue.params.negative_slope, quad);
        StoreQuad(out + at + n, quad);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (n + e >= n_end) continue;
          out[at + n + e] = FromFloat<Out>(epilogue.template operator()<Out>(
              quad[e], OutputPlace{at + n + e, dst, channel_first + n + e, /*inside=*/true}));
        }
      }
    }
  }
}

}  // namespace jaxconv::igemm_simt

#endif  // JAXCONV_CUDA_IGEMM_SIMT_STORE_TILE_CUH_
