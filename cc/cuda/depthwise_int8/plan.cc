#include "cuda/depthwise_int8/plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/common/instances.h"
#include "cuda/common/predicted_time.h"
#include "cuda/common/rates.h"
#include "cuda/depthwise_int8/params.h"

namespace jaxconv::depthwise_int8 {
namespace {

// The arguments of a line of kernels.def, in their order.
struct Instance {
  int64_t stride, ctas_per_sm;
  bool any() const { return stride == 0; }
};

// A warp's instructions to load and widen a lane's channels.
constexpr double kLoadInstructions = 9;
// An integer multiply-add takes two issue slots.
constexpr double kProductSlots = 2;

Status Check(const KernelDesc& kernel, const Instance& instance, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckInt8Types(kernel, problem));
  JAXCONV_RETURN_IF_ERROR(problem.RequireChannelsLast());
  JAXCONV_RETURN_IF_ERROR(problem.RequireInt32());
  if (problem.batch != 1) return Refuse("one batch", problem.batch);
  if (problem.groups != problem.c) {
    return Refuse("one input channel in a group", problem.c_per_group());
  }
  if (problem.k != problem.c) return Refuse("one output channel in a group", problem.k_per_group());
  if (problem.c % 16 != 0) return Refuse("channels in multiples of 16", problem.c);
  for (int64_t dilation : problem.lhs_dilation) {
    if (dilation != 1) return Refuse("no lhs_dilation", dilation);
  }
  if (instance.any()) return {};
  if (problem.stride[2] != instance.stride || problem.dilation[2] != 1) {
    return Status::Unimplemented("expected stride " + std::to_string(instance.stride) +
                                 " and no dilation along the columns");
  }
  return {};
}

int64_t StageBytes(const Params& params) {
  return int64_t{params.axis[1].box} * params.axis[2].box * kChannels;
}

// A warp's instructions for an item and one depth tap.
double Instructions(const Instance& instance, const Params& params) {
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const double copies = static_cast<double>(StageBytes(params)) / (kChunkBytes * kThreads);
  const double taps = params.row_taps;
  const double steps = taps / kTapsAtATime;
  const auto window = static_cast<double>((kStrip - 1) * columns.stride + kTapsAtATime);
  const double loads =
      kLoadInstructions * (taps + (instance.any() ? taps * kStrip : window * steps));
  const double row = loads + taps * kStrip * kLaneChannels * kProductSlots;
  return copies * kCopyInstructions + rows.taps * row +
         kStrip * kLaneChannels * kRequantizeInstructions;
}

Status ShapeTile(const Instance& instance, const Gpu& gpu, Params* params, int64_t* shared_bytes) {
  double least = HUGE_VAL;
  int64_t fewest_bytes = INT64_MAX;
  Params best;
  for (int64_t across = 1; across <= kStrips; across *= 2) {
    Params shape = *params;
    const Axis &rows = shape.axis[1], &columns = shape.axis[2];
    if (!ShapeBox(kStrips / across, across * kStrip, rows.taps, &shape)) continue;
    shape.strips_across = static_cast<int32_t>(across);
    const int64_t stages = 2 * StageBytes(shape);
    const int64_t bytes = stages + int64_t{rows.taps} * shape.row_taps * kChannels;
    fewest_bytes = std::min(fewest_bytes, bytes);
    const int64_t ctas = CtasOfSm(instance.ctas_per_sm, bytes, gpu);
    if (ctas == 0) continue;
    shape.stage_bytes = static_cast<int32_t>(stages / 2);
    shape.taps_offset = static_cast<int32_t>(stages);
    const double work = Instructions(instance, shape) * static_cast<double>(rows.tiles.divisor) *
                        columns.tiles.divisor;
    if (work >= least) continue;
    least = work;
    best = shape;
    *shared_bytes = bytes;
  }
  if (least == HUGE_VAL) {
    if (fewest_bytes == INT64_MAX) {
      return Status::Unimplemented("the window is wider than 32,767 pixels");
    }
    return RefuseSharedBytes("two boxes of pixels need", fewest_bytes, gpu);
  }
  *params = best;
  return {};
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  DescribeAxes(problem, &params);
  params.channels = static_cast<int32_t>(problem.c);
  params.gathered_channels = params.channels;
  params.vector = 1;
  params.filter_row = static_cast<int32_t>(problem.packed_row());
  params.row_taps = static_cast<int32_t>(instance.any() ? problem.filter[2]
                                                        : (problem.filter[2] + kTapsAtATime - 1) /
                                                              kTapsAtATime * kTapsAtATime);
  params.requantize = MakeRequantizeParams(problem);
  JAXCONV_RETURN_IF_ERROR(ShapeTile(instance, gpu, &params, &launch->shared_bytes));
  JAXCONV_RETURN_IF_ERROR(CountItems(problem, kChannels, &params));
  const int64_t resident = gpu.sm_count * CtasOfSm(instance.ctas_per_sm, launch->shared_bytes, gpu);
  launch->ctas = ShareItems(resident, &params);
  launch->out_dtype = problem.y_dtype;
  // Whole items on whole SMs.
  const int64_t ctas_of_sm = (launch->ctas + gpu.sm_count - 1) / gpu.sm_count;
  const auto items = static_cast<double>(params.items_of_cta + (params.longer_ctas > 0));
  const double slots = static_cast<double>(ctas_of_sm) * items * (kThreads / kLanes) *
                       Instructions(instance, params) * params.axis[0].taps;
  plan->terms.loads = slots / (kSchedulers * gpu.cycles_per_us());
  plan->terms.dram = Int8Bytes(problem) / gpu.dram_bytes_per_us;
  plan->terms.launch = gpu.launch_us;
  plan->form = FormTimeOf("depthwise_int8", OperationsName(problem), "8-bit", gpu);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->kernel = &kernel;
  plan->slices = 1;
  plan->params = std::move(launch);
  return {};
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments)                                  \
  JAXCONV_ADD_KERNELS(all, ops, types, depthwise_int8, variant, 80, 1000, MakePlan, Instance, \
                      JAXCONV_UNPACK arguments)
#include "cuda/depthwise_int8/kernels.def"
  return all;
}

}  // namespace jaxconv::depthwise_int8
