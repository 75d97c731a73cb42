#include "cuda/select/wgmma_cost.h"

#include <algorithm>

namespace jaxconv {
namespace {

// As in cost_model.cc, so that families compare.
constexpr double kCyclesPerMicrosecond = 1970;
constexpr double kLaunchCycles = 4000;
constexpr double kDramBytesPerCycle = 17.5;
// Fitted to 500 measured times (18 layers, three operations, every tile that takes them), so that
// the choices lose least against the best tile: 1.5 % on average.
// 16-bit multiplications per clock and SM; power brings the clock from 1970 down to 1500 MHz at
// full rate, counted here as a lower rate at the nominal clock. And cycles that every step adds.
constexpr double kMmaPerCycle = 1650;
constexpr double kStepCycles = 24;
// Out of L2, divided among the SMs that want the same bytes at about the same time; and how much of
// it does not hide behind the tensor cores.
constexpr double kL2BytesPerCycle = 37;
constexpr double kL2Exposed = 0.17;
// The issuing thread: wait, announce, first copy; every further copy.
constexpr double kLoadCycles = 337;
constexpr double kCopyCycles = 120;
// Filling the ring and the first trip to DRAM, the last tile's way out.
constexpr double kPrologueCycles = 4600;
constexpr double kEpilogueCycles = 150;
constexpr double kEpilogueBytesPerCycle = 230;
constexpr double kTf32EpilogueBytesPerCycle = 120;  // 1.1 % over the best tile with it, 1.5 without
// Sectors stored one by one take this much more of DRAM's time than whole lines.
constexpr double kSectorExcess = 0.25;
// Of the shorter of SM and DRAM time.
constexpr double kDramExposed = 0.03;

}  // namespace

double PredictWgmmaMicroseconds(const WgmmaTileCost& tile, const WgmmaWork& work,
                                const DeviceInfo& device) {
  const double tile_m = static_cast<double>(tile.tile_m);
  const double columns = static_cast<double>(std::min(tile.tile_n, (work.gemm_n + 63) / 64 * 64));
  // Of one piece of the reduction, half as long in TF32 at half the rate; wgmma runs over all
  // columns of the tile, be they there or not.
  const double tensor =
      static_cast<double>(tile.tile_m * tile.tile_n * 64) / (kMmaPerCycle * tile.pace) +
      kStepCycles;
  const double bytes_a = tile_m * 128 / work.taps_of_load;
  const double bytes_b = tile.resident ? 0 : columns * 128;
  const double l2 =
      (bytes_a / static_cast<double>(work.n_tiles) + bytes_b / static_cast<double>(work.m_tiles)) /
      kL2BytesPerCycle;
  const double copies = (tile.resident ? 0 : columns / 64) + work.extra_copies;
  const double issue = kLoadCycles / work.taps_of_load + kCopyCycles * copies +
                       (work.taps_of_load > 1 && !tile.resident ? kLoadCycles / 2 : 0);
  const double tap = std::max({tensor, l2, issue}) + kL2Exposed * l2;
  const double epilogue =
      kEpilogueCycles + tile_m * columns * work.out_bytes /
                            (work.tf32 ? kTf32EpilogueBytesPerCycle : kEpilogueBytesPerCycle);
  const double tiles = static_cast<double>((work.tiles + device.sm_count - 1) / device.sm_count);
  const double sm = tile.pingpong ? tiles * std::max(work.taps * tap, epilogue / 2) + epilogue
                                  : tiles * (work.taps * tap + epilogue);
  const double dram = (work.dram_bytes + kSectorExcess * work.sector_bytes + work.partial_bytes) /
                      (kDramBytesPerCycle * device.sm_count);
  double cycles =
      std::max(sm, dram) + kDramExposed * std::min(sm, dram) + kPrologueCycles + kLaunchCycles;
  if (work.partial_bytes > 0) {
    cycles += kLaunchCycles + work.partial_bytes / (kDramBytesPerCycle * device.sm_count);
  }
  if (work.transposed_bytes > 0) {
    // Read and written; the filter comes out of DRAM then, and out of L2 later.
    cycles += kLaunchCycles + 2 * work.transposed_bytes / (kDramBytesPerCycle * device.sm_count);
  }
  return cycles / kCyclesPerMicrosecond;
}

}  // namespace jaxconv
