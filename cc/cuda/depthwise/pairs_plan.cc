#include "cuda/depthwise/pairs_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>

#include "cuda/depthwise/operands.h"
#include "cuda/depthwise/params.h"

namespace jaxconv::depthwise {
namespace {

constexpr int64_t kWidth = 2;  // bytes of an element
constexpr int64_t kMostBox = 256;
constexpr int64_t kColumns = 16;  // of a warp

Status Check(const KernelDesc& kernel, const PairsInstance& instance, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckOperands(kernel, problem));
  if (problem.filter[1] != instance.filter_rows || problem.filter[2] != instance.filter_columns) {
    return Status::Unimplemented("expected a filter of " + std::to_string(instance.filter_rows) +
                                 "x" + std::to_string(instance.filter_columns) + ", got " +
                                 std::to_string(problem.filter[1]) + "x" +
                                 std::to_string(problem.filter[2]));
  }
  if (problem.in[0] != 1 || problem.out[0] != 1) {
    return Status::Unimplemented("expected tensors without a depth");
  }
  return CheckStride(problem, 1);
}

// Products that a CTA does, in rows of pixels, and whether its box fits.
bool ShapeTile(const PairsInstance& instance, const ConvProblem& problem, const Gpu& gpu,
               bool fused, bool two, int64_t parts, Params* params, int64_t* shared_bytes,
               int64_t* ctas_of_sm) {
  Axis &rows = params->axis[1], &columns = params->axis[2];
  // A tile's images have the same filter.
  if (two && (problem.batch > 1 || problem.n == 1)) return false;
  params->tile_images = two ? 2 : 1;
  const int64_t most = two ? kColumns / 2 : kColumns;
  const int64_t across = CeilDiv(columns.out, CeilDiv(columns.out, most));
  const int64_t tile_rows = CeilDiv(rows.out, parts);
  if (!ShapeBox(tile_rows, across, rows.taps, params)) return false;
  // As many pixels as two halves of 8 read and store.
  const int64_t least = two ? 8 : kColumns;
  columns.box = static_cast<int32_t>(CeilDiv(std::max<int64_t>(columns.box, least), 8) * 8);
  const int64_t group = PairsRows(instance.filter_rows);
  params->stages = static_cast<int32_t>(CeilDiv(int64_t{rows.box}, group));
  params->stage_bytes = static_cast<int32_t>(group * columns.box * params->tile_images *
                                             instance.channels() * kWidth);
  if (columns.box > kMostBox) return false;
  *shared_bytes = params->stages * (int64_t{params->stage_bytes} + 2 * 8);
  *ctas_of_sm = CtasOfSm(PairsCtas(instance.ctas_per_sm, fused), *shared_bytes, gpu);
  return *ctas_of_sm > 0;
}

}  // namespace

Status PlanPairs(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                 int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const PairsInstance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  auto launch = std::make_shared<LaunchParams>();
  Params params;
  DescribeOperands(problem, kernel.dtype, &params);
  params.epilogue = EpilogueParams(problem.epilogue);
  JAXCONV_RETURN_IF_ERROR(CheckTma(problem, params));

  double least = HUGE_VAL;
  const char* forced = std::getenv("PARTS");
  const char* forced_two = std::getenv("TWO");
  for (int64_t way = 0; way < 32; ++way) {
    const int64_t parts = way / 2 + 1;
    const bool two = way % 2 == 1;
    if (forced != nullptr && parts != std::atoi(forced)) continue;
    if (forced_two != nullptr && two != (std::atoi(forced_two) == 1)) continue;
    if (forced_two == nullptr &&
        two != (problem.n > 1 && problem.batch == 1 && params.axis[2].out <= 8))
      continue;
    Params shape = params;
    int64_t shared_bytes = 0, ctas_of_sm = 0;
    if (!ShapeTile(instance, problem, gpu, kernel.fused, two, parts, &shape, &shared_bytes,
                   &ctas_of_sm))
      continue;
    JAXCONV_RETURN_IF_ERROR(CountItems(problem, instance.channels(), &shape));
    const int64_t items = shape.items;
    const double rows = shape.axis[1].tile + shape.axis[1].taps - 1;
    // A row of pixels of a warp, and the start of a CTA that its neighbours do not cover.
    const double warps = static_cast<double>(std::min(ctas_of_sm, CeilDiv(items, gpu.sm_count))) *
                         instance.channel_blocks;
    const double products = instance.filter_rows * instance.filter_columns / 2.0;
    const double row_cycles = std::max(warps / 4 * (products * 3.3 + 8), 200.0);
    const double cycles =
        std::ceil(static_cast<double>(items) / static_cast<double>(gpu.sm_count * ctas_of_sm)) *
        (rows * row_cycles + 1500);
    const double bytes = static_cast<double>(kWidth) *
                         static_cast<double>(problem.x_elements() + problem.y_elements());
    const double copy = bytes / (gpu.dram_bytes_per_us * kDramShare);
    const double us = gpu.launch_us + 1.5 +
                      std::pow(std::pow(cycles / gpu.cycles_per_us(), 4) + std::pow(copy, 4), 0.25);
    if (us >= least) continue;
    least = us;
    launch->kernel = shape;
    launch->shared_bytes = shared_bytes;
    launch->ctas = items;
  }
  if (least == HUGE_VAL) return Status::Unimplemented("the rows exceed the shared memory");
  launch->out_dtype = problem.output_dtype();
  plan->microseconds = least;
  plan->kernel = &kernel;
  plan->slices = 1;
  plan->params = std::move(launch);
  return {};
}

}  // namespace jaxconv::depthwise
