#include "cuda/depthwise/hankel_plan.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "cuda/common/predicted_time.h"
#include "cuda/common/rates.h"
#include "cuda/depthwise/hankel_tile.h"
#include "cuda/depthwise/operands.h"
#include "cuda/depthwise/params.h"

namespace jaxconv::depthwise {
namespace {

constexpr int64_t kWidth = 2;  // bytes of an element
constexpr int64_t kMostTileRows = 256, kMostStrips = 64;
constexpr int64_t kWordsOfA = 4, kWordsOfB = 5;  // loads of a fragment of dy, and of a row of x
constexpr int64_t kMostSlices = 1024, kMostWorkspaceBytes = 64'000'000;

// Totals over the tiles of a column of the map, for all parts of the taps.
struct RowWork {
  double products = 0;  // a warp's m16n8k16 in a strip
  double words = 0;     // wavefronts of a warp's loads, in a strip
  double x_rows = 0, dy_rows = 0;
  int64_t most_x_rows = 0;  // of a tile
};

struct Shape {
  int64_t tile_rows = 1, strips = 1, x_rows = 1, shared_bytes = 0, ctas_of_sm = 1;
  // Cycles of an SM for all tiles of an image, depth and channel tile.
  double cycles = HUGE_VAL;
  RowWork work;
};

Status Check(const KernelDesc& kernel, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckOperands(kernel, problem));
  return CheckStride(problem, 1);
}

int64_t RowParts(const HankelInstance& instance, const HaloParams& params) {
  return CeilDiv(params.axis[1].taps, HankelRows(instance.row_blocks));
}

int64_t ColumnParts(const HankelInstance& instance, const HaloParams& params) {
  return CeilDiv(params.axis[2].taps, HankelColumns(instance.column_blocks));
}

// Counts the rows as hankel.cuh does.
RowWork WorkOfRows(const HankelInstance& instance, const HaloParams& params, int64_t tile_rows) {
  const Axis& rows = params.axis[1];
  const int64_t part_rows = HankelRows(instance.row_blocks);
  const int64_t x_end = (rows.in - 1) * int64_t{rows.in_dilation.divisor} + 1;
  RowWork work;
  for (int64_t part = 0; part < RowParts(instance, params); ++part) {
    const int64_t row_taps = std::min(part_rows, rows.taps - part * part_rows);
    for (int64_t first = 0; first < rows.out; first += tile_rows) {
      const int64_t x_row = first + part * part_rows - rows.pad;
      const int64_t dy_rows = std::min(tile_rows, rows.out - first);
      const int64_t begin = std::max<int64_t>(0, -x_row);
      const int64_t end = std::min(dy_rows + row_taps - 1, x_end - x_row);
      if (begin >= end) continue;
      work.x_rows += static_cast<double>(end - begin);
      work.dy_rows += static_cast<double>(dy_rows);
      work.most_x_rows = std::max(work.most_x_rows, end - begin);
      for (int64_t j = 0; j < instance.row_blocks; ++j) {
        const int64_t of_block = std::min(end, 8 * j + dy_rows + 7) - std::max(begin, 8 * j);
        work.products += static_cast<double>(std::max<int64_t>(0, of_block) * kHankelSteps *
                                             instance.column_blocks);
      }
      const int64_t blocks =
          end - begin + std::min<int64_t>(8, end - begin) * (instance.row_blocks - 1);
      work.words += static_cast<double>((end - begin) * kWordsOfB * instance.column_blocks +
                                        blocks * kWordsOfA);
    }
  }
  return work;
}

int64_t PlaneColumns(const HankelInstance& instance, int64_t strips) {
  return strips * kHankelColumns + HankelColumns(instance.column_blocks);
}

// Places the planes of a tile in shared memory; returns their bytes.
int64_t PlaceTile(const HankelInstance& instance, const Shape& shape, HankelParams* params) {
  Axis &rows = params->axis[1], &columns = params->axis[2];
  const int64_t tile_columns = shape.strips * kHankelColumns;
  rows.tile = static_cast<int32_t>(shape.tile_rows);
  columns.tile = static_cast<int32_t>(tile_columns);
  rows.tiles = FastDivmod(CeilDiv(rows.out, shape.tile_rows));
  columns.tiles = FastDivmod(CeilDiv(columns.out, tile_columns));
  params->strips = static_cast<int32_t>(shape.strips);
  const int64_t x_columns = PlaneColumns(instance, shape.strips);
  params->box_columns = FastDivmod(x_columns / 2);
  params->dy_words = FastDivmod(tile_columns / 2);
  const int64_t x_plane = shape.x_rows * x_columns * kWidth;
  // An odd number of 16 bytes.
  const int64_t dy_row = (tile_columns * kWidth / 16 | 1) * 16;
  const int64_t dy_plane = shape.tile_rows * dy_row;
  const int64_t dy_offset = kHankelChannels * x_plane;
  const int64_t zeros_offset = dy_offset + kHankelChannels * dy_plane;
  params->x_plane_bytes = static_cast<int32_t>(x_plane);
  params->dy_row_bytes = static_cast<int32_t>(dy_row);
  params->dy_plane_bytes = static_cast<int32_t>(dy_plane);
  params->dy_offset = static_cast<int32_t>(dy_offset);
  params->zeros_offset = static_cast<int32_t>(zeros_offset);
  const int64_t taps = HankelRows(instance.row_blocks) * HankelColumns(instance.column_blocks);
  return std::max(zeros_offset + kHankelZeroBytes, taps * kHankelSumPitch * int64_t{sizeof(float)});
}

// Cycles of an SM with `ctas` CTAs for all tiles of an image, a depth and a channel tile.
double Cycles(const HankelInstance& instance, const Shape& shape, const HaloParams& params,
              int64_t ctas, const Gpu& gpu) {
  const RowWork& work = shape.work;
  const auto column_tiles =
      static_cast<double>(CeilDiv(params.axis[2].out, shape.strips * kHankelColumns));
  const auto strips = static_cast<double>(CeilDiv(params.axis[2].out, kHankelColumns));
  const auto column_parts = static_cast<double>(ColumnParts(instance, params));
  const double on_chip =
      std::max(work.products * kProductsOfMma / gpu.mma_sync_per_clock, work.words);
  const double multiply = on_chip * strips * kHankelChannels;
  const double pixels = work.dy_rows * static_cast<double>(shape.strips * kHankelColumns) +
                        work.x_rows * static_cast<double>(PlaneColumns(instance, shape.strips));
  const double bytes_of_cycle = gpu.dram_bytes_per_cycle() * kL2Rate / gpu.sm_count;
  const double fill = pixels * kSectorBytes / bytes_of_cycle * column_tiles;
  // With several CTAs, one loads while another multiplies.
  const auto apart = static_cast<double>(ctas * ctas);
  return (std::max(fill, multiply) + std::min(fill, multiply) / apart) * column_parts;
}

Status ShapeTile(const HankelInstance& instance, const Gpu& gpu, HankelParams* params,
                 Shape* best) {
  const int64_t rows = params->axis[1].out;
  const int64_t most_strips = CeilDiv(params->axis[2].out, kHankelColumns);
  int64_t fewest_bytes = INT64_MAX;
  for (int64_t tile_rows = 1; tile_rows <= std::min(rows, kMostTileRows); ++tile_rows) {
    // Among heights that give equally many tiles, the lowest.
    if (tile_rows > 1 && CeilDiv(rows, tile_rows) == CeilDiv(rows, tile_rows - 1)) continue;
    const RowWork work = WorkOfRows(instance, *params, tile_rows);
    for (int64_t strips = 1; strips <= std::min(most_strips, kMostStrips); ++strips) {
      Shape shape;
      shape.tile_rows = tile_rows;
      shape.strips = strips;
      shape.x_rows = std::max<int64_t>(1, work.most_x_rows);
      HankelParams placed = *params;
      shape.shared_bytes = PlaceTile(instance, shape, &placed);
      fewest_bytes = std::min(fewest_bytes, shape.shared_bytes);
      shape.ctas_of_sm = CtasOfSm(instance.ctas_per_sm, shape.shared_bytes, gpu);
      if (shape.ctas_of_sm == 0) break;
      shape.work = work;
      shape.cycles = Cycles(instance, shape, *params, shape.ctas_of_sm, gpu);
      if (shape.cycles < best->cycles) *best = shape;
    }
  }
  if (best->cycles == HUGE_VAL) {
    return RefuseSharedBytes("the smallest tile needs", fewest_bytes, gpu);
  }
  PlaceTile(instance, *best, params);
  return {};
}

// Microseconds of `ctas` CTAs with `items` items each, in whole CTAs on each SM.
double Microseconds(const HankelInstance& instance, const Shape& shape, const HankelParams& params,
                    int64_t ctas, int64_t items, const Gpu& gpu) {
  const int64_t of_sm = CeilDiv(ctas, gpu.sm_count);
  const double tiles = static_cast<double>(params.axis[1].tiles.divisor) *
                       params.axis[2].tiles.divisor * RowParts(instance, params) *
                       ColumnParts(instance, params);
  const double cycles =
      Cycles(instance, shape, params, std::min(of_sm, shape.ctas_of_sm), gpu) / tiles;
  return static_cast<double>(of_sm * items) * cycles / gpu.cycles_per_us();
}

// The number of slices with the least time, including their sum.
int64_t BestSlices(const HankelInstance& instance, const Shape& shape, const ConvProblem& problem,
                   const HankelParams& params, int64_t ctas_of_slice, const Gpu& gpu) {
  const int64_t bytes_of_slice = problem.w_elements() * int64_t{sizeof(float)};
  const int64_t most = std::max<int64_t>(
      1, std::min({kMostSlices, int64_t{params.items}, kMostWorkspaceBytes / bytes_of_slice}));
  int64_t best = 1;
  double least = HUGE_VAL;
  for (int64_t slices = 1; slices <= most; ++slices) {
    const double us = Microseconds(instance, shape, params, ctas_of_slice * slices,
                                   CeilDiv(params.items, slices), gpu) +
                      2.0 * static_cast<double>(slices * bytes_of_slice) / gpu.dram_bytes_per_us;
    if (us >= least) continue;
    least = us;
    best = slices;
  }
  return best;
}

}  // namespace

Status PlanHankel(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                  int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const HankelInstance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, problem));
  auto launch = std::make_shared<HaloLaunch<HankelParams>>();
  HankelParams& params = launch->kernel;
  DescribeOperands(problem, kernel.dtype, &params);
  Shape shape;
  JAXCONV_RETURN_IF_ERROR(ShapeTile(instance, gpu, &params, &shape));
  launch->shared_bytes = shape.shared_bytes;
  JAXCONV_RETURN_IF_ERROR(CountItems(problem, kHankelChannels, &params));
  params.parts_of_row = static_cast<int32_t>(ColumnParts(instance, params));
  const int64_t parts =
      params.axis[0].taps * RowParts(instance, params) * ColumnParts(instance, params);
  params.tap_parts = static_cast<int32_t>(parts);
  const int64_t ctas_of_slice = params.channel_tiles.divisor * parts * problem.batch;
  if (slices == 0) {
    slices = BestSlices(instance, shape, problem, params, ctas_of_slice, gpu);
  }
  JAXCONV_RETURN_IF_ERROR(
      CutIntoSlices(problem, ctas_of_slice, /*resident=*/1, slices, &params, &launch->ctas, plan));
  launch->out_elements = problem.w_elements();
  launch->out_dtype = problem.output_dtype();
  const double bytes = static_cast<double>(kWidth) *
                       static_cast<double>(problem.x_elements() + problem.y_elements());
  plan->terms.tensor_cores =
      Microseconds(instance, shape, params, launch->ctas, CeilDiv(params.items, plan->slices), gpu);
  plan->terms.dram = bytes / gpu.dram_bytes_per_us;
  plan->terms.launch = 2 * gpu.launch_us;
  plan->form = FormTimeOf("depthwise hankel", OperationsName(problem), "16-bit", gpu);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->kernel = &kernel;
  plan->params = std::move(launch);
  return {};
}

}  // namespace jaxconv::depthwise
