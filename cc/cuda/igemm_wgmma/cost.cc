#include "cuda/igemm_wgmma/cost.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/epilogue_params.h"

namespace jaxconv::igemm_wgmma {
namespace {

// The constants minimise the loss of the chosen tile against the best tile, over 5500 times
// measured on an H200; those of 1x1 filters, wgrad and TF32 over 640 times inside programs
// (docs/notes/igemm_wgmma.md). The terms are correlated: only their sum predicts a time.

// The reachable share of the GPU's wgmma throughput, and the cycles that each k-block adds.
constexpr double kWgmmaShare = 1900.0 / 2048;
constexpr double kKBlockCycles = 2.79;
// TMA cycles for one row of a box (128 bytes of shared memory), by the alignment of the row pitch
// in global memory: 128 bytes, 32 bytes (a sector), 16 bytes. k*RowsExposed is the share of these
// cycles that the tensor cores do not hide: 16-bit, TF32, wgrad of TF32 (none where dy is transposed).
constexpr double kRowCycles = 2.17;
constexpr double kSectorRowCycles = 3.19;
constexpr double kUnalignedRowCycles = 3.68;
constexpr double kRowsExposed = 0.159, kTf32RowsExposed = 0.12, kTf32WgradRowsExposed = 0.701;
// The same for the operand that all SMs read (B). The cost grows by 1 + kFewRows / rows, because
// SMs queue for the same few rows.
constexpr double kSharedRowCycles = 1.62;
constexpr double kSharedSectorRowCycles = 2.67;
constexpr double kSharedUnalignedRowCycles = 3.77;
constexpr double kFewRows = 215;
constexpr double kGroupRowsExcess = 1.5;
// Producer cycles: for the next tile (kTileCycles); for the wait, the announcement and the first
// copy of a k-block (kLoadCycles); for each further copy (kCopyCycles). The exceptions follow their
// constant.
constexpr double kTileCycles = 222;
// Strided dgrad with more than one tap: a residue class has few taps, and its pixels are stored
// between those of the other classes.
constexpr double kResidueTileCycles = 1100;
// 16-bit 1x1 filters, whose tiles have few k-blocks; weight-stationary 64-pixel tiles of one to
// four k-blocks; weight-stationary TF32.
constexpr double kPointwiseTileCycles = 614;
constexpr double kStationaryTileCycles = 448, kTf32StationaryTileCycles = 1255;
constexpr double kLoadCycles = 100;
constexpr double kCopyCycles = 200;
// Where dy is transposed, this many threads issue the copies, in turns.
constexpr double kProducers = 2;
// 16-bit wgrad, which copies boxes of both operands; wgrad of TF32 under taps, and without any.
constexpr double kWgradCopyCycles = 166;
constexpr double kTf32WgradCopyCycles = 250, kTf32WgradMatrixCopyCycles = 150;
// The first fill of the ring and the last tile's store; 16-bit 1x1 filters fill the ring from DRAM.
constexpr double kPrologueCycles = 500, kPointwisePrologueCycles = 1950;
constexpr double kEpilogueBytesPerCycle = 32.9;
// wgrad filter-row stores scattered sectors of 32 bytes.
constexpr double kSectorBytesPerCycle = 3.3;
// Partial results of split-K: written by all SMs at once, read again by a kernel of its own.
constexpr double kPartialBytesPerCycle = 477, kTf32PartialBytesPerCycle = 20.1;
constexpr double kReduceBytesPerCycle = 8.85;
// Swap-AB transposes its result in the epilogue: the throughput for a CTA's only tile, and beside
// busy tensor cores.
constexpr double kSwapAbEpilogueBytesPerCycle = 25;
constexpr double kSwapAbBesideBytesPerCycle = 23.8;
constexpr double kTf32EpilogueBytesPerCycle = 30.2;
// Extra DRAM time, relative to storing whole cache lines: for sectors stored one by one where
// output rows begin inside a line, and where they begin with a line or are shorter than one; for
// sectors that tiles of neighbouring columns share, per 128 bytes of a tile's row.
constexpr double kSectorExcess = 0.863, kAlignedSectorExcess = 0.366;
constexpr double kSharedSectorExcess = 1.32;
// Extra DRAM time for a line that two output rows share (rows longer than a line, pitch no multiple
// of 128 bytes): weight-stationary, stored in whole rows; tiles stored as several boxes of 64
// columns; swap-AB, stored as one box.
constexpr double kSharedLineExcess = 0.39;
constexpr double kSharedLineExcessC128 = 1.13;
constexpr double kSharedLineExcessRing = 2, kSharedLineExcessSwapAb = 1.22;
// Relative to gpu.dram_bytes_per_us. Above 1, because the model counts every tensor once, and L2
// holds a part of them.
constexpr double kDramShare = 1.1;
// wgrad stores little, so either its loads hide behind the tensor cores or the reverse. kIdleExcess
// is chosen, not fitted: SMs without a tile load nothing, which multiplies DRAM time by 1 +
// kIdleExcess * (their share).
constexpr double kWgradDramShare = 1.01, kWgradDramExposed = 0.0567, kIdleExcess = 0.163;
// A written byte takes 1 + kWrittenExcess times as long as a byte read.
constexpr double kWrittenExcess = 0.212;
// 16-bit 1x1 filters: the share of activations read again by the tiles of other columns that misses
// L2.
constexpr double kReread = 0.0087;
// DRAM time relative to static scheduling: with dynamic scheduling no SM waits for another.
constexpr double kDynamicShare = 0.938;
// The exposed share of the shorter of SM and DRAM time.
constexpr double kDramExposed = 0.236;
// Time beyond gpu.launch_us for a persistent kernel, which sets up barriers and tensor maps. The
// split-K reduction sets up neither, but takes as long with TF32 operands.
constexpr double kStartUs = 0.52, kFurtherStartUs = 4000.0 / 1970 - 1.7;

// The cluster form, fitted to 270 times (ResNet-50 at batch 1 to 16, one to eight CTAs). Its
// kernels are too short to overlap anything, so the terms are added. kClusterKBlockCycles is the
// load latency divided by the stages of the ring, for a CTA alone on its SM; two CTAs on an SM
// share its loads. (292 fits best, but 320 would leave 7x7 maps of 16 images to the persistent
// tiles, which are faster there.)
constexpr double kClusterKBlockCycles = 281;
constexpr double kClusterCtasPerSm = 2;
// A cluster lies within one GPC of 14 to 18 SMs, so clusters of more than two CTAs fit on about 112
// of 132 SMs.
constexpr double kClusterSmShare = 0.85;
// Added to gpu.launch_us; negative, because a part of the launch overlaps the kernel in front.
constexpr double kClusterStartUs = 2170.0 / 1970 - 1.7;
constexpr double kClusterEpilogueCycles = 1070;  // for each CTA on an SM
constexpr double kClusterBarrierCycles = 159;
// For each CTA on an SM: the exchange through distributed shared memory.
constexpr double kClusterExchangeCycles = 2360;

double RowCycles(int64_t pitch) {
  return pitch % 128 == 0 ? kRowCycles : pitch % 32 == 0 ? kSectorRowCycles : kUnalignedRowCycles;
}

double SharedRowCycles(int64_t pitch) {
  return pitch % 128 == 0  ? kSharedRowCycles
         : pitch % 32 == 0 ? kSharedSectorRowCycles
                           : kSharedUnalignedRowCycles;
}

// Bytes of a problem, as the kernel moves them.
struct Traffic {
  double tensors = 0, written = 0, filter = 0,
         activations = 0;  // filter: one group's; 0 in wgrad
  // Bytes from one row of a box to the next in global memory, for both operands and the output.
  int64_t pitch_a = 128, pitch_b = 128, pitch_out = 128;

  explicit Traffic(const ConvProblem& problem) {
    // A stride wider than the filter skips pixels of x; dgrad writes them nevertheless.
    const double part = problem.op == Op::kDgrad ? 1 : problem.PartOfX();
    const double x = part * static_cast<double>(problem.x_elements() * ByteWidth(problem.x_dtype));
    const double w = static_cast<double>(problem.w_elements() * ByteWidth(problem.w_dtype));
    const double y = static_cast<double>(problem.y_elements() * ByteWidth(problem.y_dtype));
    activations = problem.op == Op::kDgrad ? y : x;
    tensors = x + w + y + static_cast<double>(EpilogueBytes(problem));
    written = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : w;
    if (problem.op != Op::kWgrad) {
      filter = static_cast<double>(problem.taps() * problem.c_per_group() * problem.k_per_group() *
                                   ByteWidth(problem.w_dtype));
    }
    const int64_t x_pitch = problem.c * ByteWidth(problem.x_dtype);
    const int64_t y_pitch = problem.k * ByteWidth(problem.y_dtype);
    pitch_a = problem.op == Op::kDgrad ? y_pitch : x_pitch;
    pitch_b = TransposesFilter(problem) ? x_pitch / problem.groups : y_pitch;
    pitch_out = problem.op == Op::kDgrad ? x_pitch : y_pitch;
  }
};

double DramCycles(double bytes, const Gpu& gpu) {
  return bytes / (kDramShare * gpu.dram_bytes_per_cycle());
}

// `k_blocks`: for one CTA; `ctas`: in all clusters together.
double ClusterMicroseconds(const Instance& instance, const Traffic& traffic, double k_blocks,
                           double ctas, int64_t slices, const Gpu& gpu) {
  const double sms = gpu.sm_count * (slices > 2 ? kClusterSmShare : 1);
  const double ctas_of_sm = std::ceil(ctas / sms);
  const double waves = std::ceil(ctas / (kClusterCtasPerSm * sms));
  const double rows = static_cast<double>(instance.tile_m) * RowCycles(traffic.pitch_a) +
                      static_cast<double>(instance.tile_n) * SharedRowCycles(traffic.pitch_b);
  double cycles = k_blocks * std::max(waves * kClusterKBlockCycles, ctas_of_sm * rows) +
                  ctas_of_sm * kClusterEpilogueCycles;
  if (slices > 1) cycles += kClusterBarrierCycles + ctas_of_sm * kClusterExchangeCycles;
  cycles += DramCycles(traffic.tensors, gpu);
  return cycles / gpu.cycles_per_us() + gpu.launch_us + kClusterStartUs;
}

}  // namespace

double PredictMicroseconds(const Instance& instance, const ConvProblem& problem,
                           const Geometry& geometry, int64_t slices, int64_t partial_bytes,
                           bool dynamic, const Gpu& gpu) {
  const Traffic traffic(problem);
  const bool wgrad = problem.op == Op::kWgrad, tf32 = problem.lhs_dtype() == DType::kF32;
  const bool wgrad_filter_row = wgrad && instance.Is(kFilterRow);
  const double taps_per_load = geometry.taps_per_load, taps_per_stage = geometry.taps_per_stage;
  // 128-byte parts of a tile's reduction.
  const double taps = slices == 1 ? geometry.average_taps
                                  : static_cast<double>(CeilDiv(geometry.k_blocks, slices)) *
                                        taps_per_load * taps_per_stage;
  const int64_t all_tiles = geometry.tiles * slices;
  if (instance.Is(kCluster)) {
    return ClusterMicroseconds(instance, traffic, taps, static_cast<double>(all_tiles), slices,
                               gpu);
  }
  const Params& params = geometry.launch.kernel;
  const int64_t n_tiles = params.n_tiles.divisor;
  const bool stationary = instance.WeightStationary(), split = partial_bytes > 0;
  const double tile_m = static_cast<double>(instance.tile_m);
  const double columns =
      static_cast<double>(std::min(instance.tile_n, CeilDiv(params.gemm_n, 64) * 64));
  // A TF32 k-block holds half as many channels, at half the throughput, so the same formula serves.
  // wgmma computes all columns of the tile, those outside the output included. With a stationary
  // filter, only the first tap of a load waits.
  const int reduced = instance.Is(kC48) ? 48 : 64;
  const double tensor = static_cast<double>(instance.tile_m * instance.tile_n * reduced) /
                            (kWgmmaShare * gpu.wgmma_per_clock * instance.throughput) +
                        kKBlockCycles / ((stationary ? taps_per_load : 1) * taps_per_stage);
  const double rows_a = tile_m / (taps_per_load * (wgrad_filter_row ? kWgradRowTaps : 1));
  const double parts = SplitsFilter(instance, problem) ? 2 : 1;  // of the filter
  // With groups, the rows of a filter that is not transposed lie far apart, in fewer slices of L2.
  const bool apart_in_l2 = tf32 && problem.op == Op::kDgrad && problem.groups > 1;
  const double few = (traffic.filter > 0 ? 1 + kFewRows * 128 / traffic.filter : 1) *
                     (apart_in_l2 ? kGroupRowsExcess : 1);
  const double rows = rows_a * RowCycles(traffic.pitch_a) +
                      parts * (stationary ? 0 : columns) * few * SharedRowCycles(traffic.pitch_b);
  // Copies of a k-block beside the first box of activations: one box of B for every 64 columns, but
  // a single box of dy in TF32 wgrad (in filter-row one for every 32); wgrad also loads one box of x
  // for every channel block of the tile.
  double copies = stationary                 ? 0
                  : wgrad_filter_row && tf32 ? columns / 32
                  : wgrad && tf32            ? 1
                                             : parts * columns / 64;
  if (wgrad && (tf32 || !wgrad_filter_row)) {
    copies += rows_a / static_cast<double>(KBlockElements(problem.lhs_dtype())) - 1;
  }
  const double copy_cycles = !wgrad             ? kCopyCycles
                             : !tf32            ? kWgradCopyCycles
                             : params.rank == 0 ? kTf32WgradMatrixCopyCycles
                                                : kTf32WgradCopyCycles;
  const bool transposes = instance.Is(kTransposesDy);
  const double issue = (kLoadCycles / taps_per_load + copy_cycles * copies +
                        (taps_per_load > 1 && !stationary ? kLoadCycles / 2 : 0)) /
                       (taps_per_stage * (transposes ? kProducers : 1));
  const double exposed = !tf32        ? kRowsExposed
                         : transposes ? 0
                         : wgrad      ? kTf32WgradRowsExposed
                                      : kTf32RowsExposed;
  // If TMA takes longer than the tensor cores, it hides the exposed rows; not with groups, whose
  // tiles share no filter rows.
  const double seen = stationary ? 0 : exposed * rows;
  const double tap = problem.groups > 1 ? std::max({tensor, rows, issue}) + seen
                                        : std::max({tensor + seen, rows, issue});
  // With a stationary filter a CTA processes one range of columns.
  const int64_t ranges = stationary ? n_tiles : 1;
  const int64_t ctas = std::max<int64_t>(1, gpu.sm_count / ranges) * ranges;
  const double tiles = static_cast<double>(CeilDiv(all_tiles, ctas));
  const bool transposed = instance.Is(kSwapAb) && tensor >= std::max(rows, issue);
  const double out_bytes_per_cycle = transposed && tiles > 1 ? kSwapAbBesideBytesPerCycle
                                     : transposed            ? kSwapAbEpilogueBytesPerCycle
                                     : split && tf32         ? kTf32PartialBytesPerCycle
                                     : split                 ? kPartialBytesPerCycle
                                     : tf32                  ? kTf32EpilogueBytesPerCycle
                                     : wgrad_filter_row      ? kSectorBytesPerCycle
                                                             : kEpilogueBytesPerCycle;
  const double out_bytes = split ? 4 : static_cast<double>(ByteWidth(problem.output_dtype()));
  // A single column tile stores only the columns that exist.
  const double stored_columns = n_tiles == 1 ? static_cast<double>(params.gemm_n) : columns;
  const double epilogue = tile_m * stored_columns * out_bytes / out_bytes_per_cycle;
  const bool between = params.residue_classes > 1 && problem.taps() > 1 && !instance.Is(kPatches);
  const double tile_cycles = stationary && tf32                    ? kTf32StationaryTileCycles
                             : between                             ? kResidueTileCycles
                             : problem.taps() > 1 || tf32          ? kTileCycles
                             : stationary && !instance.Is(kSwapAb) ? kStationaryTileCycles
                                                                   : kPointwiseTileCycles;
  const double mainloop = taps * tap + tile_cycles;
  const double sm = instance.Is(kPingpong) ? tiles * std::max(mainloop, epilogue / 2) + epilogue
                                           : tiles * (mainloop + epilogue);
  // Pingpong tiles with TF32 operands store sector by sector.
  const double sector_bytes = tf32 && instance.Is(kPingpong)
                                  ? static_cast<double>(geometry.launch.output_elements) * out_bytes
                                  : 0;
  const bool straddles =
      params.residue_classes > 1 || (traffic.pitch_out > 128 && traffic.pitch_out % 128 != 0);
  const double shared_sectors =
      n_tiles > 1 && traffic.pitch_out % 32 != 0
          ? kSharedSectorExcess * 128 / (static_cast<double>(instance.tile_n) * out_bytes)
          : 0;
  // Not for wgrad, whose results are small, nor for TF32, whose sectors are counted above. The
  // pixels of a residue class lie apart, so swap-AB's one-pixel boxes also write parts of lines.
  const bool apart = instance.Is(kSwapAb) && params.residue_classes > 1;
  const bool shares_lines =
      !wgrad && !tf32 && traffic.pitch_out > 128 && (traffic.pitch_out % 128 != 0 || apart);
  const double shared_lines = !shares_lines                      ? 0
                              : instance.Is(kSwapAb)             ? kSharedLineExcessSwapAb
                              : !stationary                      ? kSharedLineExcessRing
                              : instance.stationary_k_blocks < 4 ? kSharedLineExcessC128
                                                                 : kSharedLineExcess;
  const double reread = stationary || wgrad || tf32 || problem.taps() > 1
                            ? 0
                            : static_cast<double>(n_tiles - 1) * traffic.activations;
  // A row shares one line with the next. If rows end in the middle of a line, every second row
  // begins with a line, unless the next row is a pixel of another residue class.
  const bool beside = !stationary && traffic.pitch_out % 64 == 0 &&
                      (params.residue_classes <= 1 || instance.Is(kPatches));
  const double line_excess = (beside ? 0.5 : 1) * 128 / static_cast<double>(traffic.pitch_out);
  const double idle = std::max(0.0, 1 - static_cast<double>(all_tiles) / gpu.sm_count);
  const double dram =
      DramCycles(
          traffic.tensors + kReread * reread +
              (kWrittenExcess + line_excess * shared_lines + shared_sectors) * traffic.written +
              (straddles ? kSectorExcess : kAlignedSectorExcess) * sector_bytes +
              static_cast<double>(partial_bytes),
          gpu) *
      (wgrad     ? kDramShare / kWgradDramShare * (1 + kIdleExcess * idle)
       : dynamic ? kDynamicShare
                 : 1);
  double cycles =
      std::max(sm, dram) + (wgrad ? kWgradDramExposed : kDramExposed) * std::min(sm, dram) +
      (problem.taps() > 1 || tf32 || wgrad ? kPrologueCycles : kPointwisePrologueCycles);
  double us = gpu.launch_us + kStartUs;
  if (split) {
    us += gpu.launch_us + (tf32 ? kFurtherStartUs : 0);
    cycles += static_cast<double>(partial_bytes) / (kReduceBytesPerCycle * gpu.sm_count);
  }
  if (TransposesFilter(problem) || parts > 1) {
    // The filter is read and written once more here, from DRAM; the kernel reads it from L2.
    us += gpu.launch_us + kFurtherStartUs;
    cycles += DramCycles(
        (1 + parts) * static_cast<double>(problem.w_elements() * ByteWidth(problem.w_dtype)), gpu);
  }
  return cycles / gpu.cycles_per_us() + us;
}

}  // namespace jaxconv::igemm_wgmma
