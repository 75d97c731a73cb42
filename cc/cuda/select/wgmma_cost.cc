#include "cuda/select/wgmma_cost.h"

#include <algorithm>
#include <cmath>

namespace jaxconv {
namespace {

// As in cost_model.cc, so that families compare.
constexpr double kCyclesPerMicrosecond = 1970;
constexpr double kLaunchCycles = 4000;
constexpr double kDramBytesPerCycle = 18.5;

// Fitted to 5500 measured times, so that the choices lose least against the best tile
// (docs/notes/hopper.md). Terms stand in for each other; only their sum is to be believed.

// 16-bit multiplications per clock and SM, and cycles that every step adds.
constexpr double kMmaPerCycle = 1900;
constexpr double kStepCycles = 2.79;
// Cycles of the copy engine for a line of a box (128 bytes of shared memory), by what the distance
// of lines in global memory is a multiple of: 128 bytes, a sector of 32, 16; and how much of it
// does not hide behind the tensor cores.
constexpr double kLineCycles = 2.17;
constexpr double kSectorLineCycles = 3.19;
constexpr double kUnalignedLineCycles = 3.68;
constexpr double kLinesExposed = 0.2;
// The same of the operand that all SMs read, and how many lines of it are so few that SMs queue.
constexpr double kSharedLineCycles = 1.62;
constexpr double kSharedSectorLineCycles = 2.67;
constexpr double kSharedUnalignedLineCycles = 3.77;
constexpr double kFewLines = 215;
// The issuing thread: next tile; wait, announce, first copy; every further copy.
constexpr double kTileCycles = 197;
constexpr double kLoadCycles = 100;
constexpr double kCopyCycles = 200;
// Filling the ring and the first trip to DRAM, the last tile's way out.
constexpr double kPrologueCycles = 500;
constexpr double kEpilogueBytesPerCycle = 32.9;
// Results of wgrad in rows: 32 bytes here and there.
constexpr double kSectorBytesPerCycle = 2.2;
// Partial results of split-K: written by all SMs at once, read again by a kernel of its own.
constexpr double kPartialBytesPerCycle = 17.9;
constexpr double kReduceBytesPerCycle = 12.3;
constexpr double kReduceLaunchCycles = 3100;
// Of pixels as columns, whose result is turned on its way out: of a CTA's only tile, or beside busy
// tensor cores.
constexpr double kColumnsEpilogueBytesPerCycle = 25;
constexpr double kColumnsBesideBytesPerCycle = 23.8;
constexpr double kTf32EpilogueBytesPerCycle = 17.6;
// Sectors stored one by one take this much more of DRAM's time than whole lines; rows of the output
// that CTAs share in the middle of a sector, 128 bytes each, this much.
constexpr double kSectorExcess = 0.84;
constexpr double kSharedSectorExcess = 1.32;
// Of DRAM's time, where tiles are drawn and no SM is waited for.
constexpr double kDrawnShare = 0.88;
// Of the shorter of SM and DRAM time.
constexpr double kDramExposed = 0.28;

// Tiles of a cluster, fitted to 270 times (ResNet-50 at batch 1 to 16, one to eight CTAs). They are
// so short that nothing hides anything: the terms are added.
// A step of a lone CTA, which is the latency of a load over the stages of the ring (292 fits best;
// 320 leaves 7x7 maps of 16 images to the persistent tiles, which are faster there); the way into
// an SM, where its two CTAs share it.
constexpr double kClusterStepCycles = 281;
constexpr double kClusterCtasPerSm = 2;
// SMs come in groups of 14 to 18, and a cluster lies in one group: of 132, larger clusters find
// room on about 112.
constexpr double kClusterSmShare = 0.85;
constexpr double kClusterStartCycles = 2170;
constexpr double kClusterEpilogueCycles = 1070;  // of every CTA of an SM
constexpr double kClusterBarrierCycles = 159;
constexpr double kClusterExchangeCycles =
    2360;  // of every CTA of an SM, through distributed memory

double LineCycles(int64_t pitch) {
  return pitch % 128 == 0  ? kLineCycles
         : pitch % 32 == 0 ? kSectorLineCycles
                           : kUnalignedLineCycles;
}

double SharedLineCycles(int64_t pitch) {
  return pitch % 128 == 0  ? kSharedLineCycles
         : pitch % 32 == 0 ? kSharedSectorLineCycles
                           : kSharedUnalignedLineCycles;
}

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
  const double lines_a = tile_m / (work.taps_of_load * work.rows_of_load);
  const double lines_b = tile.resident ? 0 : columns;
  const double few = work.filter_bytes > 0 ? 1 + kFewLines * 128 / work.filter_bytes : 1;
  const double lines =
      lines_a * LineCycles(work.pitch_a) + lines_b * few * SharedLineCycles(work.pitch_b);
  const double copies = (tile.resident ? 0 : columns / 64) + work.extra_copies;
  const double issue = (kLoadCycles / work.taps_of_load + kCopyCycles * copies +
                        (work.taps_of_load > 1 && !tile.resident ? kLoadCycles / 2 : 0)) /
                       work.pieces_of_step;
  const double tap = std::max({tensor, lines, issue}) + (tile.resident ? 0 : kLinesExposed * lines);
  // With a resident filter a CTA keeps its columns.
  const int64_t columns_of_grid = tile.resident ? work.n_tiles : 1;
  const int64_t ctas = std::max<int64_t>(1, device.sm_count / columns_of_grid) * columns_of_grid;
  const double tiles = static_cast<double>((work.tiles + ctas - 1) / ctas);
  const bool turned = tile.columns && tensor >= std::max(lines, issue);
  const double out_bytes_per_cycle = turned && tiles > 1      ? kColumnsBesideBytesPerCycle
                                     : turned                 ? kColumnsEpilogueBytesPerCycle
                                     : work.partial_bytes > 0 ? kPartialBytesPerCycle
                                     : work.tf32              ? kTf32EpilogueBytesPerCycle
                                     : work.rows_of_load > 1  ? kSectorBytesPerCycle
                                                              : kEpilogueBytesPerCycle;
  const double epilogue = tile_m * columns * work.out_bytes / out_bytes_per_cycle;
  const double mainloop = work.taps * tap + kTileCycles;
  const double sm = tile.pingpong ? tiles * std::max(mainloop, epilogue / 2) + epilogue
                                  : tiles * (mainloop + epilogue);
  const double shared_sectors =
      work.n_tiles > 1 && work.pitch_out % 32 != 0
          ? kSharedSectorExcess * 128 / (static_cast<double>(tile.tile_n) * work.out_bytes)
          : 0;
  const double dram = (work.dram_bytes + shared_sectors * work.written_bytes +
                       kSectorExcess * work.sector_bytes + work.partial_bytes) *
                      (work.drawn ? kDrawnShare : 1) / (kDramBytesPerCycle * device.sm_count);
  double cycles =
      std::max(sm, dram) + kDramExposed * std::min(sm, dram) + kPrologueCycles + kLaunchCycles;
  if (work.partial_bytes > 0) {
    // The fit to TF32 has a launch beside it.
    cycles += (work.tf32 ? kLaunchCycles : kReduceLaunchCycles) +
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
  const double lines = static_cast<double>(tile.tile_m) * LineCycles(work.pitch_a) +
                       static_cast<double>(tile.tile_n) * SharedLineCycles(work.pitch_b);
  double cycles = work.taps * std::max(waves * kClusterStepCycles, ctas_of_sm * lines) +
                  ctas_of_sm * kClusterEpilogueCycles;
  if (ranks > 1) cycles += kClusterBarrierCycles + ctas_of_sm * kClusterExchangeCycles;
  cycles += work.dram_bytes / (kDramBytesPerCycle * device.sm_count) + kClusterStartCycles;
  return cycles / kCyclesPerMicrosecond;
}

}  // namespace jaxconv
