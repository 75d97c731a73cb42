#include "cuda/igemm_wmma/cost.h"

#include <algorithm>

namespace jaxconv::igemm_wmma {
namespace {

// A kernel's start beyond gpu.launch_us: 1.714 us from one kernel of a CUDA graph to the next.
constexpr double kStartUs = 0.014286;
// Per clock and SM. Measured: 127.7 bytes for shared memory alone, 43 to 55 for tiles that many SMs
// read from L2 at about the same time.
constexpr double kSharedBytesPerCycle = 128;
constexpr double kL2BytesPerCycle = 43.4;
// Partial results mostly stay in L2 between the two kernels.
constexpr double kPartialBytesPerCycle = 20;
// Cycles to fill the pipeline: to decode the tile's rows, and one DRAM latency. Resident CTAs hide
// each other's.
constexpr double kPrologueCycles = 4000;
// Bytes of accumulators that pass through shared memory to the output.
constexpr double kEpilogueBytesPerCycle = 28;
// Cycles for each output of a tile that is not stored as 16 bytes.
constexpr double kUnalignedCycles = 0.25;
// The factor on a tile's wgrad share with TF32 operands: 20 times measured inside programs.
constexpr double kTf32WgradShare = 0.84;
// Shared memory that the runtime reserves for each CTA.
constexpr int64_t kReservedBytesOfCta = 1024;

// The throughput of an SM with only `ctas` of its `resident` CTAs, relative to a full SM: too few
// warps hide each other's loads and barriers.
double RateOfCtas(int64_t ctas, int64_t resident) {
  const double share = static_cast<double>(ctas) / static_cast<double>(resident);
  return share <= 0.25 ? 0.44 : share <= 0.5 ? 0.65 : 1.0;
}

}  // namespace

int64_t ResidentCtas(const TileCost& tile, const Gpu& gpu) {
  return std::min(tile.ctas_per_sm, (gpu.smem_per_block_optin + kReservedBytesOfCta) /
                                        (tile.shared_bytes + kReservedBytesOfCta));
}

double PredictMicroseconds(const TileCost& tile, const TiledWork& work, const Gpu& gpu) {
  const int64_t resident = ResidentCtas(tile, gpu);
  const double tile_k = static_cast<double>(tile.tile_k_bytes) / work.element_bytes;
  // 32-bit operands have half the throughput.
  const double mma = gpu.mma_sync_per_clock * 2 / work.element_bytes;
  const double tensor = tile.products * tile.tile_m * tile.tile_n * tile_k / mma;
  const double warps = static_cast<double>(tile.warps_m * tile.warps_n);
  const double fill = static_cast<double>((tile.tile_m + tile.tile_n) * tile.tile_k_bytes);
  const double fragments =
      warps * (tile.tile_m / tile.warps_m + tile.tile_n / tile.warps_n) * tile.tile_k_bytes;
  const double shared = (fill + fragments) / kSharedBytesPerCycle;
  const double l2 = fill / kL2BytesPerCycle;
  const bool tf32_wgrad = work.wgrad && work.element_bytes == 4 && tile.products == 1;
  const double share =
      (work.wgrad ? tile.wgrad_share : tile.gather_share) * (tf32_wgrad ? kTf32WgradShare : 1);
  const double cta = work.blocks * std::max({tensor, shared, l2}) / share;
  const auto outputs = static_cast<double>(tile.tile_m * tile.tile_n);
  const double edge = kPrologueCycles / static_cast<double>(resident) +
                      outputs * 4 / kEpilogueBytesPerCycle +
                      (work.unaligned_output ? outputs * kUnalignedCycles : 0);
  // The busiest SM. Its last CTAs may be too few to keep the tensor cores busy.
  const int64_t per_sm = (work.ctas + gpu.sm_count - 1) / gpu.sm_count;
  const int64_t last = per_sm % resident;
  double cycles = static_cast<double>(per_sm) * edge + static_cast<double>(per_sm - last) * cta;
  if (last > 0) cycles += static_cast<double>(last) * cta / RateOfCtas(last, resident);
  const double cycles_per_us = gpu.cycles_per_us() * kMmaSyncClockShare;
  const double start = gpu.launch_us + kStartUs;
  double microseconds =
      start + std::max(cycles / cycles_per_us,
                       work.dram_bytes / (gpu.dram_bytes_per_us * kMmaSyncDramShare));
  if (work.partial_bytes > 0) {
    microseconds +=
        start + 2 * work.partial_bytes / (kPartialBytesPerCycle * gpu.sm_count * cycles_per_us);
  }
  return microseconds;
}

}  // namespace jaxconv::igemm_wmma
