#include "cuda/depthwise/toeplitz_plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/common/predicted_time.h"
#include "cuda/common/rates.h"
#include "cuda/depthwise/operands.h"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/toeplitz_tile.h"

namespace jaxconv::depthwise {
namespace {

constexpr int64_t kWidth = 2;  // bytes of an element
constexpr int64_t kMostPieces = 4;
constexpr int64_t kMatricesOfLoad = 4;  // of ldmatrix
// A box passes through shared memory: it is written, read, and written to the planes.
constexpr int64_t kPasses = 3;

Status Check(const KernelDesc& kernel, const ToeplitzInstance& instance,
             const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckOperands(kernel, problem));
  if (problem.k != problem.c) {
    return Status::Unimplemented("expected K = C, got K " + std::to_string(problem.k) + " and C " +
                                 std::to_string(problem.c));
  }
  if (problem.c % 8 != 0) {
    return Status::Unimplemented("expected channels in multiples of 8, got " +
                                 std::to_string(problem.c));
  }
  const int64_t most = ToeplitzFilterColumns(instance.blocks);
  if (problem.filter[2] > most) {
    return Status::Unimplemented("expected a filter of at most " + std::to_string(most) +
                                 " columns, got " + std::to_string(problem.filter[2]));
  }
  return CheckStride(problem, 1);
}

int64_t BandBytes(const ToeplitzInstance& instance, const Params& params) {
  return int64_t{instance.channels} * params.axis[1].taps * 2 * BandTaps(instance.blocks) * kWidth;
}

// Places the parts of a tile of down x across strips in shared memory; returns their bytes.
int64_t PlaceTile(const ToeplitzInstance& instance, int64_t across, int64_t down, int64_t pieces,
                  Params* params) {
  Axis &rows = params->axis[1], &columns = params->axis[2];
  const int64_t strip_columns = StripColumns(instance.products);
  const int64_t tile_rows = down * kStripRows, tile_columns = across * strip_columns;
  const int64_t box_rows = tile_rows + rows.taps - 1;
  const int64_t box_columns =
      tile_columns - strip_columns + 8 * ToeplitzMatrices(instance.blocks, instance.products);
  params->blocks_across = static_cast<int32_t>(across);
  params->blocks_down = static_cast<int32_t>(down);
  params->strips_across = FastDivmod(across);
  rows.tile = static_cast<int32_t>(tile_rows);
  columns.tile = static_cast<int32_t>(tile_columns);
  rows.box = static_cast<int32_t>(box_rows);
  columns.box = static_cast<int32_t>(box_columns);
  rows.tiles = FastDivmod(CeilDiv(rows.out, tile_rows));
  columns.tiles = FastDivmod(CeilDiv(columns.out, tile_columns));
  params->box_columns = FastDivmod(box_columns);
  // An odd number of 16 bytes; 16 bytes more than a multiple of 128.
  const int64_t row_bytes = (box_columns / 8 | 1) * 16;
  const int64_t plane_bytes = CeilDiv(box_rows * row_bytes - 16, 128) * 128 + 16;
  params->plane_row_bytes = static_cast<int32_t>(row_bytes);
  params->plane_bytes = static_cast<int32_t>(plane_bytes);
  const int64_t stage_rows = CeilDiv(box_rows, pieces);
  params->stage_rows = static_cast<int32_t>(stage_rows);
  const int64_t stage_bytes = stage_rows * box_columns * instance.channels * kWidth;
  params->stage_bytes = static_cast<int32_t>(stage_bytes);
  const int64_t band_offset = stage_bytes + instance.channels * plane_bytes;
  params->band_offset = static_cast<int32_t>(band_offset);
  return band_offset + BandBytes(instance, *params);
}

// Cycles of an SM for one depth tap of an item, with `ctas` CTAs on the SM: the busy cycles of its
// schedulers, shared memory or tensor cores for the products, and those of copies.
double CyclesOfItem(const ToeplitzInstance& instance, const Params& params, int64_t ctas,
                    const Gpu& gpu) {
  const int64_t warps =
      int64_t{params.blocks_across} * params.blocks_down * (instance.channels / 8);
  const int64_t resident = warps * ctas;
  const int64_t matrices = ToeplitzMatrices(instance.blocks, instance.products);
  const int64_t products = instance.products * ToeplitzInstructions(instance.blocks);

  const auto row_steps = static_cast<double>(warps * kMmaColumns * params.axis[1].taps);
  // The schedulers with the most warps finish last.
  const double uneven = static_cast<double>(CeilDiv(resident, kSchedulers) * kSchedulers) /
                        static_cast<double>(resident);
  const double tensor =
      row_steps * static_cast<double>(products) * uneven * kProductsOfMma / gpu.mma_sync_per_clock;
  const double loads = row_steps * static_cast<double>(matrices + instance.blocks);
  // Products, words of the band and their copies, loads of pixels.
  const int64_t instructions = products + 2 * instance.blocks + CeilDiv(matrices, kMatricesOfLoad);
  const double multiply = row_steps * static_cast<double>(instructions) / kSchedulers;

  const int64_t pieces = CeilDiv(params.axis[1].box, params.stage_rows);
  const double copies =
      static_cast<double>(kPasses * pieces * params.stage_bytes) / kSharedBytesPerCycle;
  if (ctas == 1) return std::max({tensor, loads, multiply}) + copies;
  // A CTA multiplies while another copies.
  return std::max({tensor, loads + copies, multiply});
}

// Chooses the tile shape with the fewest cycles. `planes`: images x channel tiles x depths, each
// tiled alike.
Status ShapeTile(const ToeplitzInstance& instance, int64_t planes, const Gpu& gpu, Params* params,
                 int64_t* shared_bytes, double* cycles) {
  const int64_t strips = kWarps / (instance.channels / 8);
  // Kernels with two CTAs on an SM copy the whole box at once (Toeplitz::kPieces).
  const int64_t most_pieces = instance.ctas_per_sm == 1 ? kMostPieces : 1;
  *cycles = HUGE_VAL;
  int64_t fewest_bytes = INT64_MAX;
  Params best;
  for (int64_t across = 1; across <= strips; ++across) {
    for (int64_t i = 0; i < strips / across * most_pieces; ++i) {
      const int64_t down = i / most_pieces + 1;
      Params shape = *params;
      const int64_t bytes = PlaceTile(instance, across, down, i % most_pieces + 1, &shape);
      fewest_bytes = std::min(fewest_bytes, bytes);
      const int64_t ctas = CtasOfSm(instance.ctas_per_sm, bytes, gpu);
      if (ctas == 0) continue;
      const int64_t items = planes * shape.axis[1].tiles.divisor * shape.axis[2].tiles.divisor;
      const int64_t rounds = CeilDiv(items, gpu.sm_count * ctas);
      const double work = static_cast<double>(rounds * ctas * params->axis[0].taps) *
                          CyclesOfItem(instance, shape, ctas, gpu);
      if (work >= *cycles) continue;
      *cycles = work;
      *shared_bytes = bytes;
      best = shape;
    }
  }
  if (*cycles == HUGE_VAL) {
    return RefuseSharedBytes("the smallest tile needs", fewest_bytes, gpu);
  }
  *params = best;
  return {};
}

}  // namespace

Status PlanToeplitz(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                    int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const ToeplitzInstance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  DescribeOperands(problem, kernel.dtype, &params);
  const int64_t planes =
      problem.batch * problem.n * CeilDiv(params.channels, instance.channels) * params.axis[0].out;
  double cycles;
  JAXCONV_RETURN_IF_ERROR(
      ShapeTile(instance, planes, gpu, &params, &launch->shared_bytes, &cycles));
  JAXCONV_RETURN_IF_ERROR(CountItems(problem, instance.channels, &params));
  launch->ctas =
      ShareItems(gpu.sm_count * CtasOfSm(instance.ctas_per_sm, launch->shared_bytes, gpu), &params);
  launch->out_dtype = problem.output_dtype();
  const double bytes = static_cast<double>(kWidth) *
                       static_cast<double>(problem.x_elements() + problem.y_elements());
  // Bands of up to 17 columns reach a smaller share of the rates than those of 33.
  constexpr int64_t kNarrowBlocks = 3;
  plan->terms.tensor_cores = cycles / gpu.cycles_per_us();
  plan->terms.dram = bytes / gpu.dram_bytes_per_us;
  plan->terms.launch = gpu.launch_us;
  plan->form = FormTimeOf(
      instance.blocks <= kNarrowBlocks ? "depthwise toeplitz 17" : "depthwise toeplitz 33",
      OperationsName(problem), "16-bit", gpu);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->kernel = &kernel;
  plan->slices = 1;
  plan->params = std::move(launch);
  return {};
}

}  // namespace jaxconv::depthwise
