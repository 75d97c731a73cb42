#include "cuda/winograd/products_plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "cuda/common/rates.h"
#include "cuda/winograd/four_stage_plan.h"

namespace jaxconv::winograd {
namespace {

// The share of the FP32 FMA rate that elementwise.cuh reaches on an H200: 8 FMA come with 16
// conversions and two loads of 16 bytes a lane.
constexpr double kElementwiseShare = 0.055;

// A lane's offsets within a CTA's block of V and U have 32 bits.
Status CheckOffsets(const Instance& instance, const LaunchParams& launch) {
  const Geometry& g = launch.geometry;
  const int64_t largest =
      std::max(int64_t{instance.tile_m} * g.in_channels(), int64_t{instance.tile_n} * g.red);
  if (largest > std::numeric_limits<int32_t>::max()) {
    return Status::Unimplemented("expected blocks of V and U below 2^31 elements, got " +
                                 std::to_string(largest));
  }
  return {};
}

// A CTA takes the longer of loading its rows of V and U from L2 and issuing its MMAs. The CTAs of
// an SM share its throughput.
TimeTerms SyncFreeTerms(const Instance& instance, const Gpu& gpu, const LaunchParams& launch) {
  constexpr int kBlock = 32;  // channels
  const Geometry& g = launch.geometry;
  const int64_t ctas =
      CeilDiv(launch.chunk_tiles, instance.tile_m) * CeilDiv(g.cols, instance.tile_n) * g.groups;
  const double l2_bytes_per_cycle = gpu.dram_bytes_per_cycle() * kL2Rate / gpu.sm_count;
  const double mma = instance.tile_m * instance.tile_n * kBlock / gpu.mma_sync_per_clock;
  const double loads = (instance.tile_m + instance.tile_n) * kBlock * 2 / l2_bytes_per_cycle;
  const double blocks = static_cast<double>(launch.points() * CeilDiv(g.red, kBlock));
  return TermsWithGemms(
      launch, gpu,
      std::max(1.0, static_cast<double>(ctas) / gpu.sm_count) * blocks * std::max(mma, loads));
}

}  // namespace

Status PlanSyncFree(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                    TimeTerms* terms) {
  JAXCONV_RETURN_IF_ERROR(CheckOffsets(instance, *launch));
  launch->chunk_tiles = launch->geometry.tiles;
  PlaceWorkspace(/*has_v=*/true, /*has_m=*/true, launch);
  *terms = SyncFreeTerms(instance, gpu, *launch);
  return {};
}

Status PlanPkfLlc(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                  TimeTerms* terms) {
  JAXCONV_RETURN_IF_ERROR(CheckOffsets(instance, *launch));
  // The share of L2 that V and M may take: kChunkBytes of 50 MiB.
  constexpr int64_t kOfBytes = int64_t{50} << 20;
  const int64_t l2_bytes = gpu.l2_bytes * kChunkBytes / kOfBytes;
  JAXCONV_RETURN_IF_ERROR(PlaceChunks(instance.tile_m, std::min(kChunkBytes, l2_bytes), launch));
  *terms = SyncFreeTerms(instance, gpu, *launch);
  return {};
}

Status PlanElementwise(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                       TimeTerms* terms) {
  JAXCONV_RETURN_IF_ERROR(CheckOffsets(instance, *launch));
  launch->chunk_tiles = launch->geometry.tiles;
  PlaceWorkspace(/*has_v=*/true, /*has_m=*/true, launch);
  const Geometry& g = launch->geometry;
  const double products = double{1} * launch->points() * g.tiles * g.out_channels() * g.red;
  *terms = TermsWithGemms(*launch, gpu,
                          products / (gpu.fma_per_clock * gpu.sm_count * kElementwiseShare));
  return {};
}

}  // namespace jaxconv::winograd
