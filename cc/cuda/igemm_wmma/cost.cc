#include "cuda/igemm_wmma/cost.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/rates.h"

namespace jaxconv::igemm_wmma {
namespace {

// Accumulators that pass through shared memory to the output, if not stored as 16 bytes. Fitted.
constexpr double kUnalignedStoreBytesPerCycle = 10;
// Shared memory that the runtime reserves for each CTA.
constexpr int64_t kReservedBytesOfCta = 1024;

}  // namespace

int64_t ResidentCtas(const TileCost& tile, const Gpu& gpu) {
  return std::min(tile.ctas_per_sm, (gpu.smem_per_block_optin + kReservedBytesOfCta) /
                                        (tile.shared_bytes + kReservedBytesOfCta));
}

TimeTerms TermsOf(const TileCost& tile, const TiledWork& work, const Gpu& gpu) {
  const auto resident = static_cast<double>(ResidentCtas(tile, gpu));
  const double tile_k = static_cast<double>(tile.tile_k_bytes) / work.element_bytes;
  // 32-bit operands have half the throughput.
  const double mma = gpu.mma_sync_per_clock * 2 / work.element_bytes;
  const double tensor = tile.products * tile.tile_m * tile.tile_n * tile_k / mma;
  const double warps = static_cast<double>(tile.warps_m * tile.warps_n);
  const double fill = static_cast<double>((tile.tile_m + tile.tile_n) * tile.tile_k_bytes);
  const double fragments =
      warps * (tile.tile_m / tile.warps_m + tile.tile_n / tile.warps_n) * tile.tile_k_bytes;
  const double copies = static_cast<double>(tile.tile_k_bytes) / kLanes *
                        (static_cast<double>(tile.tile_m) / work.a_copy_bytes +
                         static_cast<double>(tile.tile_n) / work.b_copy_bytes);
  const double load = std::max({(fill + fragments) / kSharedBytesPerCycle,
                                fill / kTileL2BytesPerCycle, copies * kWarpCopyCycles});
  const double store = static_cast<double>(tile.tile_m * tile.tile_n * kFloatBytes) /
                       (work.unaligned_output ? kUnalignedStoreBytesPerCycle : kStoreBytesPerCycle);
  // The busiest SM. Its last CTAs are too few to hide all loads and barriers: their throughput is
  // the square root of their share of a full SM.
  const auto per_sm = static_cast<double>((work.ctas + gpu.sm_count - 1) / gpu.sm_count);
  const double last = std::fmod(per_sm, resident);
  const double k_blocks = (per_sm - last + std::sqrt(last * resident)) * work.blocks;
  TimeTerms terms;
  terms.tensor_cores = (k_blocks * tensor + per_sm * kTileLatency / resident) / gpu.cycles_per_us();
  terms.loads = k_blocks * load / gpu.cycles_per_us();
  terms.stores = per_sm * store / gpu.cycles_per_us();
  terms.dram = work.dram_bytes / gpu.dram_bytes_per_us;
  terms.launch = gpu.launch_us;
  if (work.partial_bytes > 0) {
    terms.launch +=
        gpu.launch_us +
        2 * work.partial_bytes / (kPartialBytesPerCycle * gpu.sm_count * gpu.cycles_per_us());
  }
  return terms;
}

}  // namespace jaxconv::igemm_wmma
