// A tile of the fused row kernel: its shared memory and its position in the problem (sm_90a).
#ifndef JAXCONV_CUDA_WINOGRAD_FUSED_ROW_TILE_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_FUSED_ROW_TILE_SM90_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/cluster_sm90.cuh"
#include "cuda/winograd/fused_row_params.h"
#include "cuda/winograd/row_filter.h"

namespace jaxconv::winograd {

template <int m_>
struct RowTile {
  static constexpr int m = m_, kPoints = m + 2;
  static constexpr int kOwnPoints = kPoints / 2;  // of a warpgroup
  static constexpr int kThreads = 384;
  // Residues begin at multiples of the swizzle's 1024 bytes.
  static constexpr int kBoxBytes = kRowBoxPixels * 128;
  static constexpr int kResidueBytes = (kBoxBytes + 1023) / 1024 * 1024;
  static constexpr int kStageBytes = m * kResidueBytes;
  static constexpr int kStages = 2;
  static constexpr int kPointBytes = RowFilter::kPointElements * 2;
  static constexpr int kSlotBytes = kPoints * kPointBytes;
  static constexpr int kFilterSlots = 3, kStationary = 0;
  static constexpr int kFilterBoxRows =
      kSlotBytes / kRowClusterCtas / kFilterRowBytes;  // of a copy
  static_assert(kFilterBoxRows <= 256, "TMA's limit");
  static constexpr int kFilterAt = kStages * kStageBytes;
  static constexpr int kSharedBytes = kFilterAt + kFilterSlots * kSlotBytes + 1024;
  static_assert(kSharedBytes + 1024 <= 232448, "227 KB a CTA, barriers among them");
};

// A CTA's tile.
struct RowTilePlace {
  int32_t n_tile, m_tile, group;

  __device__ __forceinline__ RowTilePlace(const RowParams& params, int32_t index) {
    params.n_tiles.Divmod(index, &index, &n_tile);
    params.m_tiles.Divmod(index, &group, &m_tile);
    m_tile = m_tile * kRowClusterCtas + ClusterRank();
  }
};

// A position: a tile of an output row, or the place past its last tile.
struct RowPosition {
  int32_t tile, row, image;

  __device__ __forceinline__ RowPosition(const RowParams& params, int32_t position) {
    params.row_positions.Divmod(position, &position, &tile);
    params.rows.Divmod(position, &image, &row);
  }
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FUSED_ROW_TILE_SM90_CUH_
