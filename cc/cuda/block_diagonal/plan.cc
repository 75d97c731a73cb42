#include "cuda/block_diagonal/plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/block_diagonal/params.h"
#include "cuda/common/instances.h"

namespace jaxconv::block_diagonal {
namespace {

// A line of kernels.def.
struct Instance {
  int64_t block, blocks_m;  // blocks_m: of gather.cuh
  int64_t rows, columns;    // taps of a CTA of wgrad.cuh
  int64_t ctas_per_sm;
  bool wgrad() const { return rows > 0; }
  // Taps of wgrad in parts: of one row.
  bool parts() const { return rows == 1; }
  int64_t strips() const { return wgrad() ? 2 : kWarps / (kChannels / block); }
};

constexpr int64_t kWidth = 2, kPixelBytes = kChannels * kWidth;
// Positions of a tile of wgrad: dy lies beside the box.
constexpr int64_t kWgradPositions = 256;

// Shares of the DRAM's, the issue slots' and the tensor cores' rates. Assumptions: no GPU has run these
// kernels yet, which are therefore chosen on request only.
constexpr double kDramShare = 0.75, kIssueShare = 0.7, kMmaShare = 0.6;
// Bytes that L2 serves in the time of a byte of DRAM: 5.5 and 4.3 TB/s on an H200.
constexpr double kL2Rate = 1.28;
constexpr double kCopyInstructions = 14;  // of 16 bytes of a box, for each thread

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

Status Check(const KernelDesc& kernel, const Instance& instance, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, problem, /*tf32=*/false));
  if (problem.op == Op::kWgrad && problem.filter_layout != FilterLayout::kRsck) {
    return Status::Unimplemented(std::string("stores filter gradients as rsck, got ") +
                                 Name(problem.filter_layout));
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireInt32());
  const int64_t group = problem.c_per_group();
  if (problem.k_per_group() != group) {
    return Status::Unimplemented("expected as many output as input channels in a group, got " +
                                 std::to_string(problem.k_per_group()) + " and " +
                                 std::to_string(group));
  }
  if (group < 2 || instance.block % group != 0) {
    return Status::Unimplemented("expected groups of 2 or more channels that divide " +
                                 std::to_string(instance.block) + ", got " + std::to_string(group));
  }
  if (problem.c % 8 != 0) {
    return Status::Unimplemented("expected channels in multiples of 8, got " +
                                 std::to_string(problem.c));
  }
  if (instance.wgrad() && !instance.parts() &&
      (problem.filter[1] != instance.rows || problem.filter[2] != instance.columns)) {
    return Status::Unimplemented("expected a filter of " + std::to_string(instance.rows) + "x" +
                                 std::to_string(instance.columns) + ", got " +
                                 std::to_string(problem.filter[1]) + "x" +
                                 std::to_string(problem.filter[2]));
  }
  return {};
}

void DescribeOperands(const ConvProblem& problem, Params* params) {
  DescribeAxes(problem, params);
  params->channels = static_cast<int32_t>(problem.c);
  params->gathered_channels = static_cast<int32_t>(problem.c);
  params->repeat = FastDivmod(1);
  params->vector = 1;
  const int64_t group = problem.c_per_group(), taps = problem.taps();
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  const bool dgrad = problem.op == Op::kDgrad;
  const int64_t c_stride = krsc ? 1 : problem.k, k_stride = krsc ? taps * group : 1;
  params->group = static_cast<int32_t>(group);
  params->tap_stride = krsc ? group : group * problem.k;
  params->reduction_stride = dgrad ? k_stride : c_stride;
  params->channel_stride = dgrad ? c_stride : k_stride;
  params->group_stride = group * k_stride;
}

int64_t Taps(const Params& params) {
  return int64_t{params.axis[0].taps} * params.axis[1].taps * params.axis[2].taps;
}

int64_t StagePixels(const Instance& instance, const Params& params) {
  const int64_t box = int64_t{params.axis[1].box} * params.axis[2].box;
  // wgrad reads dy by 16 positions.
  return box + (instance.wgrad() ? CeilDiv(params.tile_pixels, 16) * 16 : 0);
}

int64_t SharedBytes(const Instance& instance, const Params& params) {
  const int64_t stages = 2 * StagePixels(instance, params) * kPixelBytes;
  if (!instance.wgrad()) return stages + Taps(params) * kChannels * instance.block * kWidth;
  const int64_t sums = instance.rows * instance.columns * kChannels * instance.block;
  return std::max(stages + kPixelBytes, sums * int64_t{sizeof(float)});
}

// Instructions of a warp for a tile, of one depth tap (wgrad: of a part).
double Instructions(const Instance& instance, const Params& params) {
  const double copies = static_cast<double>(StagePixels(instance, params) * kPixelBytes) /
                        (16 * kThreads) * kCopyInstructions;
  const auto blocks =
      static_cast<double>(CeilDiv(CeilDiv(params.tile_pixels, 16), instance.strips()));
  const auto products = static_cast<double>(instance.block / 8);
  if (instance.wgrad()) {
    const auto taps = static_cast<double>(instance.rows * instance.columns);
    return copies + blocks * (30 + taps * (5 + products));
  }
  const double taps = static_cast<double>(params.axis[1].taps) * params.axis[2].taps;
  const double steps = static_cast<double>(instance.block) / 16;
  return copies + taps * (6 + blocks * steps * (5 + products)) + blocks * 40;
}

// Products of m16n8k16 of a warp, likewise.
double Products(const Instance& instance, const Params& params) {
  const auto blocks =
      static_cast<double>(CeilDiv(CeilDiv(params.tile_pixels, 16), instance.strips()));
  const auto products = static_cast<double>(instance.block / 8);
  if (instance.wgrad()) {
    return blocks * static_cast<double>(instance.rows * instance.columns) * products;
  }
  const double taps = static_cast<double>(params.axis[1].taps) * params.axis[2].taps;
  return blocks * taps * products * (static_cast<double>(instance.block) / 16);
}

// Microseconds in which the SMs compute one tile, of one depth tap.
double MicrosecondsOfTile(const Instance& instance, const Params& params, const Gpu& gpu) {
  const double issue = Instructions(instance, params) * kWarps / 4 / kIssueShare;
  const double multiply =
      Products(instance, params) * kWarps * (16 * 8 * 16) / gpu.mma_sync_per_clock / kMmaShare;
  // The boxes of neighbouring tiles overlap in L2.
  const double load = static_cast<double>(StagePixels(instance, params) * kPixelBytes) /
                      (gpu.dram_bytes_per_us * kL2Rate);
  return std::max(load, std::max(issue, multiply) / (gpu.sm_count * gpu.cycles_per_us()));
}

// The tile of the least time, an SM with a single CTA counted as half as fast again.
Status ShapeTile(const Instance& instance, const Gpu& gpu, Params* params) {
  const int64_t most =
      instance.wgrad() ? kWgradPositions : instance.strips() * instance.blocks_m * 16;
  double least = HUGE_VAL;
  int64_t fewest_bytes = INT64_MAX;
  Params best;
  const int64_t rows = params->axis[1].out, columns = params->axis[2].out;
  for (int64_t tile_columns = 1; tile_columns <= std::min(most, columns); ++tile_columns) {
    for (int64_t tile_rows = std::min(most / tile_columns, rows); tile_rows > 0; tile_rows /= 2) {
      Params shape = *params;
      if (!ShapeBox(tile_rows, tile_columns, instance.parts() ? 1 : params->axis[1].taps, &shape)) {
        continue;
      }
      shape.tile_columns = FastDivmod(tile_columns);
      shape.tile_pixels = static_cast<int32_t>(tile_rows * tile_columns);
      const int64_t bytes = SharedBytes(instance, shape);
      fewest_bytes = std::min(fewest_bytes, bytes);
      const int64_t ctas = CtasOfSm(instance.ctas_per_sm, bytes, gpu);
      if (ctas == 0) continue;
      const double work = (ctas == 1 ? 1.5 : 1) * MicrosecondsOfTile(instance, shape, gpu) *
                          static_cast<double>(shape.axis[1].tiles.divisor) *
                          shape.axis[2].tiles.divisor;
      if (work >= least) continue;
      least = work;
      best = shape;
    }
  }
  if (least == HUGE_VAL) {
    return Status::Unimplemented(fewest_bytes == INT64_MAX
                                     ? "the window is wider than 32,767 pixels"
                                     : "two boxes and the filter need " +
                                           std::to_string(fewest_bytes) +
                                           " bytes of shared memory, the GPU has " +
                                           std::to_string(gpu.smem_per_block_optin));
  }
  *params = best;
  return {};
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem));
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  DescribeOperands(problem, &params);
  JAXCONV_RETURN_IF_ERROR(ShapeTile(instance, gpu, &params));
  params.stage_bytes = static_cast<int32_t>(StagePixels(instance, params) * kPixelBytes);
  launch->shared_bytes = SharedBytes(instance, params);
  JAXCONV_RETURN_IF_ERROR(CountItems(problem, kChannels, &params));
  const int64_t resident = gpu.sm_count * CtasOfSm(instance.ctas_per_sm, launch->shared_bytes, gpu);
  double tiles = static_cast<double>(params.items);
  if (instance.wgrad()) {
    const int64_t row_parts =
        instance.parts() ? params.axis[1].taps * CeilDiv(params.axis[2].taps, instance.columns) : 1;
    const int64_t ctas =
        params.channel_tiles.divisor * params.axis[0].taps * row_parts * problem.batch;
    JAXCONV_RETURN_IF_ERROR(
        CutIntoSlices(problem, ctas, resident, slices, &params, &launch->ctas, plan));
    launch->out_elements = problem.w_elements();
    tiles *= static_cast<double>(ctas);
  } else {
    JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
    launch->ctas = ShareItems(resident, &params);
    tiles *= params.axis[0].taps;
  }
  launch->out_dtype = problem.output_dtype();
  const double bytes = static_cast<double>(kWidth) *
                       static_cast<double>(problem.x_elements() + problem.y_elements());
  plan->microseconds = gpu.launch_us * (instance.wgrad() ? 2 : 1) +
                       std::max(bytes / (gpu.dram_bytes_per_us * kDramShare),
                                tiles * MicrosecondsOfTile(instance, params, gpu));
  plan->kernel = &kernel;
  plan->params = std::move(launch);
  return {};
}

std::vector<KernelDesc> MakeKernels() {
  std::vector<KernelDesc> kernels;
#define JAXCONV_ROW(op, dtype, variant)                                                       \
  kernels.push_back({JAXCONV_NAME(op, block_diagonal, dtype, variant), "block_diagonal",      \
                     JAXCONV_OP_##op, JAXCONV_DTYPE_##dtype, 80, 1000, MakePlan, &instance}); \
  kernels.back().on_request = true;
#define KERNEL(ops, types, variant, header, form, args, ...)           \
  {                                                                    \
    static constexpr Instance instance = {JAXCONV_UNPACK __VA_ARGS__}; \
    JAXCONV_FOR_EACH(ops, types, JAXCONV_ROW, variant)                 \
  }
#include "cuda/block_diagonal/kernels.def"
#undef KERNEL
#undef JAXCONV_ROW
  return kernels;
}

}  // namespace

const std::vector<KernelDesc>& Kernels() {
  static const std::vector<KernelDesc> kernels = MakeKernels();
  return kernels;
}

}  // namespace jaxconv::block_diagonal
