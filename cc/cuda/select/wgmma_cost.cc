#include "cuda/select/wgmma_cost.h"

#include <algorithm>

namespace jaxconv {
namespace {

// As in cost_model.cc, so that families compare.
constexpr double kCyclesPerMicrosecond = 1970;
constexpr double kLaunchCycles = 4000;
constexpr double kDramBytesPerCycle = 16;
// 16-bit multiplications per clock and SM. At full rate power brings the clock from 1970 down to
// 1450 MHz; counted here as a lower rate at the nominal clock.
constexpr double kMmaPerCycle = 2048 * 0.80;
// Of copies that several SMs want at about the same time.
constexpr double kL2BytesPerCycle = 47;
// The issuing thread: wait, announce, first copy; every further copy.
constexpr double kStepCycles = 245;
constexpr double kCopyCycles = 70;
// Filling the ring and the first trip to DRAM.
constexpr double kPrologueCycles = 1500;
constexpr double kEpilogueCycles = 500;
constexpr double kEpilogueBytesPerCycle = 64;

}  // namespace

double PredictWgmmaMicroseconds(const WgmmaTileCost& tile, const WgmmaWork& work,
                                const DeviceInfo& device) {
  const double columns = static_cast<double>(std::min(tile.tile_n, (work.gemm_n + 63) / 64 * 64));
  const double tensor = static_cast<double>(tile.tile_m * tile.tile_n * 64) / kMmaPerCycle;
  const double bytes_a = static_cast<double>(tile.tile_m) * 128;
  const double bytes_b = tile.resident ? 0 : columns * 128 / static_cast<double>(tile.cluster);
  const double l2 = (bytes_a + bytes_b) / kL2BytesPerCycle;
  const double copies = tile.resident ? 0 : columns / 64 / static_cast<double>(tile.cluster);
  const double issue = kStepCycles + kCopyCycles * copies;
  const double step = std::max({tensor, l2, issue});
  const double epilogue =
      kEpilogueCycles + static_cast<double>(tile.tile_m) * columns * 2 / kEpilogueBytesPerCycle;
  const int64_t per_sm = (work.tiles + device.sm_count - 1) / device.sm_count;
  double cycles = static_cast<double>(per_sm) * (work.steps * step + epilogue);
  if (tile.resident) cycles += work.steps * columns * 128 / kL2BytesPerCycle;
  const double dram =
      (work.dram_bytes + work.partial_bytes) / (kDramBytesPerCycle * device.sm_count);
  cycles = std::max(cycles, dram) + kPrologueCycles + kLaunchCycles;
  if (work.partial_bytes > 0) {
    cycles += kLaunchCycles + work.partial_bytes / (kDramBytesPerCycle * device.sm_count);
  }
  return cycles / kCyclesPerMicrosecond;
}

}  // namespace jaxconv
