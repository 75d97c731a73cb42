#include "cuda/winograd/four_stage_plan.h"

#include <string>

namespace jaxconv::winograd {
namespace {

// Of mma.sync's rate by igemm_wmma's tiles of the same shape (its kernels.def), whose loads are more
// work than those of a plain matrix.
constexpr double kMmaShare = 0.7;
// Of wgmma's: tiles of 128x128 take 64 bytes a cycle from L2, which gives 45.
constexpr double kWgmmaShare = 0.65;

double Microseconds(const Instance& instance, const Gpu& gpu, const LaunchParams& launch) {
  const double rate = StoredRate(gpu, launch);
  const bool wgmma = instance.capability == 90;
  return FilterMicroseconds(launch, gpu) + TransformMicroseconds(launch, gpu, rate) +
         GemmMicroseconds(instance, launch, gpu,
                          wgmma ? gpu.wgmma_per_clock : gpu.mma_sync_per_clock,
                          wgmma ? kWgmmaShare : kMmaShare, rate);
}

}  // namespace

// V and M of a chunk are in L2; those of all tiles are in DRAM unless they fit as a chunk does.
double StoredRate(const Gpu& gpu, const LaunchParams& launch) {
  const double stored = static_cast<double>(launch.chunk_tiles) *
                        static_cast<double>(InputBytes(launch) + ProductBytes(launch));
  return stored <= kL2Share * static_cast<double>(gpu.l2_bytes) ? kL2Rate : 1;
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
    // As few chunks as fit, all but the last equally long.
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

Status PlanChunked(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                   double* microseconds) {
  JAXCONV_RETURN_IF_ERROR(PlaceChunks(instance.tile_m, kChunkBytes, launch));
  *microseconds = Microseconds(instance, gpu, *launch);
  return {};
}

}  // namespace jaxconv::winograd
