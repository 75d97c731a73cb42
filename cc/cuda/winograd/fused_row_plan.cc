#include "cuda/winograd/fused_row_plan.h"

#include <algorithm>
#include <string>

#include "core/winograd.h"
#include "cuda/common/im2col_box.h"
#include "cuda/winograd/row_filter.h"

namespace jaxconv::winograd {
namespace {

// F(2, 3) and F(4, 3), fitted on an H200 (docs/notes/winograd.md): a CTA's cycles for 16 channels
// of a filter row, the additional cycles of the bfloat16 conversion, and a tile's cycles outside
// the mainloop.
struct RowCycles {
  double step, scaled, tile;
};
constexpr RowCycles kRowCycles[2] = {{353, 75, 2000}, {613, 69, 3400}};

Status CheckFields(const LaunchParams& launch, const RowParams& params, const int32_t* upper) {
  const Im2colLimits& limits = kIm2colLimits[2];
  const int32_t lower[2] = {params.lower_w, params.lower_h};
  const int32_t offset[2] = {params.offset_w + launch.m - 1, params.offset_h + kTaps - 1};
  for (int i = 0; i < 2; ++i) {
    if (lower[i] < limits.lower || upper[i] < limits.lower || upper[i] > limits.upper ||
        offset[i] > limits.offset) {
      return Status::Unimplemented(
          "padding " + std::to_string(i == 0 ? launch.geometry.pad_w : launch.geometry.pad_h) +
          ", wider than TMA's fields");
    }
  }
  return {};
}

}  // namespace

RowParams MakeRowParams(const LaunchParams& launch, int32_t* upper) {
  const Geometry& g = launch.geometry;
  const RowFilter filter(launch.points(), g.cols, g.red);
  RowParams params;
  params.out_is_f32 = launch.out_is_f32;
  params.row_positions = FastDivmod(int64_t{g.tiles_w.divisor} + 1);
  params.rows = FastDivmod(g.out_h);
  params.images = g.images;
  params.width = g.out_w;
  // The box of base pixels begins in the padding or at the first pixel, never inside the tensor;
  // the offsets carry the difference.
  params.lower_w = std::min(0, -g.pad_w);
  params.lower_h = std::min(0, -g.pad_h);
  params.offset_w = -g.pad_w - params.lower_w;
  params.offset_h = -g.pad_h - params.lower_h;
  upper[0] = params.lower_w + static_cast<int32_t>(g.tiles_w.divisor) * launch.m + 1 - g.in_w;
  upper[1] = params.lower_h + g.out_h - g.in_h;
  params.reduction = g.red;
  params.columns = g.cols;
  params.out_channels = g.out_channels();
  const int64_t positions = int64_t{g.images} * g.out_h * params.row_positions.divisor;
  const int64_t m_tiles = CeilDiv(positions, kRowTilePositions * kRowClusterCtas);
  params.n_tiles = FastDivmod(filter.column_blocks);
  params.m_tiles = FastDivmod(m_tiles);
  params.tiles = static_cast<int32_t>(filter.column_blocks * m_tiles * g.groups);
  params.reduction_blocks = static_cast<int32_t>(filter.reduction_blocks);
  params.filter_group = static_cast<int32_t>(filter.elements() * 2 / kFilterRowBytes);
  params.filter_columns = params.filter_group / static_cast<int32_t>(filter.column_blocks);
  return params;
}

Status PlanFusedRow(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                    TimeTerms* terms) {
  const Geometry& g = launch->geometry;
  if (g.groups > 1 && g.red % kRowLoadChannels != 0) {
    return Status::Unimplemented(
        "expected one group, or groups whose channels are a multiple of 64, got " +
        std::to_string(g.red));
  }
  // There are at most 2^26 tiles, so positions (one more in each row) fit in 32 bits, and so do
  // those of a pair of tiles past the last.
  launch->chunk_tiles = g.tiles;
  PlaceWorkspace(/*has_v=*/false, /*has_m=*/false, launch);
  int32_t upper[2];
  const RowParams params = MakeRowParams(*launch, upper);
  JAXCONV_RETURN_IF_ERROR(CheckFields(*launch, params, upper));
  // Persistent: clusters process tiles round-robin.
  const int32_t clusters = std::min(params.tiles, std::max(1, gpu.sm_count / kRowClusterCtas));
  launch->ctas = clusters * kRowClusterCtas;
  const double waves = static_cast<double>(CeilDiv(params.tiles, clusters));
  const RowCycles& of = kRowCycles[instance.m == 2 ? 0 : 1];
  const double step = of.step + (launch->scaled() ? of.scaled : 0);
  const double cycles = waves * (2 * kTaps * params.reduction_blocks * step + of.tile);
  terms->tensor_cores = cycles / gpu.cycles_per_us();
  terms->launch = FilterMicroseconds(*launch, gpu) + gpu.launch_us;
  return {};
}

}  // namespace jaxconv::winograd
