#include "cuda/select/cost_model.h"

#include <algorithm>
#include <cmath>

namespace jaxconv {
namespace {

// The clock of an H200 under this load; other families predict at theirs, and only ratios matter.
constexpr double kCyclesPerMicrosecond = 1750;
// From the end of one kernel of a CUDA graph to the start of the next.
constexpr double kLaunchCycles = 3000;
// Per clock and SM. 127.7 bytes were measured for shared memory alone, 43 to 55 for tiles that many
// SMs read from L2 at about the same time.
constexpr double kSharedBytesPerCycle = 128;
constexpr double kL2BytesPerCycle = 43.4;
constexpr double kDramBytesPerCycle = 13.4;
// Partial results mostly stay in L2 between the two kernels.
constexpr double kPartialBytesPerCycle = 20;
// Filling the pipeline: decoding the tile's rows, and one trip to DRAM. Resident CTAs hide it from
// each other.
constexpr double kPrologueCycles = 4000;
// Accumulators on their way through shared memory to the output.
constexpr double kEpilogueBytesPerCycle = 28;
// Outputs that are not stored by 16 bytes, each of a tile.
constexpr double kUnalignedCycles = 0.25;

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

// The rate of an SM that holds only `ctas` of its `resident` CTAs, against a full one: too few
// warps to hide each other's loads and barriers.
double RateOfCtas(int64_t ctas, int64_t resident) {
  const double share = static_cast<double>(ctas) / static_cast<double>(resident);
  return share <= 0.25 ? 0.44 : share <= 0.5 ? 0.65 : 1.0;
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
  const double efficiency = work.wgrad ? tile.wgrad_efficiency : tile.gather_efficiency;
  const double cta = work.blocks * std::max({tensor, shared, l2}) / efficiency;
  const auto outputs = static_cast<double>(tile.tile_m * tile.tile_n);
  const double edge = kPrologueCycles / static_cast<double>(resident) +
                      outputs * 4 / kEpilogueBytesPerCycle +
                      (work.unaligned_output ? outputs * kUnalignedCycles : 0);
  // The busiest SM; its last CTAs may be too few to keep the tensor cores busy.
  const int64_t per_sm = (work.ctas + device.sm_count - 1) / device.sm_count;
  const int64_t last = per_sm % resident;
  double cycles = static_cast<double>(per_sm) * edge + static_cast<double>(per_sm - last) * cta;
  if (last > 0) cycles += static_cast<double>(last) * cta / RateOfCtas(last, resident);
  cycles = std::max(cycles, work.dram_bytes / (kDramBytesPerCycle * device.sm_count));
  cycles += kLaunchCycles;
  if (work.partial_bytes > 0) {
    cycles += kLaunchCycles + 2 * work.partial_bytes / (kPartialBytesPerCycle * device.sm_count);
  }
  return cycles / kCyclesPerMicrosecond;
}

}  // namespace jaxconv
