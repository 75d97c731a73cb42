// Winograd in four stages, each a kernel of its own. F(m x m, 3x3) computes a tile of m x m outputs
// from (m + 2) x (m + 2) inputs d, at (m + 2)^2 points (docs/winograd.md):
//
//     filter_transform.cuh    w -> U     U = G w G^T; omitted if the filter is prepared
//     input_transform.cuh     x -> V     V = B^T d B                       \
//     batched_gemm.cuh        V, U -> M  M = sum over c of V U, by points   > chunk by chunk of tiles
//     output_transform.cuh    M -> y     y = A^T M A                       /
//
// For scaled operands (bfloat16 and float32) the passes of amax.cuh run first. Instances named
// four_stage have one chunk of all tiles: V and M go through DRAM, 2 (m + 2)^2 C and 4 (m + 2)^2 K
// bytes a tile, written and read. These bytes are the bound up to about 1,000 channels, the
// products above. Instances named chunked (like the seed's PKF-LLC, seeds/004) divide the tiles
// into chunks whose V and M take at most 32 MB, so that they stay in L2 between stages and the
// workspace holds one chunk; a chunk costs three launches.
//
// Only the stream orders a chunk's kernels. The GEMM is a parameter of RunFourStage.
//
// Refuses: what plan.cc refuses (3x3, stride 1, channels of a group in multiples of 8), and, in
// chunked instances, problems whose 128 tiles exceed a chunk.
#ifndef JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_CUH_
#define JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_CUH_

#include <algorithm>

#include "cuda/common/kernel.h"
#include "cuda/common/mma_tile.cuh"
#include "cuda/winograd/batched_gemm.cuh"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {

// multiply(products) enqueues M = V U^T for a chunk. kOverlaps: all kernels overlap their
// neighbours (sm_90a).
template <bool kOverlaps = false, typename Multiply>
Status RunFourStage(const Plan& plan, const Operands& operands, void* stream, Multiply multiply) {
  const auto& launch = plan.As<LaunchParams>();
  const StagePointers at = Locate(launch, operands);
  JAXCONV_RETURN_IF_ERROR(LaunchFilterStage<kOverlaps>(launch, at, stream));
  for (int32_t first = 0; first < launch.geometry.tiles; first += launch.chunk_tiles) {
    const int32_t tiles = std::min(launch.chunk_tiles, launch.geometry.tiles - first);
    JAXCONV_RETURN_IF_ERROR(LaunchInputStage<kOverlaps>(launch, at, first, tiles, stream));
    if constexpr (kOverlaps) JAXCONV_RETURN_IF_ERROR(LaunchRepairStage(launch, at, stream));
    JAXCONV_RETURN_IF_ERROR(multiply(ProductsOf(launch, at, tiles)));
    JAXCONV_RETURN_IF_ERROR(LaunchOutputStage<kOverlaps>(launch, at, first, tiles, stream));
  }
  return {};
}

template <Op kOp, DType kType, int m, int kTileM, int kTileN, int kCtasPerSm>
struct FourStage {
  // Warp tiles of 64 x 64 (of 32 x 32 for the 64x64 tile), k-blocks of 64 elements, three stages.
  using Tile = MmaTile<kTileM, kTileN, 128, 2, 2, 3, kCtasPerSm>;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return RunFourStage(plan, operands, stream, [&](const Products& products) {
      return LaunchBatchedGemm<Tag>(plan.kernel->name, products, stream);
    });
  }
};

// The same kernels, launched chunk by chunk (four_stage_plan.h).
template <Op kOp, DType kType, int m, int kTileM, int kTileN, int kCtasPerSm>
using Chunked = FourStage<kOp, kType, m, kTileM, kTileN, kCtasPerSm>;

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_CUH_
