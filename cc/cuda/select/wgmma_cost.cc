#include "cuda/select/wgmma_cost.h"

#include <algorithm>

namespace jaxconv {
namespace {

// As in cost_model.cc, so that families compare.
constexpr double kCyclesPerMicrosecond = 1970;
constexpr double kLaunchCycles = 4000;
constexpr double kDramBytesPerCycle = 16;
// 16-bit multiplications per clock and SM. At full rate power brings the clock from 1970 down to
// 1500 MHz; counted here as a lower rate at the nominal clock.
constexpr double kMmaPerCycle = 2048 * 0.80;
// Out of L2: what only this SM wants, and what many want at about the same time.
constexpr double kOwnBytesPerCycle = 27;
constexpr double kSharedBytesPerCycle = 70;
// The issuing thread: wait, announce, first copy; every further copy.
constexpr double kLoadCycles = 245;
constexpr double kCopyCycles = 70;
// Filling the ring and the first trip to DRAM.
constexpr double kPrologueCycles = 1500;
constexpr double kEpilogueCycles = 500;
constexpr double kEpilogueBytesPerCycle = 64;

}  // namespace

double PredictWgmmaMicroseconds(const WgmmaTileCost& tile, const WgmmaWork& work,
                                const DeviceInfo& device) {
  const double tile_m = static_cast<double>(tile.tile_m);
  const double columns = static_cast<double>(std::min(tile.tile_n, (work.gemm_n + 63) / 64 * 64));
  const double n_tiles = static_cast<double>((work.gemm_n + tile.tile_n - 1) / tile.tile_n);
  const double cluster = static_cast<double>(tile.cluster);
  // Of one tap; the wgmmas of a tile run over all its columns, be they there or not.
  const double tensor = static_cast<double>(tile.tile_m * tile.tile_n * 64) / kMmaPerCycle;
  const double bytes_a = tile_m * 128 / work.taps_of_load;
  const double bytes_b = tile.resident ? 0 : columns * 128 / cluster;
  const double l2 = bytes_a / std::min(kOwnBytesPerCycle * n_tiles, kSharedBytesPerCycle) +
                    bytes_b / kSharedBytesPerCycle;
  const double copies = tile.resident ? 0 : columns / 64 / cluster;
  const double issue = kLoadCycles / work.taps_of_load + kCopyCycles * copies +
                       (work.taps_of_load > 1 && !tile.resident ? kLoadCycles / 2 : 0);
  const double tap = std::max({tensor, l2, issue});
  const double epilogue = kEpilogueCycles + tile_m * columns * 2 / kEpilogueBytesPerCycle;
  const double tiles = static_cast<double>((work.tiles + device.sm_count - 1) / device.sm_count);
  double cycles = tile.pingpong ? tiles * std::max(work.taps * tap, epilogue / 2) + epilogue
                                : tiles * (work.taps * tap + epilogue);
  if (tile.resident) cycles += work.taps * columns * 128 / kSharedBytesPerCycle;
  const double dram =
      (work.dram_bytes + work.partial_bytes) / (kDramBytesPerCycle * device.sm_count);
  cycles = std::max(cycles, dram) + kPrologueCycles + kLaunchCycles;
  if (work.partial_bytes > 0) {
    cycles += kLaunchCycles + work.partial_bytes / (kDramBytesPerCycle * device.sm_count);
  }
  return cycles / kCyclesPerMicrosecond;
}

}  // namespace jaxconv
