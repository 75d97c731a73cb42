#include "cuda/block_diagonal/runs_plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/block_diagonal/instance.h"
#include "cuda/block_diagonal/params.h"
#include "cuda/common/rates.h"

namespace jaxconv::block_diagonal {
namespace {

constexpr int64_t kTaps = 3;        // of rows and of columns
constexpr int64_t kWavefronts = 4;  // of ldmatrix
constexpr int64_t kMaxBox = 256;    // pixels of a box along an axis

int64_t StageBytes(const Instance& instance, const Params& params) {
  const int64_t walked = instance.wgrad() ? params.tile_pixels : 0;
  const int64_t guard = instance.stride == 1 ? kRunGuardPixels : 0;
  return (params.box_pixels + walked + guard) * int64_t{kRunPixelBytes};
}
// Bytes of a tile's results in phases_sm90.cuh, including a pixel for results that are not stored.
int64_t ResultBytes(const Instance& instance, const Params& params) {
  return instance.phases ? CeilDiv(params.tile_pixels + 1, 8) * 8 * kRunPixelBytes : 0;
}
int64_t SharedBytes(const Instance& instance, const Params& params) {
  const int64_t stage = StageBytes(instance, params);
  if (!instance.wgrad()) {
    return 2 * stage + ResultBytes(instance, params) +
           kTaps * kTaps * instance.block * kRunPixelBytes + 2 * 8;
  }
  const int64_t sums =
      kTaps * kTaps * instance.channels() * instance.block * int64_t{sizeof(float)};
  return std::max(kRunStages * stage + kRunPixelBytes + 2 * kRunStages * 8, sums);
}

// One tile on one of the GPU's SMs, divided by their number.
TimeTerms TermsOfTile(const Instance& instance, const Params& params, const Gpu& gpu) {
  const auto rows = static_cast<double>(instance.run_rows);
  const auto steps =
      static_cast<double>(instance.block) / static_cast<double>(instance.step_channels());
  // A warp has 32 bytes of the result's channels: two blocks of 8, or one in float32.
  const double products =
      rows * kTaps * kTaps * steps *
      static_cast<double>(ProductsOf(instance.three_tf32) * kFloatBytes / instance.element_bytes);
  const double box_rows = instance.phases ? rows + 1 : instance.stride * (rows - 1) + kTaps;
  const auto sixteens = static_cast<double>(instance.block / kMmaRows);
  // Reads of operands.
  const double operands = instance.wgrad() ? kTaps * box_rows + rows * sixteens
                                           : steps * (kTaps * box_rows + kTaps * kTaps);
  const double stores = instance.wgrad() ? 0 : instance.phases ? 2 * 2 * rows : rows;
  const double pixels = params.box_pixels + params.tile_pixels;
  const double shared = pixels + kWarps * kWavefronts * (operands + stores);
  const double multiply = products * kWarps * kProductsOfMma / gpu.mma_sync_per_clock;
  const double cycles = gpu.sm_count * gpu.cycles_per_us();
  TimeTerms terms;
  terms.tensor_cores = multiply / cycles;
  terms.loads = shared / cycles;
  return terms;
}

// Chooses the tile with the smallest time. Its rows and columns are those of the output, or of dy
// in phases_sm90.cuh.
Status ShapeRuns(const Instance& instance, const Gpu& gpu, const FormTime& form,
                 const ConvProblem& problem, Params* params) {
  FormTime of_tile_time = form;
  of_tile_time.fixed_us = 0;
  Axis &rows = params->axis[1], &columns = params->axis[2];
  const int64_t channel_tiles = CeilDiv(params->channels, instance.channels()) * problem.batch;
  const int64_t step = instance.strided() ? 2 : 1, of_run = instance.phases ? 2 : 1;
  const int64_t halo = instance.stride == 1 ? kTaps - 1 : 1;
  const int64_t all_rows = CeilDiv(rows.out, of_run), all_columns = CeilDiv(columns.out, of_run);
  double least = HUGE_VAL;
  Params best;
  for (int64_t tile_columns = 1; tile_columns <= std::min<int64_t>(kTileRuns, all_columns);
       ++tile_columns) {
    const int64_t column_tiles = CeilDiv(all_columns, tile_columns);
    if (CeilDiv(all_columns, column_tiles) != tile_columns && tile_columns % 8 != 0) continue;
    // The first pixel of a row is also the padding after the previous row.
    const bool shares = instance.stride == 1 && column_tiles == 1 && columns.pad >= 1 &&
                        columns.out + 1 - columns.pad >= columns.in;
    const int64_t box_columns = CeilDiv(tile_columns + (shares ? 1 : halo), 8) * 8;
    for (int64_t groups = 1; groups * tile_columns <= kTileRuns; ++groups) {
      const int64_t tile_rows = groups * instance.run_rows;
      if (groups > 1 && tile_rows - instance.run_rows >= all_rows) break;
      const int64_t row_tiles = CeilDiv(all_rows, tile_rows), box_rows = tile_rows * step + halo;
      const bool whole = column_tiles * row_tiles == 1 && problem.batch == 1;
      for (int64_t images = 1; images * groups * tile_columns <= kTileRuns && images <= problem.n;
           ++images) {
        if (images > 1 && !whole) break;
        // With several groups of rows wgrad needs all of them.
        if (instance.wgrad() && groups > 1 && rows.out % tile_rows != 0) break;
        Params shape = *params;
        shape.tile_images = static_cast<int32_t>(images);
        shape.axis[1].tile = static_cast<int32_t>(tile_rows);
        shape.axis[1].box = static_cast<int32_t>(box_rows);
        shape.axis[1].tiles = FastDivmod(row_tiles);
        shape.axis[2].tile = static_cast<int32_t>(tile_columns);
        shape.axis[2].box = static_cast<int32_t>(box_columns);
        shape.axis[2].tiles = FastDivmod(column_tiles);
        shape.tile_columns = FastDivmod(tile_columns);
        shape.run_groups = FastDivmod(groups);
        shape.box_columns = FastDivmod(box_columns);
        // A row of wgrad's tile of dy also has a multiple of 8 pixels.
        const int64_t walked_columns =
            instance.wgrad() ? CeilDiv(tile_columns, 8) * 8 : tile_columns;
        shape.walked_columns = static_cast<int32_t>(walked_columns);
        shape.tile_pixels =
            static_cast<int32_t>(images * tile_rows * walked_columns * of_run * of_run);
        shape.box_pixels = static_cast<int32_t>(images * box_rows * box_columns * step);
        if (std::max(box_rows, tile_rows * of_run) > kMaxBox) break;
        const int64_t ctas = CtasOfSm(instance.ctas_per_sm, SharedBytes(instance, shape), gpu);
        if (ctas == 0) break;
        const int64_t resident = gpu.sm_count * ctas;
        const int64_t items = CeilDiv(problem.n, images) * row_tiles * column_tiles * channel_tiles;
        const double work = PredictedMicroseconds(TermsOfTile(instance, shape, gpu), of_tile_time) *
                            static_cast<double>(CeilDiv(items, resident) * resident);
        if (work >= least) continue;
        least = work;
        best = shape;
      }
    }
  }
  if (least == HUGE_VAL) return Status::Unimplemented("two boxes and the filter do not fit");
  *params = best;
  return {};
}

}  // namespace

Status CheckRuns(const Instance& instance, const ConvProblem& problem, const Params& params) {
  if (problem.filter_layout != FilterLayout::kRsck) {
    return Status::Unimplemented("expected a filter stored as rsck");
  }
  if (problem.op != Op::kWgrad && instance.element_bytes == 2 &&
      problem.output_dtype() == DType::kF32) {
    return Status::Unimplemented("stores 16-bit outputs, got float32");
  }
  const Axis& depth = params.axis[0];
  if (depth.taps != 1 || depth.in != 1 || depth.out != 1 || depth.pad != 0) {
    return Status::Unimplemented("expected no depth");
  }
  for (int a = 1; a < 3; ++a) {
    const Axis& axis = params.axis[a];
    if (axis.taps != kTaps) return Status::Unimplemented("expected a filter of 3x3");
    const bool dgrad = problem.op == Op::kDgrad;
    const int64_t stride = dgrad ? axis.in_dilation.divisor : axis.stride;
    const int64_t none = dgrad ? axis.stride : axis.in_dilation.divisor;
    if (stride != instance.stride || none != 1 || axis.dilation != 1) {
      return Status::Unimplemented("expected stride " + std::to_string(instance.stride) +
                                   " and no dilation");
    }
  }
  if (instance.strided() && params.axis[2].in < 2) {
    return Status::Unimplemented("expected rows of two pixels or more");
  }
  return {};
}

Status MakeRunsPlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                    int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem));
  plan->form = FormTimeOf("block_diagonal runs", OperationsName(problem),
                          OperandsName(problem, /*tf32=*/true, instance.three_tf32), gpu);
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  DescribeOperands(problem, &params);
  JAXCONV_RETURN_IF_ERROR(CheckRuns(instance, problem, params));
  JAXCONV_RETURN_IF_ERROR(ShapeRuns(instance, gpu, plan->form, problem, &params));
  params.stage_bytes = static_cast<int32_t>(StageBytes(instance, params));
  params.result_bytes = static_cast<int32_t>(ResultBytes(instance, params));
  launch->shared_bytes = SharedBytes(instance, params);
  JAXCONV_RETURN_IF_ERROR(CountItems(problem, instance.channels(), &params));
  launch->out_dtype = problem.output_dtype();
  const int64_t ctas_of_sm = CtasOfSm(instance.ctas_per_sm, launch->shared_bytes, gpu);
  const int64_t resident = gpu.sm_count * ctas_of_sm;
  double tiles, beside = 0;
  if (instance.wgrad()) {
    const int64_t parts = CeilDiv(params.channels, instance.channels()) * problem.batch;
    params.run_filters = static_cast<int32_t>(problem.batch);
    JAXCONV_RETURN_IF_ERROR(CutIntoSlices(problem, parts, std::max(parts, resident / parts * parts),
                                          slices, &params, &launch->ctas, plan));
    launch->out_elements = problem.w_elements();
    tiles = static_cast<double>(CeilDiv(params.items, plan->slices) *
                                CeilDiv(launch->ctas, resident) * resident);
    beside = gpu.launch_us +
             2 * static_cast<double>(plan->workspace_bytes) / (gpu.dram_bytes_per_us * kL2Rate);
  } else {
    JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
    launch->ctas = ShareItems(resident, &params);
    tiles = static_cast<double>(CeilDiv(params.items, launch->ctas) * resident);
  }
  plan->terms = TermsOfTile(instance, params, gpu);
  plan->terms.tensor_cores *= tiles;
  plan->terms.loads *= tiles;
  plan->terms.dram = DramBytes(instance, problem, gpu) / gpu.dram_bytes_per_us;
  plan->terms.launch = gpu.launch_us + beside;
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->kernel = &kernel;
  plan->params = std::move(launch);
  return {};
}

}  // namespace jaxconv::block_diagonal
