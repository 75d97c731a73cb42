#include "cuda/depthwise/walk.h"

#include <algorithm>
#include <string>

namespace jaxconv::depthwise {
namespace {

// Shared memory that the runtime keeps for each CTA.
constexpr int64_t kReservedBytesOfCta = 1024;
constexpr int64_t kMaxItems = int64_t{1} << 30;

}  // namespace

Walk MakeWalk(const ConvProblem& problem) {
  const bool dgrad = problem.op == Op::kDgrad;
  Walk walk;
  for (int a = 0; a < 3; ++a) {
    Axis& axis = walk.axis[a];
    axis.taps = static_cast<int32_t>(problem.filter[a]);
    // One tap has no distance to the next.
    axis.dilation = static_cast<int32_t>(problem.filter[a] > 1 ? problem.dilation[a] : 1);
    axis.in = static_cast<int32_t>(dgrad ? problem.out[a] : problem.in[a]);
    axis.out = static_cast<int32_t>(dgrad ? problem.in[a] : problem.out[a]);
    axis.stride = static_cast<int32_t>(dgrad ? problem.lhs_dilation[a] : problem.stride[a]);
    axis.in_dilation = FastDivmod(dgrad ? problem.stride[a] : problem.lhs_dilation[a]);
    const int64_t reach = (problem.filter[a] - 1) * axis.dilation;
    axis.pad = static_cast<int32_t>(dgrad ? reach - problem.pad_lo[a] : problem.pad_lo[a]);
  }
  const int64_t multiplier = problem.k / problem.c;
  walk.channels = dgrad ? problem.c : problem.k;
  walk.gathered_channels = dgrad ? problem.k : problem.c;
  walk.repeat = dgrad ? 1 : multiplier;
  walk.reduce = dgrad ? multiplier : 1;
  return walk;
}

Status CheckOperands(const KernelDesc& kernel, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, problem, /*tf32=*/false));
  if (problem.filter_layout != FilterLayout::kRsck &&
      problem.filter_layout != FilterLayout::kKrsc) {
    return Status::Unimplemented(std::string("reads filters stored as rsck or krsc, got ") +
                                 Name(problem.filter_layout));
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireInt32());
  if (problem.groups != problem.c) {
    return Status::Unimplemented("expected one input channel in a group, got " +
                                 std::to_string(problem.c_per_group()));
  }
  return {};
}

Status CheckStride(const Walk& walk, int64_t stride) {
  const Axis &rows = walk.axis[1], &columns = walk.axis[2];
  // An axis without extent, as of rank 1, may have any stride.
  const bool strides = (rows.out == 1 || rows.stride == stride) && columns.stride == stride;
  if (!strides || rows.dilation != 1 || columns.dilation != 1) {
    return Status::Unimplemented("expected stride " + std::to_string(stride) + " and no dilation");
  }
  return {};
}

void DescribeOperands(const ConvProblem& problem, const Walk& walk, DType dtype, Params* params) {
  for (int a = 0; a < 3; ++a) params->axis[a] = walk.axis[a];
  params->axis[0].tiles = FastDivmod(walk.axis[0].out);
  params->channels = static_cast<int32_t>(walk.channels);
  params->gathered_channels = static_cast<int32_t>(walk.gathered_channels);
  params->repeat = FastDivmod(walk.repeat);
  params->reduce = static_cast<int32_t>(walk.reduce);
  params->vector =
      walk.repeat == 1 && walk.reduce == 1 && walk.channels * ByteWidth(dtype) % 16 == 0;
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  params->tap_stride = static_cast<int32_t>(krsc ? 1 : problem.k);
  params->channel_stride = static_cast<int32_t>(krsc ? problem.taps() : 1);
  params->filter_stride = problem.taps() * problem.k;
  params->filters = static_cast<int32_t>(problem.batch);
  params->flip = problem.op == Op::kDgrad;
  params->out_is_f32 = problem.output_dtype() == DType::kF32;
}

Status CountItems(const ConvProblem& problem, int64_t tile_channels, Params* params,
                  int64_t* of_channels) {
  const int64_t channel_tiles = CeilDiv(params->channels, tile_channels);
  // wgrad's filters have CTAs of their own.
  const int64_t images = (problem.op == Op::kWgrad ? 1 : problem.batch) * problem.n;
  int64_t tiles = 1;
  for (const Axis& axis : params->axis) tiles *= axis.tiles.divisor;
  params->channel_tiles = FastDivmod(channel_tiles);
  params->images = static_cast<int32_t>(images);
  params->images_divmod = FastDivmod(problem.n);
  *of_channels = images * tiles;
  if (*of_channels * channel_tiles * problem.batch > kMaxItems) {
    return Status::Unimplemented("more than 2^30 tiles");
  }
  return {};
}

int64_t CtasOfSm(int64_t most, int64_t shared_bytes, const Gpu& gpu) {
  return std::min(most, (gpu.smem_per_block_optin + kReservedBytesOfCta) /
                            (shared_bytes + kReservedBytesOfCta));
}

}  // namespace jaxconv::depthwise
