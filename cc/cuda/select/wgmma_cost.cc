#include "cuda/select/wgmma_cost.h"

#include <algorithm>
#include <cmath>

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
// Results of wgrad in rows: 32 bytes here and there.
constexpr double kSectorBytesPerCycle = 10;
// Partial results of split-K: written by all SMs at once, read again by a kernel of its own.
constexpr double kPartialBytesPerCycle = 40;
constexpr double kReduceBytesPerCycle = 17;
// Of pixels as columns, whose result is turned on its way out beside busy tensor cores; and what a
// change of turns costs them.
constexpr double kColumnsEpilogueBytesPerCycle = 15;
constexpr double kColumnsTurnCycles = 200;
constexpr double kTf32EpilogueBytesPerCycle = 120;  // 1.1 % over the best tile with it, 1.5 without
// Sectors stored one by one take this much more of DRAM's time than whole lines.
constexpr double kSectorExcess = 0.25;
// Of DRAM's time, where tiles are drawn and no SM is waited for.
constexpr double kDrawnShare = 0.95;
// Of the shorter of SM and DRAM time.
constexpr double kDramExposed = 0.03;

// Tiles of a cluster, fitted to 270 times (ResNet-50 at batch 1 to 16, one to eight CTAs). They are
// so short that nothing hides anything: the terms are added.
// A step of a lone CTA, which is the latency of a load over the stages of the ring (292 fits best;
// 320 leaves 7x7 maps of 16 images to the persistent tiles, which are faster there); the way into
// an SM, where its two CTAs share it.
constexpr double kClusterStepCycles = 320;
constexpr double kClusterBytesPerCycle = 63;
constexpr double kClusterCtasPerSm = 2;
// SMs come in groups of 14 to 18, and a cluster lies in one group: of 132, larger clusters find
// room on about 112.
constexpr double kClusterSmShare = 0.85;
constexpr double kClusterStartCycles = 1137;
constexpr double kClusterEpilogueCycles = 1518;  // of every CTA of an SM
constexpr double kClusterBarrierCycles = 822;
constexpr double kClusterExchangeCycles =
    1562;  // of every CTA of an SM, through distributed memory

}  // namespace

double PredictWgmmaMicroseconds(const WgmmaTileCost& tile, const WgmmaWork& work,
                                const DeviceInfo& device) {
  const double tile_m = static_cast<double>(tile.tile_m);
  const double columns = static_cast<double>(std::min(tile.tile_n, (work.gemm_n + 63) / 64 * 64));
  // Of one piece of the reduction, half as long in TF32 at half the rate; wgmma runs over all
  // columns of the tile, be they there or not. With a resident filter, only the first tap of a load
  // has something to wait for.
  const double tensor =
      static_cast<double>(tile.tile_m * tile.tile_n * 64) / (kMmaPerCycle * tile.pace) +
      kStepCycles / ((tile.resident ? work.taps_of_load : 1) * work.pieces_of_step);
  const double bytes_a = tile_m * 128 / (work.taps_of_load * work.rows_of_load);
  const double bytes_b = tile.resident ? 0 : columns * 128;
  const double l2 =
      (bytes_a / static_cast<double>(work.n_tiles) + bytes_b / static_cast<double>(work.m_tiles)) /
      kL2BytesPerCycle;
  const double copies = (tile.resident ? 0 : columns / 64) + work.extra_copies;
  const double issue = (kLoadCycles / work.taps_of_load + kCopyCycles * copies +
                        (work.taps_of_load > 1 && !tile.resident ? kLoadCycles / 2 : 0)) /
                       work.pieces_of_step;
  const double tap = std::max({tensor, l2, issue}) + (tile.resident ? 0 : kL2Exposed * l2);
  const bool turned = tile.columns && tensor >= std::max(l2, issue);
  const double out_bytes_per_cycle = turned                   ? kColumnsEpilogueBytesPerCycle
                                     : work.partial_bytes > 0 ? kPartialBytesPerCycle
                                     : work.tf32              ? kTf32EpilogueBytesPerCycle
                                     : work.rows_of_load > 1  ? kSectorBytesPerCycle
                                                              : kEpilogueBytesPerCycle;
  const double epilogue = kEpilogueCycles + tile_m * columns * work.out_bytes / out_bytes_per_cycle;
  // With a resident filter a CTA keeps its columns.
  const int64_t columns_of_grid = tile.resident ? work.n_tiles : 1;
  const int64_t ctas = std::max<int64_t>(1, device.sm_count / columns_of_grid) * columns_of_grid;
  const double tiles = static_cast<double>((work.tiles + ctas - 1) / ctas);
  const double mainloop = work.taps * tap + (turned ? kColumnsTurnCycles : 0);
  const double sm = tile.pingpong ? tiles * std::max(mainloop, epilogue / 2) + epilogue
                                  : tiles * (mainloop + epilogue);
  const double dram = (work.dram_bytes + kSectorExcess * work.sector_bytes + work.partial_bytes) *
                      (work.drawn ? kDrawnShare : 1) / (kDramBytesPerCycle * device.sm_count);
  double cycles =
      std::max(sm, dram) + kDramExposed * std::min(sm, dram) + kPrologueCycles + kLaunchCycles;
  if (work.partial_bytes > 0) {
    // The fit to TF32 has a launch beside it.
    cycles += (work.tf32 ? kLaunchCycles : 0) +
              work.partial_bytes / (kReduceBytesPerCycle * device.sm_count);
  }
  if (work.transposed_bytes > 0) {
    // Read and written; the filter comes out of DRAM then, and out of L2 later.
    cycles += kLaunchCycles + 2 * work.transposed_bytes / (kDramBytesPerCycle * device.sm_count);
  }
  return cycles / kCyclesPerMicrosecond;
}

double PredictWgmmaClusterMicroseconds(const WgmmaTileCost& tile, const WgmmaWork& work,
                                       int64_t ranks, const DeviceInfo& device) {
  const double sms = device.sm_count * (ranks > 2 ? kClusterSmShare : 1);
  const double ctas = static_cast<double>(work.tiles);
  const double ctas_of_sm = std::ceil(ctas / sms);
  const double waves = std::ceil(ctas / (kClusterCtasPerSm * sms));
  const double bytes = static_cast<double>(tile.tile_m + tile.tile_n) * 128;
  double cycles =
      work.taps * std::max(waves * kClusterStepCycles, ctas_of_sm * bytes / kClusterBytesPerCycle) +
      ctas_of_sm * kClusterEpilogueCycles;
  if (ranks > 1) cycles += kClusterBarrierCycles + ctas_of_sm * kClusterExchangeCycles;
  cycles += work.dram_bytes / (kDramBytesPerCycle * device.sm_count) + kClusterStartCycles;
  return cycles / kCyclesPerMicrosecond;
}

}  // namespace jaxconv
