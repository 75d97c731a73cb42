#include "cuda/winograd/four_stage_plan.h"

#include <algorithm>
#include <string>

#include "cuda/winograd/pingpong_gemm_params.h"

namespace jaxconv::winograd {
namespace {

// A batched GEMM: peak multiply-adds of an SM in a cycle, the share that the mainloop reaches
// (relative to the boost clock, which the power limit prevents), and a tile's cycles outside the
// mainloop. Fitted on an H200. A 64x64 tile reads twice the bytes from L2 per product that a
// 128x128 tile reads.
struct GemmRate {
  double multiply_adds, share, tile_cycles;
};

GemmRate RateOf(const Instance& instance, const Gpu& gpu) {
  if (instance.tile_m == 64) return {gpu.mma_sync_per_clock, 0.385, 580};
  return {gpu.mma_sync_per_clock, 0.61, 270};
}

// The share of the persistent GEMM, predicted from the direct kernel with the same mainloop.
constexpr double kPingpongShare = 0.68;

// Cycles of a CTA's tile.
double TileCycles(const Instance& instance, const LaunchParams& launch, const GemmRate& rate) {
  constexpr int64_t kBlock = 64;  // of the reduction
  return instance.tile_m * instance.tile_n *
             static_cast<double>(CeilDiv(launch.geometry.red, kBlock) * kBlock) /
             (rate.multiply_adds * rate.share) +
         rate.tile_cycles;
}

double Microseconds(const Gpu& gpu, const LaunchParams& launch, double waves, double tile_cycles) {
  const double rate = StoredRate(gpu, launch);
  return FilterMicroseconds(launch, gpu) + TransformMicroseconds(launch, gpu, rate) +
         GemmMicroseconds(launch, gpu, waves * tile_cycles, rate);
}

double Microseconds(const Instance& instance, const Gpu& gpu, const LaunchParams& launch) {
  const Geometry& g = launch.geometry;
  const int64_t ctas = CeilDiv(launch.chunk_tiles, instance.tile_m) *
                       CeilDiv(g.cols, instance.tile_n) * g.groups * launch.points();
  return Microseconds(gpu, launch, static_cast<double>(CeilDiv(ctas, gpu.sm_count)),
                      TileCycles(instance, launch, RateOf(instance, gpu)));
}

}  // namespace

// V and M of a chunk lie in L2; those of all tiles lie in DRAM unless they are as small as a chunk.
double StoredRate(const Gpu& gpu, const LaunchParams& launch) {
  const double stored = static_cast<double>(launch.chunk_tiles) *
                        static_cast<double>(InputBytes(launch) + ProductBytes(launch));
  return stored <= kL2Share * static_cast<double>(gpu.l2_bytes) ? kStoredL2Rate : 1;
}

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
                     double* microseconds) {
  launch->chunk_tiles = launch->geometry.tiles;
  PlaceWorkspace(/*has_v=*/true, /*has_m=*/true, launch);
  *microseconds = Microseconds(instance, gpu, *launch);
  return {};
}

Status PlanPingpong(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                    double* microseconds) {
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
  *microseconds =
      Microseconds(gpu, *launch, static_cast<double>(rounds),
                   TileCycles(instance, *launch, {gpu.wgmma_per_clock, kPingpongShare, 0}));
  return {};
}

Status PlanPingpongHalf(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                        double* microseconds) {
  launch->half_products = true;
  return PlanPingpong(instance, gpu, launch, microseconds);
}

Status PlanChunked(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                   double* microseconds) {
  JAXCONV_RETURN_IF_ERROR(PlaceChunks(instance.tile_m, kChunkBytes, launch));
  *microseconds = Microseconds(instance, gpu, *launch);
  return {};
}

}  // namespace jaxconv::winograd
