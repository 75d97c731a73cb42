#include "cuda/common/halo_box.h"

#include <algorithm>
#include <string>

namespace jaxconv {
namespace {

// Shared memory that the runtime reserves for each CTA.
constexpr int64_t kReservedBytesOfCta = 1024;
constexpr int64_t kMaxItems = int64_t{1} << 30;
constexpr int64_t kMaxWorkspaceBytes = 64'000'000;
constexpr int64_t kMaxSlices = 1024;

// The number of slices with the least total time of its waves. A larger number must be faster than
// a smaller one by this factor, because the slices must be summed.
constexpr double kFasterBySlices = 0.95;
int64_t ChooseSlices(int64_t parts, int64_t resident, int64_t most) {
  auto time = [&](int64_t slices) {
    return static_cast<double>(CeilDiv(parts * slices, resident)) / static_cast<double>(slices);
  };
  int64_t best = 1;
  for (int64_t slices = 2; slices <= std::min(most, 2 * CeilDiv(resident, parts)); ++slices) {
    if (time(slices) < kFasterBySlices * time(best)) best = slices;
  }
  return best;
}

}  // namespace

void DescribeAxes(const ConvProblem& problem, HaloParams* params) {
  const bool dgrad = problem.op == Op::kDgrad;
  for (int a = 0; a < 3; ++a) {
    Axis& axis = params->axis[a];
    axis.taps = static_cast<int32_t>(problem.filter[a]);
    // A single tap needs no dilation.
    axis.dilation = static_cast<int32_t>(problem.filter[a] > 1 ? problem.dilation[a] : 1);
    axis.in = static_cast<int32_t>(dgrad ? problem.out[a] : problem.in[a]);
    axis.out = static_cast<int32_t>(dgrad ? problem.in[a] : problem.out[a]);
    axis.stride = static_cast<int32_t>(dgrad ? problem.lhs_dilation[a] : problem.stride[a]);
    axis.in_dilation = FastDivmod(dgrad ? problem.stride[a] : problem.lhs_dilation[a]);
    const int64_t reach = (problem.filter[a] - 1) * axis.dilation;
    axis.pad = static_cast<int32_t>(dgrad ? reach - problem.pad_lo[a] : problem.pad_lo[a]);
  }
  params->axis[0].tiles = FastDivmod(params->axis[0].out);
  params->filters = static_cast<int32_t>(problem.batch);
  params->filter_stride = problem.w_elements() / problem.batch;
  params->flip = dgrad;
  params->out_is_f32 = problem.output_dtype() == DType::kF32;
}

Status CheckStride(const ConvProblem& problem, int64_t stride) {
  HaloParams params;
  DescribeAxes(problem, &params);
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  // An axis of extent 1 (rank 1) may have any stride.
  const bool strides = (rows.out == 1 || rows.stride == stride) && columns.stride == stride;
  if (!strides || rows.dilation != 1 || columns.dilation != 1) {
    return Status::Unimplemented("expected stride " + std::to_string(stride) + " and no dilation");
  }
  return {};
}

void HalveBoxes(HaloParams* params) {
  for (int a = 1; a < 3; ++a) {
    Axis& axis = params->axis[a];
    axis.halved = 1;
    axis.in_dilation = FastDivmod(1);
    axis.shift = axis.pad & 1;
  }
}

bool ShapeBox(int64_t tile_rows, int64_t tile_columns, int64_t row_taps, HaloParams* params) {
  Axis &rows = params->axis[1], &columns = params->axis[2];
  auto extent = [](const Axis& axis, int64_t tile, int64_t taps) {
    return (((tile - 1) * axis.stride + (taps - 1) * axis.dilation) >> axis.halved) + 1;
  };
  const int64_t box_rows = extent(rows, tile_rows, row_taps);
  const int64_t box_columns = extent(columns, tile_columns, columns.taps);
  if (std::max(box_rows, box_columns) > INT16_MAX) return false;
  rows.tile = static_cast<int32_t>(tile_rows);
  columns.tile = static_cast<int32_t>(tile_columns);
  rows.box = static_cast<int32_t>(box_rows);
  columns.box = static_cast<int32_t>(box_columns);
  rows.tiles = FastDivmod(CeilDiv(int64_t{rows.out} + rows.shift, tile_rows));
  columns.tiles = FastDivmod(CeilDiv(int64_t{columns.out} + columns.shift, tile_columns));
  params->box_columns = FastDivmod(box_columns);
  params->tile_columns = FastDivmod(tile_columns);
  return true;
}

Status CountItems(const ConvProblem& problem, int64_t tile_channels, HaloParams* params) {
  const bool wgrad = problem.op == Op::kWgrad;
  const int64_t channel_tiles = CeilDiv(params->channels, tile_channels);
  // In wgrad each filter of a batch has its own CTAs.
  const int64_t images = (wgrad ? 1 : problem.batch) * problem.n;
  const int64_t image_tiles = CeilDiv(images, params->tile_images);
  int64_t tiles = 1;
  for (const Axis& axis : params->axis) tiles *= axis.tiles.divisor;
  if (image_tiles * tiles * channel_tiles * problem.batch > kMaxItems) {
    return Status::Unimplemented("more than 2^30 tiles");
  }
  params->channel_tiles = FastDivmod(channel_tiles);
  params->images = static_cast<int32_t>(images);
  params->image_tiles = FastDivmod(image_tiles);
  params->images_divmod = FastDivmod(problem.n);
  params->items = static_cast<int32_t>(image_tiles * tiles * (wgrad ? 1 : channel_tiles));
  return {};
}

int64_t ShareItems(int64_t resident, HaloParams* params) {
  const int64_t ctas = std::max<int64_t>(1, std::min<int64_t>(resident, params->items));
  params->items_of_cta = static_cast<int32_t>(params->items / ctas);
  params->longer_ctas = static_cast<int32_t>(params->items % ctas);
  return ctas;
}

Status CutIntoSlices(const ConvProblem& problem, int64_t parts, int64_t resident, int64_t slices,
                     HaloParams* params, int64_t* ctas, Plan* plan, int64_t min_items) {
  if (slices < 0 || slices > params->items) {
    return Status::InvalidArgument("slices: expected 1 to " + std::to_string(params->items) +
                                   ", got " + std::to_string(slices));
  }
  const int64_t bytes_of_slice = problem.w_elements() * int64_t{sizeof(float)};
  const int64_t most = std::max<int64_t>(
      1, std::min({kMaxSlices, params->items / min_items, kMaxWorkspaceBytes / bytes_of_slice}));
  plan->slices = slices > 0 ? slices : ChooseSlices(parts, resident, most);
  plan->workspace_bytes = plan->slices * bytes_of_slice;
  params->slices = static_cast<int32_t>(plan->slices);
  *ctas = parts * plan->slices;
  return {};
}

int64_t CtasOfSm(int64_t most, int64_t shared_bytes, const Gpu& gpu) {
  return std::min(most, (gpu.smem_per_block_optin + kReservedBytesOfCta) /
                            (shared_bytes + kReservedBytesOfCta));
}

}  // namespace jaxconv
