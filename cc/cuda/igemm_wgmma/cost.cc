#include "cuda/igemm_wgmma/cost.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/epilogue_params.h"
#include "cuda/common/rates.h"

namespace jaxconv::igemm_wgmma {
namespace {

// Cycles are those of an SM. Sources: docs/notes/igemm_wgmma.md, or the times of
// tests/cc/measured_times.tsv ("fitted").

// TMA, for a row of a box (128 bytes of shared memory) that is one line of global memory, and for
// one that lies in two lines. Measured. Rows that begin inside a sector of L2 take twice as long.
constexpr double kRowCycles = 2.2, kSplitRowCycles = 3.3;
// The same for rows that several CTAs read at about the same time: those of the filter, and those
// of activations that tiles of several columns share. Fitted.
constexpr double kSharedRowShare = 0.75;
// The same for filters of few rows, relative to those of many: all SMs queue for the same lines of
// L2. Rows of 128 bytes at which the cost doubles. Measured: 144 to 24 channels on 256 images of
// 56x56 take 208 us by tiles of 128 columns, whose rows and bytes alone would take 75.
constexpr double kFewRows = 215;
// The producer thread, for a copy beside the first of a k-block. Fitted; TF32 wgrad without taps
// never waits for it, as its rows take longer.
constexpr double kCopyCycles = 180;
// Between two tiles of a CTA: decoding the tile, filling the first registers. Fitted.
constexpr double kTileCycles = 300;
// Tensor-core time of tiles of 64 columns, which read a row of A for only 64 products. Fitted. By
// mma.sync their warps have 32x32 results and read twice as much for a product as warps of 64x64:
// under taps, and without any.
constexpr double kNarrowExcess = 1.2;
constexpr double kNarrowMmaSyncExcess = 2.2, kNarrowMatrixExcess = 1.4;
// DRAM time relative to static scheduling: with dynamic scheduling no SM waits for another.
// Measured.
constexpr double kDynamicShare = 0.94;

// Clusters, for each CTA on an SM: the store; the exchange of partial sums through distributed
// shared memory. Fitted to 270 times of ResNet-50 at batch 1 to 16.
constexpr double kClusterStoreCycles = 1070, kClusterExchangeCycles = 2360;
// The launch, beside the fixed time of the persistent forms: a part of it overlaps the kernel in
// front, and the cluster form sets up less.
constexpr double kClusterLaunchUs = -0.8;
// Clusters of more than two CTAs fit on about 112 of 132 SMs, as a cluster lies within one GPC.
constexpr double kClusterSmShare = 0.85;

double RowCycles(int64_t pitch) {
  if (pitch % kLineBytes == 0) return kRowCycles;
  return pitch % kSectorBytes == 0 ? kSplitRowCycles : 2 * kSplitRowCycles;
}

// Bytes of a problem, as the kernel moves them.
struct Traffic {
  double tensors = 0, written = 0;
  double filter = 0;  // where it is the operand that all SMs read
  // Bytes from one row of a box to the next in global memory, for both operands and the output.
  int64_t pitch_a = 0, pitch_b = 0, pitch_out = 0;

  explicit Traffic(const ConvProblem& problem) {
    // A stride wider than the filter skips pixels of x; dgrad writes them nevertheless.
    const double part = problem.op == Op::kDgrad ? 1 : problem.PartOfX();
    const double x = part * static_cast<double>(problem.x_elements() * ByteWidth(problem.x_dtype));
    const double w = static_cast<double>(problem.w_elements() * ByteWidth(problem.w_dtype));
    const double y = static_cast<double>(problem.y_elements() * ByteWidth(problem.y_dtype));
    tensors = x + w + y + static_cast<double>(EpilogueBytes(problem));
    filter = problem.op == Op::kWgrad ? 0 : w;
    written = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : w;
    const int64_t x_pitch = problem.c * ByteWidth(problem.x_dtype);
    const int64_t y_pitch = problem.k * ByteWidth(problem.y_dtype);
    pitch_a = problem.op == Op::kDgrad ? y_pitch : x_pitch;
    pitch_b = TransposesFilter(problem) ? x_pitch / problem.groups : y_pitch;
    pitch_out = problem.op == Op::kDgrad ? x_pitch : y_pitch;
  }
};

// 128-byte parts of the reduction of a tile or of its slice.
double Parts(const Geometry& geometry, int64_t slices) {
  if (slices == 1) return geometry.average_taps;
  return static_cast<double>(CeilDiv(geometry.k_blocks, slices)) * geometry.taps_per_load *
         geometry.taps_per_stage;
}

TimeTerms ClusterTerms(const Instance& instance, const Traffic& traffic, const Geometry& geometry,
                       const Work& work, const Gpu& gpu) {
  const int64_t slices = work.slices;
  const double sms = gpu.sm_count * (slices > 2 ? kClusterSmShare : 1);
  const auto ctas = static_cast<double>(geometry.tiles * slices);
  const double ctas_of_sm = std::ceil(ctas / sms);
  const double rows =
      static_cast<double>(instance.tile_m) * RowCycles(traffic.pitch_a) +
      static_cast<double>(instance.tile_n) * kSharedRowShare * RowCycles(traffic.pitch_b);
  const double exchange = slices > 1 ? kClusterExchangeCycles : 0;
  const double epilogue =
      static_cast<double>(instance.tile_m * instance.tile_n) * work.epilogue_cycles;
  TimeTerms terms;
  terms.loads = Parts(geometry, slices) * ctas_of_sm * rows / gpu.cycles_per_us();
  terms.launch = kClusterLaunchUs +
                 ctas_of_sm * (kClusterStoreCycles + exchange + epilogue) / gpu.cycles_per_us() +
                 traffic.tensors / gpu.dram_bytes_per_us;
  return terms;
}

}  // namespace

TimeTerms TermsOf(const Instance& instance, const ConvProblem& problem, const Geometry& geometry,
                  const Work& work, const Gpu& gpu) {
  const Traffic traffic(problem);
  const int64_t slices = work.slices, partial_bytes = work.partial_bytes;
  if (instance.Is(kCluster)) return ClusterTerms(instance, traffic, geometry, work, gpu);
  const bool wgrad = problem.op == Op::kWgrad, tf32 = problem.lhs_dtype() == DType::kF32;
  const bool wgrad_filter_row = wgrad && instance.Is(kFilterRow);
  const bool pingpong = instance.Is(kPingpong), stationary = instance.WeightStationary();
  const bool split = partial_bytes > 0;
  const double taps_per_load = geometry.taps_per_load;
  const Params& params = geometry.launch.kernel;
  const int64_t n_tiles = params.n_tiles.divisor;
  const auto tile_m = static_cast<double>(instance.tile_m);
  const auto tile_n = static_cast<double>(instance.tile_n);
  // Boxes have a wgmma block of 64 columns, as many as it has rows.
  const auto boxes = static_cast<double>(
      std::min(instance.tile_n / kWgmmaRows, CeilDiv(params.gemm_n, kWgmmaRows)));
  const auto columns = boxes * kWgmmaRows;
  // With a stationary filter a CTA processes one range of columns.
  const int64_t ranges = stationary ? n_tiles : 1;
  const int64_t ctas = std::max<int64_t>(1, gpu.sm_count / ranges) * ranges;
  const auto waves = static_cast<double>(CeilDiv(geometry.tiles * slices, ctas));
  const double parts = waves * Parts(geometry, slices);
  // That store a tile at a time: pingpong consumers do so in turns.
  const int64_t consumers = pingpong ? 1 : instance.tile_m == 3 * kWgmmaRows ? 3 : 2;
  const double filters = SplitsFilter(instance, problem) ? 2 : 1;

  // Of 128 bytes of the reduction. A TF32 part holds half as many channels, at half the throughput.
  // wgmma computes all columns of the tile, those outside the output included.
  const int64_t reduced = instance.Is(kC48) ? kC48Channels : KBlockElements(DType::kBF16);
  const double rate = instance.Is(kMmaSync) ? gpu.mma_sync_per_clock : gpu.wgmma_per_clock;
  const bool narrow = instance.tile_n == kWgmmaRows && !instance.Is(kSwapAb) && !wgrad_filter_row;
  const double products =
      tile_m * tile_n * static_cast<double>(reduced * ProductsOf(instance.Is(kThreeTf32))) / rate *
      (!narrow                 ? 1
       : instance.Is(kMmaSync) ? (params.rank == 0 ? kNarrowMatrixExcess : kNarrowMmaSyncExcess)
                               : kNarrowExcess);
  // The consumers transpose a block of dy in shared memory, and no product hides that.
  const double transposed =
      instance.Is(kTransposesDy) ? 2 * tile_n * kLineBytes / kSharedBytesPerCycle : 0;
  const double tensor = products + transposed;
  const double few = traffic.filter > 0 ? 1 + kFewRows * kLineBytes / traffic.filter : 1;
  const double rows_a = tile_m / (taps_per_load * (wgrad_filter_row ? kWgradRowTaps : 1));
  // wgrad's rows of x are channels, and boxes beyond those of a 1x1 layer load nothing. In TF32 one
  // box has all rows.
  const int64_t block = KBlockElements(problem.lhs_dtype());
  const auto channels = static_cast<double>(CeilDiv(params.row_channels, block) * block);
  const bool few_boxes = wgrad && !tf32 && params.rank == 0;
  const double loaded_a = few_boxes ? std::min(rows_a, channels) : rows_a;
  const double rows =
      loaded_a * RowCycles(traffic.pitch_a) * (n_tiles > 1 ? kSharedRowShare : 1) +
      (stationary ? 0 : filters * columns * few * kSharedRowShare * RowCycles(traffic.pitch_b));
  // One box of B for every 64 columns, but a single box of dy in TF32 wgrad (in filter-row one for
  // every 32); wgrad also loads one box of x for every channel block of the tile.
  double copies = stationary                 ? 0
                  : wgrad_filter_row && tf32 ? 2 * boxes
                  : wgrad && tf32            ? 1
                                             : filters * boxes;
  if (wgrad && (tf32 || !wgrad_filter_row)) {
    copies += rows_a / static_cast<double>(block) - 1;
  }
  const bool matrix = wgrad && tf32 && params.rank == 0;
  const double issue = matrix ? 0 : kCopyCycles * copies / geometry.taps_per_stage;
  const double finished =
      work.clamps ? tile_n : static_cast<double>(params.gemm_n) / static_cast<double>(n_tiles);
  // A single column tile stores only the columns that exist.
  const auto out_bytes =
      static_cast<double>(split ? kFloatBytes : ByteWidth(problem.output_dtype()));
  const double store =
      tile_m * (n_tiles == 1 ? static_cast<double>(params.gemm_n) : columns) * out_bytes /
          kStoreBytesPerCycle +
      (split ? 0 : tile_m * finished * work.epilogue_cycles / static_cast<double>(consumers));
  // Except in pingpong forms the tensor cores wait for the store of each tile.
  const double multiply = pingpong ? PingpongCycles(waves, parts / waves * tensor, store)
                                   : parts * tensor + (waves - 1) * store;

  // wgrad's results are few. Pingpong tiles with TF32 operands are stored sector by sector.
  const bool inside_lines = params.residue_classes > 1 ||
                            (traffic.pitch_out > kLineBytes && traffic.pitch_out % kLineBytes != 0);
  double written = WrittenExcess(traffic.written, gpu);
  // Lines that two rows of results share are written twice, and so are those written by sectors
  // where rows begin inside a line.
  if (inside_lines && !wgrad) {
    written += traffic.written * kLineBytes / static_cast<double>(traffic.pitch_out);
  }
  if (tf32 && pingpong) {
    written += static_cast<double>(geometry.launch.output_elements) * out_bytes *
               (inside_lines ? 1 : kWrittenExcess);
  }

  TimeTerms terms;
  terms.tensor_cores = (multiply + waves * kTileCycles) / gpu.cycles_per_us();
  terms.loads = parts * std::max(rows, issue) / gpu.cycles_per_us();
  terms.stores = pingpong ? waves * store / 2 / gpu.cycles_per_us() : 0;
  terms.dram = (traffic.tensors + written + static_cast<double>(partial_bytes)) /
               gpu.dram_bytes_per_us * (work.dynamic ? kDynamicShare : 1);
  terms.launch = gpu.launch_us + store / gpu.cycles_per_us();
  if (split) {
    terms.launch += gpu.launch_us + static_cast<double>(partial_bytes) / kPartialBytesPerCycle /
                                        gpu.sm_count / gpu.cycles_per_us();
  }
  if (TransposesFilter(problem) || filters > 1) {
    // The filter is read and written once more here, from DRAM; the kernel reads it from L2.
    const auto bytes = static_cast<double>(problem.w_elements() * ByteWidth(problem.w_dtype));
    terms.launch += gpu.launch_us + (1 + filters) * bytes / gpu.dram_bytes_per_us;
  }
  return terms;
}

}  // namespace jaxconv::igemm_wgmma
