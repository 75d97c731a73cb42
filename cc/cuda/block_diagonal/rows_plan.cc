#include "cuda/block_diagonal/rows_plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/block_diagonal/instance.h"
#include "cuda/block_diagonal/params.h"
#include "cuda/block_diagonal/runs_plan.h"
#include "cuda/common/rates.h"

namespace jaxconv::block_diagonal {
namespace {

constexpr int64_t kHalo = 2;

constexpr int64_t kTaps = 3;  // of rows and of columns

int64_t SharedBytes(const Instance& instance) {
  const int64_t filter = kTileBytes * instance.block * 3 * kRowTaps;
  return kRowPairs * (instance.stages * (kRowStageBytes + 2 * 8) + 2 * kRowStagingBytes) + filter;
}

// Cycles of the tensor cores for a row of 64 pixels and all channels of a tile. An instruction with
// N columns takes max(N / 2, 16 + N / 4): its products, or reading A and B.
double CyclesOfRow(const Instance& instance) {
  const int64_t owned = kRowBytes / instance.element_bytes;
  const auto filter_columns = std::min(instance.block, owned);
  const auto columns = static_cast<double>(kTaps * filter_columns);
  const auto products = static_cast<double>(kTaps * (instance.channels() / filter_columns) *
                                            (instance.block / instance.step_channels()));
  return products * std::max(columns / 2, 16 + columns / 4);
}

// Chooses the columns and images of a tile, and the number of rows with the smallest time. Two
// pairs of warpgroups divide its images or its rows.
void ShapeRows(const Instance& instance, const ConvProblem& problem, int64_t resident,
               Params* params) {
  Axis &rows = params->axis[1], &columns = params->axis[2];
  const int64_t column_tiles = CeilDiv(columns.out, kRowPixels);
  const int64_t tile_columns = CeilDiv(columns.out, column_tiles);
  // The first pixel of a row is also the padding after the previous row.
  const bool shares =
      column_tiles == 1 && columns.pad >= 1 && columns.out + 1 - columns.pad >= columns.in;
  const int64_t box_columns = tile_columns + (shares ? 1 : kHalo);
  const int64_t most = column_tiles == 1 && problem.batch == 1 ? kRowPixels / box_columns : 1;
  const int64_t images = std::clamp<int64_t>(most, 1, problem.n);
  columns.tile = static_cast<int32_t>(tile_columns);
  columns.box = static_cast<int32_t>(box_columns);
  columns.tiles = FastDivmod(column_tiles);
  params->pair_images = static_cast<int32_t>(images);
  params->box_pixels = static_cast<int32_t>(images * box_columns);
  // With several images, the pixels between them lie outside the output.
  params->walked_columns = static_cast<int32_t>(images > 1 ? box_columns : tile_columns);
  double least = HUGE_VAL;
  for (int64_t of_images = 1; of_images <= kRowPairs; ++of_images) {
    if (of_images > 1 && (problem.batch > 1 || problem.n <= images)) break;
    const int64_t strips = CeilDiv(problem.n, of_images * images) * problem.batch * column_tiles *
                           CeilDiv(params->channels, instance.channels());
    for (int64_t tile = rows.out; tile > 0; --tile) {
      const int64_t row_tiles = CeilDiv(rows.out, tile);
      if (CeilDiv(rows.out, row_tiles) != tile) continue;
      const int64_t pair_rows = CeilDiv(tile * of_images, kRowPairs);
      const double work =
          static_cast<double>(CeilDiv(strips * row_tiles, resident) * (pair_rows + kHalo));
      if (work >= least) continue;
      least = work;
      rows.tile = static_cast<int32_t>(tile);
      rows.tiles = FastDivmod(row_tiles);
      params->tile_images = static_cast<int32_t>(of_images * images);
      params->pair_rows = static_cast<int32_t>(pair_rows);
    }
  }
  rows.box = params->pair_rows + kHalo;
}

}  // namespace

Status MakeRowsPlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                    int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  DescribeOperands(problem, &params);
  JAXCONV_RETURN_IF_ERROR(CheckRuns(instance, problem, params));
  launch->shared_bytes = SharedBytes(instance);
  const int64_t ctas_of_sm = CtasOfSm(instance.ctas_per_sm, launch->shared_bytes, gpu);
  if (ctas_of_sm == 0) return Status::Unimplemented("the rows and the filter do not fit");
  const int64_t resident = gpu.sm_count * ctas_of_sm;
  ShapeRows(instance, problem, resident, &params);
  JAXCONV_RETURN_IF_ERROR(CountItems(problem, instance.channels(), &params));
  launch->ctas = ShareItems(resident, &params);
  launch->out_dtype = problem.output_dtype();
  const auto rows =
      static_cast<double>(CeilDiv(params.items, launch->ctas) * int64_t{params.axis[1].box});
  const double multiply = CyclesOfRow(instance);
  plan->terms.tensor_cores =
      rows * static_cast<double>(ctas_of_sm * kRowPairs) * multiply / gpu.cycles_per_us();
  plan->terms.stores = rows * multiply / 2 / gpu.cycles_per_us();
  plan->terms.dram = DramBytes(instance, problem, gpu) / gpu.dram_bytes_per_us;
  plan->terms.launch = gpu.launch_us;
  plan->form = FormTimeOf("block_diagonal rows", OperationsName(problem),
                          OperandsName(problem, /*tf32=*/true, instance.three_tf32), gpu);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->kernel = &kernel;
  plan->params = std::move(launch);
  return {};
}

}  // namespace jaxconv::block_diagonal
