#include "cuda/select/cost_model.h"

#include <algorithm>
#include <cmath>

namespace jaxconv {
namespace {

// Nominal clock. Only ratios matter for the choice within a family; between families it cancels,
// because all are predicted at the same one.
constexpr double kCyclesPerMicrosecond = 1970;
// From the end of one kernel to the start of the next, and a CTA's own start.
constexpr double kLaunchCycles = 4000;
// Per clock and SM.
constexpr double kSharedBytesPerCycle = 128;
constexpr double kL2BytesPerCycle = 40;
constexpr double kDramBytesPerCycle = 16;
// Filling the pipeline: two trips to DRAM, and the decoding of the tile's rows.
constexpr double kPrologueCycles = 2200;
// The epilogue's way through shared memory to the output.
constexpr double kEpilogueBytesPerCycle = 24;

// Multiplications of 16-bit operands per clock and SM through mma.sync; 32-bit ones run at half.
double MmaPerCycle(const DeviceInfo& device) {
  switch (device.cc_major) {
    case 8:
      return device.cc_minor == 0 ? 1024 : 512;
    case 9:
      return 1365;  // m16n8k16 every 1.5 clocks: two thirds of what wgmma reaches
    default:
      return 1024;
  }
}

// Shared memory that CTAs of an SM share, and what the runtime keeps of it for each.
int64_t SharedBytesOfSm(const DeviceInfo& device) { return device.smem_per_block_optin + 1024; }
constexpr int64_t kReservedBytesOfCta = 1024;

// How much of the tensor cores' rate so many warps on an SM reach: each scheduler has warps / 4,
// and a warp alone cannot hide its own loads and barriers.
double Occupancy(double warps) {
  if (warps >= 8) return 1.0;
  if (warps >= 4) return 0.75;
  return 0.5 * warps / 4;
}

}  // namespace

int64_t ResidentCtas(const TileCost& tile, const DeviceInfo& device) {
  return std::min(tile.ctas_per_sm,
                  SharedBytesOfSm(device) / (tile.shared_bytes + kReservedBytesOfCta));
}

double PredictMicroseconds(const TileCost& tile, const TiledWork& work, const DeviceInfo& device) {
  const int64_t resident = ResidentCtas(tile, device);
  if (resident == 0) return HUGE_VAL;
  const double tile_k = static_cast<double>(tile.tile_k_bytes) / work.element_bytes;
  const double mma = MmaPerCycle(device) * 2 / work.element_bytes;
  const double tensor = tile.tile_m * tile.tile_n * tile_k / mma;
  const double warps = static_cast<double>(tile.warps_m * tile.warps_n);
  const double fill = static_cast<double>((tile.tile_m + tile.tile_n) * tile.tile_k_bytes);
  const double fragments =
      warps * (tile.tile_m / tile.warps_m + tile.tile_n / tile.warps_n) * tile.tile_k_bytes;
  const double shared = (fill + fragments) / kSharedBytesPerCycle;
  const double l2 = fill / kL2BytesPerCycle;
  const double stage = std::max({tensor, shared, l2}) + tile.stage_cycles;
  const double edge =
      kPrologueCycles / resident + tile.tile_m * tile.tile_n * 4 / kEpilogueBytesPerCycle;
  // The busiest SM; its last CTAs may be too few to keep the tensor cores busy.
  const int64_t per_sm = (work.ctas + device.sm_count - 1) / device.sm_count;
  const int64_t last = per_sm % resident;
  const double cta = work.blocks * stage;
  double cycles = (per_sm - last) * (cta / Occupancy(warps * resident) + edge);
  if (last > 0) cycles += last * cta / Occupancy(warps * last) + last * edge;
  const double dram =
      (work.dram_bytes + work.partial_bytes) / (kDramBytesPerCycle * device.sm_count);
  cycles = std::max(cycles, dram) + kLaunchCycles;
  if (work.partial_bytes > 0) {
    cycles += kLaunchCycles + work.partial_bytes / (kDramBytesPerCycle * device.sm_count);
  }
  return cycles / kCyclesPerMicrosecond;
}

}  // namespace jaxconv
