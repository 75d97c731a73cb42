#include "cuda/igemm_wgmma/cost.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/epilogue_params.h"

namespace jaxconv::igemm_wgmma {
namespace {

// Fitted to 5500 times measured on an H200, so that the choices lose least against the best tile; 1x1
// filters, wgrad and TF32 to 640 times inside programs (docs/notes/igemm_wgmma.md). Terms stand in for
// each other; only their sum is to be believed.

// Share of the GPU's wgmma rate, and cycles that every k-block adds.
constexpr double kWgmmaShare = 1900.0 / 2048;
constexpr double kKBlockCycles = 2.79;
// Cycles of TMA for a row of a box (128 bytes of shared memory), by what the distance of rows in
// global memory is a multiple of: 128 bytes, a sector of 32, 16; and the share of them that does
// not hide behind the tensor cores, which is less of TF32's, twice as long there, but of its wgrad more.
constexpr double kRowCycles = 2.17;
constexpr double kSectorRowCycles = 3.19;
constexpr double kUnalignedRowCycles = 3.68;
constexpr double kRowsExposed = 0.159, kTf32RowsExposed = 0.12, kTf32WgradRowsExposed = 0.701;
// The same of the operand that all SMs read, and how many rows of it are so few that SMs queue.
constexpr double kSharedRowCycles = 1.62;
constexpr double kSharedSectorRowCycles = 2.67;
constexpr double kSharedUnalignedRowCycles = 3.77;
constexpr double kFewRows = 215;
constexpr double kGroupRowsExcess = 1.5;
// The producer: next tile; wait, announce, first copy; every further copy.
constexpr double kTileCycles = 222;
// Of dgrad whose filter is wider than a pixel, in residue classes of a stride: tiles of few taps, stored
// between the pixels of other classes.
constexpr double kResidueTileCycles = 1100;
// Of 16-bit 1x1 filters, whose tiles have few k-blocks; of the 64-pixel tiles of a filter that stays,
// with one to four; of TF32's filters that stay.
constexpr double kPointwiseTileCycles = 614;
constexpr double kStationaryTileCycles = 448, kTf32StationaryTileCycles = 1255;
constexpr double kLoadCycles = 100;
constexpr double kCopyCycles = 200;
// Of 16-bit wgrad, whose copies are boxes of both operands.
constexpr double kWgradCopyCycles = 166;
// The first fill of the ring, of 16-bit 1x1 filters out of DRAM, and the last tile's store.
constexpr double kPrologueCycles = 500, kPointwisePrologueCycles = 1950;
constexpr double kEpilogueBytesPerCycle = 32.9;
// Results of wgrad filter-row: scattered sectors of 32 bytes.
constexpr double kSectorBytesPerCycle = 3.3;
// Partial results of split-K: written by all SMs at once, read again by a kernel of its own.
constexpr double kPartialBytesPerCycle = 477, kTf32PartialBytesPerCycle = 20.1;
constexpr double kReduceBytesPerCycle = 8.85;
// Swap-AB, whose result is transposed in the epilogue: of a CTA's only tile, or beside busy tensor
// cores.
constexpr double kSwapAbEpilogueBytesPerCycle = 25;
constexpr double kSwapAbBesideBytesPerCycle = 23.8;
constexpr double kTf32EpilogueBytesPerCycle = 30.2;
// Sectors stored one by one take this much more of DRAM's time than whole cache lines, where rows of
// the output begin in the middle of a line, and where they begin with one or are shorter; rows of the
// output whose sectors CTAs share, 128 bytes each, this much.
constexpr double kSectorExcess = 0.863, kAlignedSectorExcess = 0.366;
constexpr double kSharedSectorExcess = 1.32;
// A line that rows of the output share, where they are longer than a line and no multiple of it: with a
// filter that stays, whose tiles are stored in whole rows; with tiles of several boxes of 64 columns;
// with swap-AB's of one.
constexpr double kSharedLineExcess = 0.39;
constexpr double kSharedLineExcessC128 = 1.13;
constexpr double kSharedLineExcessRing = 2, kSharedLineExcessSwapAb = 1.22;
// Of gpu.dram_bytes_per_us: the model counts every tensor once, and a part of them lies in L2.
constexpr double kDramShare = 1.1;
// Of wgrad, which stores little: its loads hide behind the tensor cores, or these behind the loads.
// Not fitted: SMs that have no tile load nothing, which takes so much more of DRAM's time.
constexpr double kWgradDramShare = 1.01, kWgradDramExposed = 0.0567, kIdleExcess = 0.163;
// Bytes that are written take this much longer than those that are read.
constexpr double kWrittenExcess = 0.212;
// Activations that the tiles of other columns read again, of 16-bit 1x1 filters: from L2, all but this share.
constexpr double kReread = 0.0087;
// Of DRAM's time, where tiles are scheduled dynamically and no SM is waited for.
constexpr double kDynamicShare = 0.938;
// Of the shorter of SM and DRAM time.
constexpr double kDramExposed = 0.236;
// Beyond gpu.launch_us: of a persistent kernel, which sets up barriers and tensor maps. The split-K
// reduction needs neither, but with TF32 operands takes as long.
constexpr double kStartUs = 0.52, kFurtherStartUs = 4000.0 / 1970 - 1.7;

// The cluster form, fitted to 270 times (ResNet-50 at batch 1 to 16, one to eight CTAs). Its
// kernels are so short that nothing hides anything: the terms are added. A k-block of a lone CTA,
// which is the latency of a load over the stages of the ring (292 fits best; 320 leaves 7x7 maps of
// 16 images to the persistent tiles, which are faster there); two CTAs share an SM and its loads.
constexpr double kClusterKBlockCycles = 281;
constexpr double kClusterCtasPerSm = 2;
// SMs come in groups of 14 to 18, and a cluster lies in one group: of 132, larger clusters find
// room on about 112.
constexpr double kClusterSmShare = 0.85;
// Beyond gpu.launch_us: negative, because a part of the launch overlaps the kernel in front.
constexpr double kClusterStartUs = 2170.0 / 1970 - 1.7;
constexpr double kClusterEpilogueCycles = 1070;  // of every CTA of an SM
constexpr double kClusterBarrierCycles = 159;
// Of every CTA of an SM, through distributed shared memory.
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
         activations = 0;  // filter: of a group, where B is the filter
  // From one row of a box to the next in global memory, of both operands, and of the output.
  int64_t pitch_a = 128, pitch_b = 128, pitch_out = 128;

  explicit Traffic(const ConvProblem& problem) {
    // Strides wider than the filter skip pixels of x, which dgrad writes all the same.
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

// `k_blocks`: of one CTA; `ctas`: of all clusters.
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
  // Of a tile: 128-byte parts of the reduction.
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
  // One tap is half as long in TF32, at half the rate; wgmma runs over all columns of the tile,
  // inside the output or not. With a stationary filter, only the first tap of a load waits.
  const int reduced = instance.Is(kC48) ? 48 : 64;
  const double tensor = static_cast<double>(instance.tile_m * instance.tile_n * reduced) /
                            (kWgmmaShare * gpu.wgmma_per_clock * instance.throughput) +
                        kKBlockCycles / ((stationary ? taps_per_load : 1) * taps_per_stage);
  const double rows_a = tile_m / (taps_per_load * (wgrad_filter_row ? kWgradRowTaps : 1));
  const double parts = SplitsFilter(instance, problem) ? 2 : 1;  // of the filter
  // In groups, rows of a filter that is not transposed lie far apart: fewer parts of L2 hold them.
  const bool apart_in_l2 = tf32 && problem.op == Op::kDgrad && problem.groups > 1;
  const double few = (traffic.filter > 0 ? 1 + kFewRows * 128 / traffic.filter : 1) *
                     (apart_in_l2 ? kGroupRowsExcess : 1);
  const double rows = rows_a * RowCycles(traffic.pitch_a) +
                      parts * (stationary ? 0 : columns) * few * SharedRowCycles(traffic.pitch_b);
  // Beside one of activations: of the other operand one for 64 columns, of dy in TF32 one in all;
  // wgrad loads a box for every channel block of the tile.
  double copies = stationary ? 0 : wgrad && tf32 ? 1 : parts * columns / 64;
  if (wgrad && !wgrad_filter_row) {
    copies += static_cast<double>(instance.tile_m / KBlockElements(problem.lhs_dtype()) - 1);
  }
  const double copy_cycles = wgrad && !tf32 ? kWgradCopyCycles : kCopyCycles;
  const double issue = (kLoadCycles / taps_per_load + copy_cycles * copies +
                        (taps_per_load > 1 && !stationary ? kLoadCycles / 2 : 0)) /
                       taps_per_stage;
  const double exposed = !tf32 ? kRowsExposed : wgrad ? kTf32WgradRowsExposed : kTf32RowsExposed;
  // Rows that outlast the tensor cores hide those, but in groups, whose tiles share no rows of a filter.
  const double seen = stationary ? 0 : exposed * rows;
  const double tap = problem.groups > 1 ? std::max({tensor, rows, issue}) + seen
                                        : std::max({tensor + seen, rows, issue});
  // With a stationary filter a CTA keeps its columns.
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
  // A lone tile stores the columns that there are.
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
  // Pingpong tiles of TF32 operands store sector by sector.
  const double sector_bytes = tf32 && instance.Is(kPingpong)
                                  ? static_cast<double>(geometry.launch.output_elements) * out_bytes
                                  : 0;
  const bool straddles =
      params.residue_classes > 1 || (traffic.pitch_out > 128 && traffic.pitch_out % 128 != 0);
  const double shared_sectors =
      n_tiles > 1 && traffic.pitch_out % 32 != 0
          ? kSharedSectorExcess * 128 / (static_cast<double>(instance.tile_n) * out_bytes)
          : 0;
  // wgrad's results are small, and TF32's are counted by sectors. The pixels of a residue class lie
  // apart, so swap-AB's boxes of a pixel are pieces of lines there too.
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
  // A row shares one line with the next. Of rows that end in the middle of a line every other one begins
  // with a line, unless the next row is a pixel of another residue class.
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
    // Read and written; the filter comes out of DRAM then, and out of L2 later.
    us += gpu.launch_us + kFurtherStartUs;
    cycles += DramCycles(
        (1 + parts) * static_cast<double>(problem.w_elements() * ByteWidth(problem.w_dtype)), gpu);
  }
  return cycles / gpu.cycles_per_us() + us;
}

}  // namespace jaxconv::igemm_wgmma
