#include "cuda/imma_wgmma/plan.h"

#include <algorithm>
#include <memory>
#include <string>

#include "cuda/common/im2col_box.h"
#include "cuda/common/instances.h"
#include "cuda/common/rates.h"
#include "cuda/imma_wgmma/params.h"

namespace jaxconv::imma_wgmma {
namespace {

constexpr int64_t kBlockRows = 64;  // of one wgmma
constexpr int64_t kConsumers = 2, kConsumerThreads = 128;

// What the plan knows of a line of kernels.def.
struct Instance {
  int64_t tile_m, tile_n;
  bool pingpong = false;
  bool filter_row = false;
  bool swap_ab = false;             // output channels are the instructions' rows
  int64_t stationary_k_blocks = 0;  // of the filter, in shared memory, loaded once by each CTA
};

Status CheckProblem(const KernelDesc& kernel, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckInt8Types(kernel, problem));
  if (problem.batch > 1) return Status::Unimplemented("batched filters");
  if (problem.c_per_group() % 32 != 0 || problem.k_per_group() % 32 != 0) {
    return Status::Unimplemented("expected channels of a group in multiples of 32, got " +
                                 std::to_string(problem.c_per_group()) + " and " +
                                 std::to_string(problem.k_per_group()));
  }
  for (int64_t dilation : problem.lhs_dilation) {
    if (dilation > 1) return Status::Unimplemented("lhs_dilation");
  }
  return problem.RequireInt32();
}

// swap_ab_sm90.cuh has no code for other results, and counts outputs in units of 32.
Status CheckSwapAb(const ConvProblem& problem, const RequantizeParams& requantize) {
  if (requantize.path != RequantizePath::kS8 && requantize.path != RequantizePath::kU8) {
    return Status::Unimplemented(
        "swapped operands give 8-bit results of one scale a channel, without a residual");
  }
  if (problem.y_elements() >= int64_t{1} << 36) {
    return Status::Unimplemented("swapped operands give less than 2^36 outputs");
  }
  return {};
}

// Sets the order in which TMA loads pixels and taps.
Status MakeWalk(const Instance& instance, const ConvProblem& problem, LaunchParams* launch) {
  Params& params = launch->kernel;
  const Im2colLimits& limits = kIm2colLimits[problem.rank];
  bool matrix = problem.taps() == 1 && !params.nchw32;
  for (int i = 0; i < 3; ++i) {
    const int axis = 2 - i;
    const int64_t extent = problem.in[axis], outputs = problem.out[axis];
    const int64_t stride = problem.stride[axis], pad = problem.pad_lo[axis];
    // The box of base pixels begins in the padding or at the first pixel, never inside the tensor;
    // the taps' offsets carry the difference.
    const int64_t lower = std::min<int64_t>(0, -pad);
    const int64_t offset0 = -pad - lower;
    const int64_t offset = offset0 + (problem.filter[axis] - 1) * problem.dilation[axis];
    int64_t walked = outputs;
    if (i == 0 && instance.filter_row) {
      if (stride != 1 || problem.filter[axis] == 1 || offset > kMaxSpan) {
        return Status::Unimplemented(
            "filter-row reuse needs a filter of several taps along the last axis, of stride 1, "
            "that reach over at most " +
            std::to_string(kMaxSpan) + " pixels");
      }
      walked = WalkedPixels(outputs, offset, extent, lower);
    }
    const int64_t upper = lower + (walked - 1) * stride + 1 - extent;
    launch->extent[i] = extent;
    launch->upper[i] = static_cast<int32_t>(upper);
    params.count[i] = FastDivmod(walked);
    params.taps[i] = static_cast<int32_t>(problem.filter[axis]);
    params.step[i] = static_cast<int32_t>(stride);
    params.offset_step[i] = static_cast<int32_t>(problem.dilation[axis]);
    params.lower[i] = static_cast<int32_t>(lower);
    params.offset0[i] = static_cast<int32_t>(offset0);
    matrix = matrix && stride == 1 && outputs == extent && pad == 0;
    if (i < problem.rank && (lower < limits.lower || upper < limits.lower || upper > limits.upper ||
                             offset > limits.offset || stride > kMaxElementStride)) {
      return Status::Unimplemented("a window of " + std::to_string(problem.filter[axis]) +
                                   " taps, padding " + std::to_string(pad) + ", stride " +
                                   std::to_string(stride) + ", wider than TMA's fields");
    }
  }
  params.width = static_cast<int32_t>(problem.out[2]);
  if (instance.filter_row) {
    params.row_taps = params.taps[0];
    params.taps[0] = 1;
  }
  params.rank = matrix ? 0 : problem.rank;
  return {};
}

// The digits of a number of units, in the order of the units.
UnitDigits DigitsOf(const Params& params, int64_t units) {
  UnitDigits digits;
  auto take = [&units](int64_t radix) {
    const auto digit = static_cast<int32_t>(units % radix);
    units /= radix;
    return digit;
  };
  if (!params.taps_first) digits.channels = take(params.channel_units);
  for (int i = 0; i < 3; ++i) digits.tap[i] = take(params.taps[i]);
  if (params.taps_first) digits.channels = static_cast<int32_t>(units);
  return digits;
}

// Divides the reduction into units and stages.
Status MakeUnits(const Instance& instance, const ConvProblem& problem, Params* params) {
  const int64_t channels = problem.c_per_group();
  // Partial units of 128 channels only if one copy serves a filter row; if every tap has its own
  // copy, they cost more than narrower units.
  const bool partial = instance.filter_row && channels > 64;
  const int64_t unit = params->nchw32                   ? 32
                       : channels % 128 == 0 || partial ? 128
                       : channels % 64 == 0             ? 64
                                                        : 32;
  const int64_t row_taps = params->row_taps;
  params->unit_bytes = static_cast<int32_t>(unit);
  params->units_of_k_block = static_cast<int32_t>(kKBlockBytes / unit);
  params->channel_units = static_cast<int32_t>(CeilDiv(channels, unit));
  params->unit_channels = static_cast<int32_t>(params->nchw32 ? 1 : unit);
  params->group_channels = static_cast<int32_t>(params->nchw32 ? channels / 32 : channels);
  // Units of 128 bytes are k-blocks and may have any order. With taps fastest, the first reads of x
  // are spread over the reduction, and units that a tap's channels do not fill come last. Other
  // units follow the packed rows.
  params->taps_first = params->nchw32 || unit == kKBlockBytes;
  params->tap_bytes = !params->nchw32 && unit == kKBlockBytes ? static_cast<int32_t>(channels) : 0;
  const int64_t taps = problem.taps() / row_taps;
  params->units = static_cast<int32_t>(taps * params->channel_units);
  const int64_t bytes = params->units * row_taps * unit, stage = row_taps * kKBlockBytes;
  params->k_blocks = static_cast<int32_t>(CeilDiv(bytes, stage));
  params->one_unit = DigitsOf(*params, 1);
  params->stage_units = DigitsOf(*params, params->units_of_k_block);
  for (int i = 0; i < params->units_of_k_block; ++i) params->first[i] = DigitsOf(*params, i);
  params->last_steps = static_cast<int32_t>((bytes - 1) % stage / kStepBytes + 1);
  params->full_k_blocks = params->k_blocks - 1;
  if (channels % unit != 0) {
    params->full_k_blocks = static_cast<int32_t>(params->k_blocks - taps);
    params->tail_steps = static_cast<int32_t>(channels % unit / kStepBytes);
  }
  if (instance.stationary_k_blocks > 0 &&
      (CeilDiv(bytes, kKBlockBytes) > instance.stationary_k_blocks || problem.groups > 1 ||
       problem.k > instance.tile_n)) {
    return Status::Unimplemented("the filter does not fit in shared memory: expected at most " +
                                 std::to_string(instance.tile_n) + " rows of " +
                                 std::to_string(instance.stationary_k_blocks * kKBlockBytes) +
                                 " bytes, got " + std::to_string(problem.k) + " of " +
                                 std::to_string(bytes));
  }
  // cuda/ptx/wgmma_sm90.cuh has the descriptor.
  const uint32_t layout = unit == 128 ? 1 : unit == 64 ? 2 : 3;
  params->descriptor = static_cast<uint32_t>(8 * unit >> 4) | layout << 30;
  const int64_t pixels = instance.tile_m + (instance.filter_row ? kMaxSpan : 0);
  for (int64_t step = 0; step < row_taps * kSteps; ++step) {
    // The packed rows run over a unit's channels, then over its taps, then over units; where units
    // are k-blocks this is the order of a stage too.
    const int64_t at = step * kStepBytes;
    const int64_t channel = at % unit, tap = at / unit % row_taps, index = at / unit / row_taps;
    params->step_offset[step] = static_cast<uint32_t>(
        (index * pixels * unit + tap * problem.dilation[2] * unit + channel) >> 4);
  }
  params->block_offset = static_cast<uint32_t>(64 * unit >> 4);
  return {};
}

// The predicted time on the GPU's model. A k-block passes through the tensor cores, through shared
// memory and, row by row of its boxes, through TMA; the slowest of the three limits the throughput.
// The epilogue adds to it, but in pingpong one consumer stores while the other multiplies. Fitted
// to the times of tests/cc/measured_candidates.tsv (docs/notes/imma_wgmma.md).
constexpr double kInt8Rate = 2;      // multiply-adds for one of 16-bit operands
constexpr double kWgmmaShare = 0.8;  // of the rate
// TMA cycles for a row of a box of activations: of 64 or 128 bytes, which one L2 line holds, of 32
// bytes in interleaved boxes, and of these where pixels lie apart.
constexpr double kRowCycles = 2.82, kRow32Cycles = 1, kStridedRow32Cycles = 2;
// For each run of neighbouring pixels in a box of 32-byte rows.
constexpr double kRun32Cycles = 1;
constexpr double kFilterRowCycles = 2;  // for a row of the filter
// A k-block of filter-row reuse, unless the filter is stationary.
constexpr double kReuseCycles = 13;
// Between two tiles; in cooperative forms with pixels as rows the outputs hide it.
constexpr double kTileCycles = 355;
// A thread's cycles for an output; what it takes longer in nhwc, whose stores have the channels of
// a tile instead of whole blocks; the cycles for the scales and biases of 32 channels.
constexpr double kOutputCycles = 14.4, kNhwcExcess = 1, kTermsCycles = 148;

// TMA cycles for a row of 32 bytes. A run ends with a row of the output, except in pointwise
// layers.
double Row32Cycles(const ConvProblem& problem) {
  if (problem.stride[2] > 1) return kStridedRow32Cycles;
  return kRow32Cycles +
         (problem.taps() == 1 ? 0 : kRun32Cycles / static_cast<double>(problem.out[2]));
}

// Cycles of a k-block in the mainloop.
double KBlockCycles(const Instance& instance, const ConvProblem& problem, const Params& params,
                    const Gpu& gpu) {
  const double m = static_cast<double>(instance.tile_m), n = static_cast<double>(instance.tile_n);
  const bool stationary = instance.stationary_k_blocks > 0;
  // The copies of a tap's partial last unit are whole.
  const double whole = params.unit_bytes == kKBlockBytes
                           ? static_cast<double>(params.channel_units * kKBlockBytes) /
                                 static_cast<double>(problem.c_per_group())
                           : 1;
  const double pixels = whole * (m + (instance.filter_row ? kMaxSpan : 0)) / params.row_taps;
  const double filter_rows = stationary ? 0 : whole * n;
  const double tensor = m * n * kKBlockBytes / (kWgmmaShare * kInt8Rate * gpu.wgmma_per_clock);
  // For each block of rows (pixels; swapped: channels), the rows and all columns are read.
  const double reads =
      (instance.swap_ab ? n * (kBlockRows + m) : m * (kBlockRows + n)) / kBlockRows;
  const double shared =
      (reads * kSteps * kStepBytes + (pixels + filter_rows) * kKBlockBytes) / kSharedBytesPerCycle;
  const double row_cycles = params.unit_bytes == kStepBytes ? Row32Cycles(problem) : kRowCycles;
  const double tma =
      pixels * (kKBlockBytes / params.unit_bytes) * row_cycles + filter_rows * kFilterRowCycles;
  return std::max({tensor, shared, tma}) + (instance.filter_row && !stationary ? kReuseCycles : 0);
}

// Cycles of a tile's outputs.
double EpilogueCycles(const Instance& instance, const ConvProblem& problem, const Params& params) {
  const double n = static_cast<double>(instance.tile_n);
  const double outputs =  // outputs of a thread
      static_cast<double>(instance.tile_m) * n /
      static_cast<double>((instance.pingpong ? 1 : kConsumers) * kConsumerThreads);
  const double stored = outputs * (1 + (params.nchw32 ? 0 : kNhwcExcess));
  if (instance.swap_ab) return stored * kOutputCycles;
  // A residual takes as long as the output, and bytes of a wider result as a part of the sum's
  // four.
  const double more = (problem.epilogue.residual ? 1 : 0) +
                      static_cast<double>(ByteWidth(problem.y_dtype) - 1) / kFloatBytes;
  return (stored + more * outputs) * kOutputCycles + n / kStepBytes * kTermsCycles;
}

TimeTerms TermsOf(const Instance& instance, const ConvProblem& problem, const Params& params,
                  int64_t tiles, int64_t ctas, const Gpu& gpu) {
  const double k_blocks =
      static_cast<double>(problem.taps() * problem.c_per_group()) / kKBlockBytes;
  const double between = instance.pingpong || instance.swap_ab ? kTileCycles : 0;
  const double mainloop = k_blocks * KBlockCycles(instance, problem, params, gpu) + between;
  const double epilogue = EpilogueCycles(instance, problem, params);
  const double waves = static_cast<double>(CeilDiv(tiles, ctas));
  const double sm = instance.pingpong
                        ? waves * std::max(mainloop, (mainloop + epilogue) / 2) + epilogue
                        : waves * (mainloop + epilogue);
  TimeTerms terms;
  terms.tensor_cores = sm / gpu.cycles_per_us();
  terms.dram = Int8Bytes(problem) / gpu.dram_bytes_per_us;
  terms.launch = gpu.launch_us;
  return terms;
}

Status PlanImmaWgmma(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                     int64_t slices, Plan* plan) {
  const Instance& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(CheckProblem(kernel, problem));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  params.requantize = MakeRequantizeParams(problem);
  launch->swap_ab = instance.swap_ab;
  if (instance.swap_ab) JAXCONV_RETURN_IF_ERROR(CheckSwapAb(problem, params.requantize));
  params.nchw32 = problem.activation_layout == ActivationLayout::kNchw32;
  JAXCONV_RETURN_IF_ERROR(MakeWalk(instance, problem, launch.get()));
  JAXCONV_RETURN_IF_ERROR(MakeUnits(instance, problem, &params));
  const int64_t rows = problem.n * params.count[0].divisor * problem.out[1] * problem.out[0];
  const int64_t n_tiles = CeilDiv(problem.k_per_group(), instance.tile_n);
  const int64_t m_tiles = CeilDiv(rows, instance.tile_m);
  const int64_t tiles = n_tiles * m_tiles * problem.groups;
  if (std::max(rows, problem.n * problem.in_pixels()) > kMaxIm2colRows) {
    return Status::Unimplemented("more than 2^31 - 2^12 pixels");
  }
  if (tiles >= int64_t{1} << 30) {
    return Status::Unimplemented("the grid has " + std::to_string(tiles) +
                                 " tiles, expected less than 2^30");
  }
  params.rows = static_cast<int32_t>(rows);
  params.columns = static_cast<int32_t>(problem.k_per_group());
  params.tiles = static_cast<int32_t>(tiles);
  params.n_tiles = FastDivmod(n_tiles);
  params.m_tiles = FastDivmod(m_tiles);
  launch->images = problem.n;
  launch->channels = problem.c;
  launch->filters = problem.k;
  launch->filter_row = problem.packed_row();
  launch->ctas = static_cast<int32_t>(std::min<int64_t>(tiles, gpu.sm_count));
  plan->kernel = &kernel;
  plan->slices = 1;
  plan->workspace_bytes = 0;
  plan->terms = TermsOf(instance, problem, params, tiles, launch->ctas, gpu);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->params = std::move(launch);
  return {};
}

// The line of each form of kernels.def, from its arguments. Stages and filter slots matter to the
// device kernel alone.
constexpr Instance CooperativeLine(int64_t blocks, int64_t columns, int64_t /*stages*/) {
  return {2 * blocks * kBlockRows, columns};
}
constexpr Instance PingpongLine(int64_t blocks, int64_t columns, int64_t /*stages*/) {
  return {blocks * kBlockRows, columns, /*pingpong=*/true};
}
constexpr Instance FilterRowLine(int64_t blocks, int64_t columns, int64_t stages,
                                 int64_t /*slots*/) {
  Instance line = PingpongLine(blocks, columns, stages);
  line.filter_row = true;
  return line;
}
constexpr Instance SwapAbLine(bool pingpong, int64_t pixels, int64_t /*stages*/) {
  Instance line{pixels, (pingpong ? 1 : 2) * kBlockRows, pingpong};
  line.swap_ab = true;
  return line;
}
constexpr Instance SwapAbFilterRowLine(bool pingpong, int64_t pixels, int64_t stages,
                                       int64_t /*slots*/) {
  Instance line = SwapAbLine(pingpong, pixels, stages);
  line.filter_row = true;
  return line;
}
constexpr Instance SwapAbWeightStationaryLine(int64_t pixels, int64_t stages, int64_t kept) {
  Instance line = SwapAbFilterRowLine(/*pingpong=*/true, pixels, stages, /*slots=*/0);
  line.stationary_k_blocks = kept;
  return line;
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments)                                 \
  JAXCONV_ADD_KERNELS(all, ops, types, imma_wgmma, variant, 90, 90, PlanImmaWgmma, Instance, \
                      form##Line arguments)
#define PADDED(...)
#include "cuda/imma_wgmma/kernels.def"
  return all;
}

}  // namespace jaxconv::imma_wgmma
