#include "cuda/winograd/four_stage_plan.h"

#include <algorithm>
#include <string>

#include "cuda/winograd/pingpong_gemm_params.h"

namespace jaxconv::winograd {
namespace {

// Tiles of a batched GEMM on mma.sync: the tensor-core time of a 64x64 tile beyond its products,
// because it reads twice the bytes from L2 for a product that a 128x128 tile reads; and a tile's
// cycles outside the mainloop. Fitted.
constexpr int64_t kSmallTile = 64;
constexpr double kSmallTileExcess = 1.6, kTileCycles = 240;

// Cycles of a CTA's tile.
double TileCycles(const Instance& instance, const LaunchParams& launch, double multiply_adds) {
  constexpr int64_t kBlock = 64;  // of the reduction
  return instance.tile_m * instance.tile_n *
         static_cast<double>(CeilDiv(launch.geometry.red, kBlock) * kBlock) / multiply_adds;
}

TimeTerms TermsOf(const Instance& instance, const Gpu& gpu, const LaunchParams& launch) {
  const Geometry& g = launch.geometry;
  const int64_t ctas = CeilDiv(launch.chunk_tiles, instance.tile_m) *
                       CeilDiv(g.cols, instance.tile_n) * g.groups * launch.points();
  const double cycles = TileCycles(instance, launch, gpu.mma_sync_per_clock) *
                            (instance.tile_m == kSmallTile ? kSmallTileExcess : 1) +
                        kTileCycles;
  return TermsWithGemms(launch, gpu, static_cast<double>(CeilDiv(ctas, gpu.sm_count)) * cycles);
}

}  // namespace

Status PlaceChunks(int64_t tile_m, int64_t bytes, LaunchParams* launch) {
  const int64_t tile_bytes = InputBytes(*launch) + ProductBytes(*launch);
  const int64_t all = launch->geometry.tiles, most = bytes / tile_bytes;
  int64_t tiles = all;
  if (most < all) {
    if (most < tile_m) {
      return Status::Unimplemented("V and M of " + std::to_string(tile_m) + " tiles take " +
                                   std::to_string(tile_m * tile_bytes) +
                                   " bytes, expected at most " + std::to_string(bytes));
    }
    // The fewest chunks that fit, all but the last of equal length.
    const int64_t whole = most / tile_m * tile_m;
    tiles = CeilDiv(CeilDiv(all, CeilDiv(all, whole)), tile_m) * tile_m;
  }
  launch->chunk_tiles = static_cast<int32_t>(tiles);
  PlaceWorkspace(/*has_v=*/true, /*has_m=*/true, launch);
  return {};
}

Status PlanFourStage(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                     TimeTerms* terms) {
  launch->chunk_tiles = launch->geometry.tiles;
  PlaceWorkspace(/*has_v=*/true, /*has_m=*/true, launch);
  *terms = TermsOf(instance, gpu, *launch);
  return {};
}

Status PlanPingpong(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                    TimeTerms* terms) {
  const Geometry& g = launch->geometry;
  if (g.cols % 16 != 0) {
    return Status::Unimplemented("expected output channels of a group in multiples of 16, got " +
                                 std::to_string(g.cols));
  }
  launch->ctas = gpu.sm_count;
  launch->chunk_tiles = g.tiles;
  PlaceWorkspace(/*has_v=*/true, /*has_m=*/true, launch);
  const PingpongGemmTiles tiles(g.tiles, g.cols, instance.tile_n);
  const int64_t clusters = std::max(1, gpu.sm_count / kPingpongGemmCtas);
  const int64_t rounds =
      CeilDiv(tiles.m_tiles * tiles.n_tiles * g.groups * launch->points(), clusters);
  *terms = TermsWithGemms(
      *launch, gpu,
      static_cast<double>(rounds) * TileCycles(instance, *launch, gpu.wgmma_per_clock));
  return {};
}

Status PlanPingpongHalf(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                        TimeTerms* terms) {
  launch->half_products = true;
  return PlanPingpong(instance, gpu, launch, terms);
}

Status PlanChunked(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                   TimeTerms* terms) {
  JAXCONV_RETURN_IF_ERROR(PlaceChunks(instance.tile_m, kChunkBytes, launch));
  *terms = TermsOf(instance, gpu, *launch);
  return {};
}

}  // namespace jaxconv::winograd
