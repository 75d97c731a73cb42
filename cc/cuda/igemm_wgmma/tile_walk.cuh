// The position of a CTA: its tile of the output, its pixels of the source, its k-block of the
// reduction.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_TILE_WALK_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_TILE_WALK_CUH_

#include <cstdint>

#include "core/conv_problem.h"
#include "cuda/igemm_wgmma/params.h"

namespace jaxconv::igemm_wgmma {

// The digits of a tile index.
struct TilePlace {
  int32_t n_tile = 0, m_tile = 0, slice = 0, group = 0, batch = 0, residue_class = 0;

  __device__ __forceinline__ TilePlace(const Params& params, int32_t index) {
    params.n_tiles.Divmod(index, &index, &n_tile);
    params.m_tiles.Divmod(index, &index, &m_tile);
    params.slices.Divmod(index, &index, &slice);
    params.groups.Divmod(index, &index, &group);
    params.batches.Divmod(index, &residue_class, &batch);
  }
  // For one slice, group, batch and residue class.
  static __device__ __forceinline__ TilePlace OfRows(const Params& params, int32_t index) {
    TilePlace place;
    params.n_tiles.Divmod(index, &place.m_tile, &place.n_tile);
    return place;
  }
  // The output offset of row 0 in the tile's first column.
  __device__ __forceinline__ int64_t OutputOffset(const Params& params, int32_t n_first) const {
    return slice * params.slice_elements + batch * params.out_batch +
           int64_t{group} * params.out_group + n_first;
  }

 private:
  TilePlace() = default;
};

// The source pixel of a tile's row, as TMA coordinates.
struct PixelPlace {
  int32_t x = 0, y = 0, z = 0, image = 0;

  // Pixel m of `pixels` of a batch.
  __device__ __forceinline__ PixelPlace(const Params& params, const ResidueClass& of, int32_t m,
                                        int32_t pixels, int32_t batch) {
    if (params.rank == 0) {
      x = batch * pixels + m;
    } else {
      of.count[0].Divmod(m, &m, &x);
      of.count[1].Divmod(m, &m, &y);
      of.count[2].Divmod(m, &image, &z);
      x = of.lower[0] + x * params.src_step[0];
      y = of.lower[1] + y * params.src_step[1];
      z = of.lower[2] + z * params.src_step[2];
      image += batch * params.images;
    }
  }
};

// A k-block of a tile's reduction. Taps advance fastest, then channel blocks, so that first reads
// of the source are spread over the whole reduction. In filter-row the taps of a row share a load,
// and t0 stays 0.
template <bool kFilterRow>
struct KBlock {
  int32_t channel_block = 0, t0 = 0, t1 = 0, t2 = 0;

  __device__ __forceinline__ KBlock(const ResidueClass& of, int32_t first) {
    if (first == 0) return;
    if constexpr (!kFilterRow) t0 = first % of.taps[0], first /= of.taps[0];
    t1 = first % of.taps[1], first /= of.taps[1];
    channel_block = first / of.taps[2];
    t2 = first - channel_block * of.taps[2];
  }
  __device__ __forceinline__ void Next(const ResidueClass& of) {
    if (!kFilterRow && ++t0 < of.taps[0]) return;
    t0 = 0;
    if (++t1 < of.taps[1]) return;
    t1 = 0;
    if (++t2 < of.taps[2]) return;
    t2 = 0;
    ++channel_block;
  }
  // The filter's linear tap.
  __device__ __forceinline__ int32_t Tap(const ResidueClass& of) const {
    return of.filter0 + t0 * of.filter_step[0] + t1 * of.filter_step[1] + t2 * of.filter_step[2];
  }
};

// Row m of a residue class as a row of the output (wgrad: of the filter), or -1.
template <Op kOp>
__device__ __forceinline__ int32_t OutputRow(const Params& params, const ResidueClass& of,
                                             int32_t m) {
  if (m >= of.rows) return -1;
  if constexpr (kOp == Op::kWgrad) {
    int32_t tap, channel_block;
    params.channel_blocks.Divmod(m / 64, &tap, &channel_block);
    const int32_t channel = channel_block * 64 + m % 64;
    if (channel >= params.row_channels) return -1;
    m = tap * params.row_channels + channel;
  } else if (!params.dense_rows) {
    int32_t j0, j1, j2, image;
    of.count[0].Divmod(m, &m, &j0);
    of.count[1].Divmod(m, &m, &j1);
    of.count[2].Divmod(m, &image, &j2);
    if (j0 >= of.width) return -1;
    m = ((image * params.out_extent[2] + of.residue[2] + j2 * params.period[2]) *
             params.out_extent[1] +
         of.residue[1] + j1 * params.period[1]) *
            params.out_extent[0] +
        of.residue[0] + j0 * params.period[0];
  }
  return m;
}

// Tells the epilogue that a tile is stored.
template <class Tile, class Epilogue>
__device__ __forceinline__ void FinishTile(const Params& params, const TilePlace& place,
                                           const ResidueClass& of, const Epilogue& epilogue) {
  const int32_t m_first = place.m_tile * Tile::kTileM, n_first = place.n_tile * Tile::kTileN;
  const int32_t channel = place.group * params.gemm_n;
  epilogue.FinishTile(m_first, min(m_first + Tile::kTileM, of.rows), channel + n_first,
                      channel + min(n_first + Tile::kTileN, params.gemm_n));
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_TILE_WALK_CUH_
