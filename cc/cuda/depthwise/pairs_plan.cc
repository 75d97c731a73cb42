#include "cuda/depthwise/pairs_plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/common/rates.h"
#include "cuda/depthwise/operands.h"
#include "cuda/depthwise/params.h"

namespace jaxconv::depthwise {
namespace {

constexpr int64_t kWidth = 2;  // bytes of an element
constexpr int64_t kMostBox = 256;
constexpr int64_t kColumns = 16;    // of a warp
constexpr int64_t kMostParts = 16;  // of an image's rows

// Scheduler cycles for a product; a CTA's cycles until its first row, and for a row that waits for
// the previous one. Fitted to 20 times of the kernel (docs/notes/depthwise.md).
constexpr double kProductCycles = 7.2;
constexpr double kStartCycles = 4190, kRowLatency = 363;

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

// Shapes a CTA's tile; returns whether its box fits.
bool ShapeTile(const PairsInstance& instance, const ConvProblem& problem, const Gpu& gpu,
               bool fused, bool two, int64_t parts, Params* params, int64_t* shared_bytes,
               int64_t* ctas_of_sm) {
  Axis &rows = params->axis[1], &columns = params->axis[2];
  // A tile's images share a filter.
  if (two && (problem.batch > 1 || problem.n == 1)) return false;
  params->tile_images = two ? 2 : 1;
  const int64_t most = two ? kColumns / 2 : kColumns;
  const int64_t across = CeilDiv(columns.out, CeilDiv(columns.out, most));
  const int64_t tile_rows = CeilDiv(rows.out, parts);
  if (!ShapeBox(tile_rows, across, rows.taps, params)) return false;
  // The pixels that two halves of 8 read and store.
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

TimeTerms TermsOf(const PairsInstance& instance, const ConvProblem& problem, const Gpu& gpu,
                  const Params& params, int64_t ctas_of_sm) {
  const Axis& rows = params.axis[1];
  const auto items = static_cast<double>(params.items);
  const double places = static_cast<double>(gpu.sm_count * ctas_of_sm);
  const double pixel_rows = rows.tile + rows.taps - 1;
  // For a warp; a single last tap of a row counts as a product.
  const double products = static_cast<double>(rows.tile) * instance.filter_rows *
                          static_cast<double>(CeilDiv(int64_t{instance.filter_columns}, 2));
  const double work = items * instance.channel_blocks / (kSchedulers * gpu.sm_count) *
                      (products * kProductCycles + kItemSlots);
  // Consecutive CTAs in a resident slot.
  const double turns = std::max(1.0, items / places + kLastTurn);
  const double chain = turns * (kStartCycles + pixel_rows * kRowLatency);
  const double waste =
      static_cast<double>(params.channel_tiles.divisor * instance.channels()) / params.channels;
  const double bytes = static_cast<double>(kWidth) *
                           static_cast<double>(problem.x_elements() + problem.y_elements()) +
                       static_cast<double>(EpilogueBytes(problem));
  TimeTerms terms;
  terms.tensor_cores = work / gpu.cycles_per_us();
  terms.loads = chain / gpu.cycles_per_us();
  terms.dram = std::sqrt(waste) * bytes / gpu.dram_bytes_per_us;
  terms.launch = gpu.launch_us;
  return terms;
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

  plan->form = FormTimeOf("depthwise pairs", OperationsName(problem), "16-bit", gpu);
  double least = HUGE_VAL;
  for (int64_t parts = 1; parts <= kMostParts; ++parts) {
    for (const bool two : {false, true}) {
      Params shape = params;
      int64_t shared_bytes = 0, ctas_of_sm = 0;
      if (!ShapeTile(instance, problem, gpu, kernel.fused, two, parts, &shape, &shared_bytes,
                     &ctas_of_sm)) {
        continue;
      }
      JAXCONV_RETURN_IF_ERROR(CountItems(problem, instance.channels(), &shape));
      const TimeTerms terms = TermsOf(instance, problem, gpu, shape, ctas_of_sm);
      const double us = PredictedMicroseconds(terms, plan->form);
      if (us >= least) continue;
      plan->terms = terms;
      least = us;
      launch->kernel = shape;
      launch->shared_bytes = shared_bytes;
      launch->ctas = shape.items;
    }
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
