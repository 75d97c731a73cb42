#include "cuda/depthwise/walk_plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/depthwise/operands.h"
#include "cuda/depthwise/params.h"

namespace jaxconv::depthwise {
namespace {

constexpr int64_t kWidth = 2;  // bytes of an element
constexpr int64_t kStageAlignment = 128;
// Issue slots of a warp, counted in SASS (sm_90a): of an output, of a row of pixels beside its loads and
// conversions, of a run. The share of the slots that are used, and the microseconds before the first row,
// fitted to four times on an H200, which they give within 3 %.
constexpr double kStoreSlots = 6, kRowSlots = 110, kRunSlots = 900;
constexpr double kIssueShare = 0.74, kStart = 1.5;

Status Check(const KernelDesc& kernel, const WalkInstance& instance, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckOperands(kernel, problem));
  if (problem.filter[1] != instance.filter_rows || problem.filter[2] != instance.filter_columns) {
    return Status::Unimplemented("expected a filter of " + std::to_string(instance.filter_rows) +
                                 "x" + std::to_string(instance.filter_columns) + ", got " +
                                 std::to_string(problem.filter[1]) + "x" +
                                 std::to_string(problem.filter[2]));
  }
  return CheckStride(problem, 1);
}

// Strips side by side, and the images of a tile: as few tiles as possible, of as few images.
Status ShapeTile(const WalkInstance& instance, const ConvProblem& problem, Params* params) {
  Axis &rows = params->axis[1], &columns = params->axis[2];
  int64_t fewest = INT64_MAX;
  for (int64_t across = instance.strips(); across >= 1; across /= 2) {
    const int64_t images = instance.strips() / across;
    // A tile's images have the same filter.
    if (images > (problem.batch == 1 ? problem.n : 1)) continue;
    const int64_t tiles =
        CeilDiv(columns.out, across * instance.strip) * CeilDiv(problem.n, images);
    if (tiles >= fewest) continue;
    fewest = tiles;
    params->blocks_across = static_cast<int32_t>(across);
    params->tile_images = static_cast<int32_t>(images);
  }
  if (!ShapeBox(1, params->blocks_across * int64_t{instance.strip}, 1, params)) {
    return Status::Unimplemented("the window is wider than a box may be");
  }
  rows.box = 1;
  return {};
}

}  // namespace

Status PlanWalk(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const WalkInstance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  DescribeOperands(problem, kernel.dtype, &params);
  params.epilogue = EpilogueParams(problem.epilogue);
  JAXCONV_RETURN_IF_ERROR(CheckTma(problem, params));
  JAXCONV_RETURN_IF_ERROR(ShapeTile(instance, problem, &params));
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const int64_t taps = int64_t{instance.filter_rows} * instance.filter_columns;
  const int64_t stage_bytes =
      CeilDiv(params.tile_images * int64_t{columns.box} * instance.channels() * kWidth,
              kStageAlignment) *
      kStageAlignment;
  params.stage_bytes = static_cast<int32_t>(stage_bytes);
  launch->shared_bytes = kWalkStages * stage_bytes +
                         (taps + 2) * instance.channels() * int64_t{sizeof(float)} +
                         kWalkWarps * kCopyPlaceBytes + 2 * kWalkStages * 8;
  JAXCONV_RETURN_IF_ERROR(CountItems(problem, instance.channels(), &params));
  const int64_t ctas_of_sm = CtasOfSm(instance.ctas_per_sm, launch->shared_bytes, gpu);
  if (ctas_of_sm == 0) return Status::Unimplemented("the rows exceed the shared memory");
  launch->ctas = ShareItems(gpu.sm_count * ctas_of_sm, &params);
  launch->out_dtype = problem.output_dtype();

  const auto longest = static_cast<double>(CeilDiv(params.items, launch->ctas));
  const auto strip = static_cast<double>(instance.strip);
  // Neighbouring rows of a CTA begin anywhere in a column of tiles.
  const double runs = 1 + (longest - 1) / rows.out;
  // Rows of the window that lie outside of the image are not read.
  const int64_t outside = std::max(rows.pad, 0) + std::max(instance.filter_rows - 1 - rows.pad, 0);
  const double pixel_rows =
      longest * (1 - static_cast<double>(outside) / rows.out) + runs * (instance.filter_rows - 1);
  const double slots =
      longest * strip * (2.0 * static_cast<double>(taps) + kStoreSlots) +
      std::max(pixel_rows, longest) * (kRowSlots + 3 * (strip + instance.filter_columns - 1)) +
      runs * kRunSlots;
  const auto warps = static_cast<double>(std::min(ctas_of_sm, CeilDiv(launch->ctas, gpu.sm_count)) *
                                         kWalkThreads / 32);
  const double issue = warps * slots / (4 * gpu.cycles_per_us() * kIssueShare);
  const double waste = static_cast<double>(params.channel_tiles.divisor) * instance.channels() /
                       static_cast<double>(params.channels);
  const double bytes = static_cast<double>(kWidth) *
                           static_cast<double>(problem.x_elements() + problem.y_elements()) +
                       static_cast<double>(EpilogueBytes(problem));
  const double copy = waste * bytes / (gpu.dram_bytes_per_us * kDramShare);
  plan->microseconds =
      gpu.launch_us + kStart + std::pow(std::pow(issue, 4) + std::pow(copy, 4), 0.25);
  plan->kernel = &kernel;
  plan->slices = 1;
  plan->params = std::move(launch);
  return {};
}

}  // namespace jaxconv::depthwise
