#include "cuda/depthwise/toeplitz_wgmma_plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/common/predicted_time.h"
#include "cuda/common/rates.h"
#include "cuda/depthwise/operands.h"

namespace jaxconv::depthwise {
namespace {

constexpr int64_t kWidth = 2;  // bytes of an element
constexpr int64_t kMostBlocks = 8, kMostProducts = 2;
// Rows y that complete no output.
constexpr int64_t kIncompleteRows = kBandStep - 1;
// Multiply-adds of one m64n256k16.
constexpr int64_t kProducts = kWgmmaRows * 256 * kWgmmaReduced;
// Fitted to seven times on an H200, for 5 and 3 blocks (docs/notes/depthwise.md). SM cycles for the
// load and store of a pixel, and for a tile.
constexpr double kPixelCycles = 7.6, kTileCycles = 4480;

Status Check(const KernelDesc& kernel, const ToeplitzWgmmaInstance& instance,
             const ConvProblem& problem, const ToeplitzWgmmaParams& params) {
  JAXCONV_RETURN_IF_ERROR(CheckOperands(kernel, problem));
  if (problem.k != problem.c || problem.c % kBandChannels != 0) {
    return Status::Unimplemented("expected K = C in multiples of 8, got K " +
                                 std::to_string(problem.k) + " and C " + std::to_string(problem.c));
  }
  if (problem.in[0] != 1 || problem.out[0] != 1) {
    return Status::Unimplemented("expected tensors without a depth");
  }
  if (params.out_is_f32) {
    return Status::Unimplemented("stores results of the operands' type");
  }
  JAXCONV_RETURN_IF_ERROR(CheckStride(problem, 1));
  for (int a = 1; a < 3; ++a) {
    if (params.axis[a].in_dilation.divisor != 1) {
      return Status::Unimplemented("expected inputs without dilation");
    }
  }
  const int64_t most_rows = 2 * kBandStep * instance.step_pairs;
  const int64_t most_columns = BandFilterColumns(instance.chunks);
  const int64_t halo = 8 * BandHalo(instance.chunks);
  const Axis& columns = params.axis[2];
  if (problem.filter[1] > most_rows || problem.filter[2] > most_columns) {
    return Status::Unimplemented("expected a filter of at most " + std::to_string(most_rows) +
                                 " rows and " + std::to_string(most_columns) + " columns, got " +
                                 std::to_string(problem.filter[1]) + "x" +
                                 std::to_string(problem.filter[2]));
  }
  if (columns.pad < 0 || columns.pad > halo || columns.taps - columns.pad > halo + 1) {
    return Status::Unimplemented("expected windows of up to " + std::to_string(halo) +
                                 " columns on either side of a pixel, got " +
                                 std::to_string(columns.pad) + " and " +
                                 std::to_string(columns.taps - columns.pad - 1));
  }
  if (std::max(columns.in, columns.out) > 8 * kMostBlocks) {
    return Status::Unimplemented("expected maps of at most " + std::to_string(8 * kMostBlocks) +
                                 " columns, got " +
                                 std::to_string(std::max(columns.in, columns.out)));
  }
  return {};
}

// Divides the rows into tiles of `products` products and places the parts in shared memory; returns
// their bytes.
int64_t ShapeTile(const ToeplitzWgmmaInstance& instance, int64_t products,
                  ToeplitzWgmmaParams* params) {
  Axis &rows = params->axis[1], &columns = params->axis[2];
  const int64_t most = products * kBandRows - kIncompleteRows;
  const int64_t tiles = CeilDiv(int64_t{rows.out}, most);
  const int64_t tile_rows = CeilDiv(int64_t{rows.out}, tiles);
  rows.tile = static_cast<int32_t>(tile_rows);
  rows.box = static_cast<int32_t>(tile_rows + rows.taps - 1);
  rows.tiles = FastDivmod(tiles);
  columns.tile = columns.out;
  columns.tiles = FastDivmod(1);
  const int64_t blocks = CeilDiv(int64_t{std::max(columns.in, columns.out)}, 8);
  params->products = static_cast<int32_t>(products);
  params->blocks = FastDivmod(blocks);
  params->box_columns = FastDivmod(columns.in);
  const int64_t plane_rows = products * kBandRows + (2 * instance.step_pairs - 1) * kBandStep;
  const int64_t row_bytes = (blocks + BandHalo(instance.chunks)) * 16;
  // The last row is followed by its right border and by the blocks past the map that its product
  // reads. The plane pitch is 16 bytes modulo 128.
  const int64_t plane_bytes = CeilDiv((plane_rows + 1) * row_bytes - 16, 128) * 128 + 16;
  params->plane_rows = static_cast<int32_t>(plane_rows);
  params->row_bytes = static_cast<int32_t>(row_bytes);
  params->plane_bytes = static_cast<int32_t>(plane_bytes);
  const int64_t beyond = (kMostBlocks + instance.chunks) * 16;
  const int64_t box_offset = CeilDiv(kBandChannels * plane_bytes + beyond, 128) * 128;
  const int64_t box_bytes = std::min(rows.box, rows.in) * blocks * 8 * kBandChannels * kWidth;
  const int64_t band_offset = box_offset + box_bytes;
  const int64_t band_bytes =
      kBandChannels * 2 * kBandStep * instance.step_pairs * BandRowTaps(instance.chunks) * kWidth;
  params->box_offset = static_cast<int32_t>(box_offset);
  params->band_offset = static_cast<int32_t>(band_offset);
  params->sums_offset = static_cast<int32_t>(band_offset + band_bytes);
  return band_offset + band_bytes + kBandWarpgroups * 2 * kBandPassBytes;
}

// Cycles of an SM for a tile.
double CyclesOfTile(const ToeplitzWgmmaInstance& instance, const ToeplitzWgmmaParams& params,
                    const Gpu& gpu) {
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const double read = static_cast<double>(std::min(rows.box, rows.in)) * columns.in;
  const double stored = static_cast<double>(rows.tile) * columns.out;
  const double product =
      static_cast<double>(instance.chunks * instance.step_pairs * kProducts) / gpu.wgmma_per_clock;
  return kTileCycles + kPixelCycles * (read + stored) / 2 +
         static_cast<double>(kBandChannels * params.products) * product;
}

}  // namespace

Status PlanToeplitzWgmma(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                         int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const ToeplitzWgmmaInstance*>(kernel.instance);
  auto launch = std::make_shared<HaloLaunch<ToeplitzWgmmaParams>>();
  ToeplitzWgmmaParams& params = launch->kernel;
  DescribeOperands(problem, kernel.dtype, &params);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem, params));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  params.tap_stride = static_cast<int32_t>(krsc ? 1 : problem.k);
  params.channel_stride = static_cast<int32_t>(krsc ? problem.taps() : 1);
  double cycles = HUGE_VAL;
  int64_t fewest_bytes = INT64_MAX;
  ToeplitzWgmmaParams best;
  for (int64_t products = 1; products <= kMostProducts; ++products) {
    ToeplitzWgmmaParams shape = params;
    const int64_t bytes = ShapeTile(instance, products, &shape);
    fewest_bytes = std::min(fewest_bytes, bytes);
    if (CtasOfSm(1, bytes, gpu) == 0) continue;
    JAXCONV_RETURN_IF_ERROR(CountItems(problem, kBandChannels, &shape));
    const double work = static_cast<double>(CeilDiv(int64_t{shape.items}, gpu.sm_count)) *
                        CyclesOfTile(instance, shape, gpu);
    if (work >= cycles) continue;
    cycles = work;
    launch->shared_bytes = bytes;
    best = shape;
  }
  if (cycles == HUGE_VAL) return RefuseSharedBytes("the smallest tile needs", fewest_bytes, gpu);
  params = best;
  launch->ctas = ShareItems(gpu.sm_count, &params);
  launch->out_dtype = problem.output_dtype();
  const double bytes = static_cast<double>(kWidth) *
                       static_cast<double>(problem.x_elements() + problem.y_elements());
  plan->terms.tensor_cores = cycles / gpu.cycles_per_us();
  plan->terms.dram = bytes / gpu.dram_bytes_per_us;
  plan->terms.launch = gpu.launch_us;
  plan->form = FormTimeOf("depthwise toeplitz wgmma", OperationsName(problem), "16-bit", gpu);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->kernel = &kernel;
  plan->slices = 1;
  plan->params = std::move(launch);
  return {};
}

}  // namespace jaxconv::depthwise
