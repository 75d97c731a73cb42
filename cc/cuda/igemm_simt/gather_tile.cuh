// The rows of an fprop or dgrad tile: the position of each pixel's window in the gathered tensor.
#ifndef JAXCONV_CUDA_IGEMM_SIMT_GATHER_TILE_CUH_
#define JAXCONV_CUDA_IGEMM_SIMT_GATHER_TILE_CUH_

#include <cstdint>

#include "core/implicit_gemm.h"
#include "cuda/igemm_simt/params.h"

namespace jaxconv::igemm_simt {

// The tile of an fprop or dgrad CTA. It lies in shared memory, because registers are scarce and it
// is needed only when the tap changes.
template <class Tile>
struct GatherTile {
  int4 row[Tile::kTileM];         // src coordinates at t = 0, and the first pixel of the image
  int32_t dst_row[Tile::kTileM];  // pixel of the output, or -1
  AxisPhase phase[3];             // the stride residue class
  uint32_t tap_mask;  // taps that hit a source element for any row; all ones above 32 taps
  int32_t n_first;    // first column
  int64_t out;        // offset of this batch and group in the output
  const void* a;      // first element of this batch and group
  const void* b;
};

// Fills `tile`; all threads call it. Returns false if the tile has no row.
template <class Tile, typename T>
__device__ __forceinline__ bool InitGatherTile(const Params& params, int m_tile, int n_first,
                                               int phase_index, const T* a, const T* b, int64_t out,
                                               GatherTile<Tile>& tile) {
  const ImplicitGemm& gemm = params.gemm;
  if (threadIdx.x < 3) {
    tile.phase[threadIdx.x] = gemm.PhaseOfAxis(phase_index, threadIdx.x);
  } else if (threadIdx.x == 3) {
    tile.tap_mask = 0;
    tile.n_first = n_first;
    tile.out = out;
    tile.a = a;
    tile.b = b;
  }
  __syncthreads();
  const int32_t rows = ImplicitGemm::Rows(gemm.images, tile.phase);
  const int32_t first = m_tile * Tile::kTileM;
  if (first >= rows) return false;
  const int32_t taps = ImplicitGemm::TapCount(tile.phase);
  uint32_t mask = taps > 32 ? ~0u : 0u;
  for (int r = threadIdx.x; r < Tile::kTileM; r += Tile::kThreads) {
    int4 source = make_int4(kInvalidCoordinate, kInvalidCoordinate, kInvalidCoordinate, 0);
    int32_t dst = -1;
    if (first + r < rows) {
      int32_t image, j[3], src[3], coordinate[3];
      gemm.DecodeRow(tile.phase, first + r, &image, j);
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        src[a] = tile.phase[a].src0 + j[a] * gemm.axis[a].src_per_j;
        coordinate[a] = tile.phase[a].phase + j[a] * gemm.axis[a].period;
      }
      source = make_int4(src[0], src[1], src[2], image * static_cast<int32_t>(gemm.SourceImage()));
      dst = ((image * gemm.axis[0].dst_extent + coordinate[0]) * gemm.axis[1].dst_extent +
             coordinate[1]) *
                gemm.axis[2].dst_extent +
            coordinate[2];
      if (taps <= 32) {
        uint32_t bit = 1;
        for (int t0 = 0; t0 < tile.phase[0].tap_count; ++t0) {
          bool hit0 = gemm.axis[0].InSource(src[0] + t0 * gemm.axis[0].src_per_t);
          for (int t1 = 0; t1 < tile.phase[1].tap_count; ++t1) {
            bool hit1 = hit0 && gemm.axis[1].InSource(src[1] + t1 * gemm.axis[1].src_per_t);
            for (int t2 = 0; t2 < tile.phase[2].tap_count; ++t2, bit <<= 1) {
              if (hit1 && gemm.axis[2].InSource(src[2] + t2 * gemm.axis[2].src_per_t)) mask |= bit;
            }
          }
        }
      }
    }
    tile.row[r] = source;
    tile.dst_row[r] = dst;
  }
  mask = __reduce_or_sync(0xffffffffu, mask);
  if (threadIdx.x % 32 == 0) atomicOr(&tile.tap_mask, mask);
  __syncthreads();
  return true;
}

}  // namespace jaxconv::igemm_simt

#endif  // JAXCONV_CUDA_IGEMM_SIMT_GATHER_TILE_CUH_
