#include "cuda/depthwise/walk_plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/common/predicted_time.h"
#include "cuda/common/rates.h"
#include "cuda/depthwise/operands.h"
#include "cuda/depthwise/params.h"

namespace jaxconv::depthwise {
namespace {

constexpr int64_t kMostItems = int64_t{1} << 30;

// A thread's cycles for an item apart from its steps, and for a step.
constexpr double kItemCycles = 2000, kStepCycles = 750;
// Scheduler cycles for a warp's multiply-add, including its share of all other instructions.
constexpr double kTapCycles = 3;
// What dgrad loses of the DRAM rate with each doubling of a part (fprop half as much); additional
// launch time in microseconds.
constexpr double kLossOfDoubling = 0.03, kStartUs = 4;

Status Check(const KernelDesc& kernel, const WalkInstance& instance, const ConvProblem& problem,
             const Params& params) {
  JAXCONV_RETURN_IF_ERROR(CheckOperands(kernel, problem));
  if (problem.filter[1] != instance.filter_rows || problem.filter[2] != instance.filter_columns) {
    return Refuse("a filter of " + std::to_string(instance.filter_rows) + "x" +
                      std::to_string(instance.filter_columns),
                  std::to_string(problem.filter[1]) + "x" + std::to_string(problem.filter[2]));
  }
  if (problem.in[0] != 1 || problem.out[0] != 1) {
    return Status::Unimplemented("expected tensors without a depth");
  }
  JAXCONV_RETURN_IF_ERROR(CheckTma(problem, params));
  if (problem.op != Op::kDgrad) return CheckStride(problem, instance.stride);
  if (problem.stride[1] != instance.stride || problem.stride[2] != instance.stride) {
    return Status::Unimplemented("expected stride " + std::to_string(instance.stride) +
                                 " of rows and columns");
  }
  return CheckStride(problem, 1);
}

}  // namespace

Status PlanWalk(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const WalkInstance*>(kernel.instance);
  Params described;
  DescribeOperands(problem, kernel.dtype, &described);
  const int64_t spread = problem.op == Op::kDgrad ? instance.stride : 1;
  if (spread == 2) HalveBoxes(&described);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem, described));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  auto launch = std::make_shared<HaloLaunch<WalkParams>>();
  WalkParams& params = launch->kernel;
  static_cast<HaloParams&>(params) = described;
  params.tap_stride = described.tap_stride, params.channel_stride = described.channel_stride;
  params.epilogue = EpilogueParams(problem.epilogue);
  params.images = static_cast<int32_t>(problem.batch * problem.n);
  params.images_divmod = FastDivmod(problem.n);

  const Axis &rows = params.axis[1], &columns = params.axis[2];
  // Rows of a step; named as WalkKernel's constants.
  const int64_t stride = problem.op == Op::kDgrad ? 1 : instance.stride;
  const int64_t window_rows = ((spread - 1) * stride + instance.filter_rows - 1) / spread + 1;
  const int64_t window_columns =
      ((instance.strip - 1) * stride + instance.filter_columns - 1) / spread + 1;
  const int64_t turns = CeilDiv(window_rows, stride);
  const int64_t width = ByteWidth(kernel.dtype), chunks = problem.c / instance.vec;
  const int64_t strips = CeilDiv(int64_t{columns.out} + columns.shift, instance.strip);
  const int64_t all_steps = CeilDiv(int64_t{rows.out} + rows.shift, spread);
  launch->shared_bytes =
      instance.stages * instance.threads * stride * window_columns * instance.vec * width;
  const int64_t ctas_of_sm = CtasOfSm(instance.ctas_per_sm, launch->shared_bytes, gpu);
  if (ctas_of_sm == 0) return RefuseSharedBytes("a CTA's stages need", launch->shared_bytes, gpu);
  const double places = static_cast<double>(gpu.sm_count * ctas_of_sm);
  const double bytes = static_cast<double>(width) *
                           static_cast<double>(problem.x_elements() + problem.y_elements()) +
                       static_cast<double>(EpilogueBytes(problem));
  const double copy = bytes / gpu.dram_bytes_per_us;
  // Multiply-adds of a thread's step: an output has all taps, in dgrad only those of its parity.
  // `instructions`: microseconds for this many steps of all threads.
  const double taps = static_cast<double>(instance.filter_rows * instance.filter_columns *
                                          instance.strip * instance.vec) /
                      static_cast<double>(spread);
  auto issue = [&](int64_t thread_steps) {
    return static_cast<double>(thread_steps) * taps * kTapCycles /
           (kLanes * kSchedulers * static_cast<double>(gpu.sm_count) * gpu.cycles_per_us());
  };
  // The share of reads in a step's bytes.
  const double read =
      static_cast<double>(stride * stride) / static_cast<double>(stride * stride + spread * spread);
  const int64_t columns_of_outputs = problem.batch * problem.n * strips * chunks;
  plan->form = FormTimeOf("depthwise walk", OperationsName(problem),
                          OperandsName(problem, /*tf32=*/false, /*three_tf32=*/false), gpu);
  double least = HUGE_VAL;
  int64_t last = 0;
  for (int64_t parts = 1; parts <= all_steps; ++parts) {
    const int64_t steps = CeilDiv(all_steps, parts);
    if (steps == last) continue;
    last = steps;
    const int64_t items = columns_of_outputs * CeilDiv(all_steps, steps);
    if (items > kMostItems) break;
    const double ctas = static_cast<double>(CeilDiv(items, instance.threads));
    const double issued = issue(items * (steps + turns - 1));
    const double moved = copy * (1 + kLossOfDoubling / static_cast<double>(stride) *
                                         std::log2(static_cast<double>(steps)));
    // A part's steps before its first outputs do all multiply-adds, but only read bytes.
    const double early = issued > moved ? 1 : read;
    const double cycles =
        std::max(1.0, ctas / places + kLastTurn) *
        (kItemCycles + kStepCycles * (static_cast<double>(steps) + early * (turns - 1)));
    const double work = std::max(cycles / gpu.cycles_per_us(), issued);
    const TimeTerms terms = {work, 0, 0, moved, gpu.launch_us + kStartUs};
    const double us = PredictedMicroseconds(terms, plan->form);
    if (us >= least) continue;
    least = us;
    plan->terms = terms;
    params.steps = static_cast<int32_t>(steps);
    params.parts = FastDivmod(CeilDiv(all_steps, steps));
    params.items = static_cast<int32_t>(items);
    launch->ctas = CeilDiv(items, instance.threads);
  }
  if (least == HUGE_VAL) return Status::Unimplemented("more than 2^30 columns of outputs");
  params.chunks = FastDivmod(chunks);
  params.strips = FastDivmod(strips);
  launch->out_dtype = problem.output_dtype();
  plan->microseconds = least;
  plan->slices = 1;
  plan->kernel = &kernel;
  plan->params = std::move(launch);
  return {};
}

}  // namespace jaxconv::depthwise
