#include "cuda/winograd/plan.h"

#include <algorithm>
#include <memory>
#include <string>

#include "core/winograd.h"
#include "cuda/common/instances.h"
#include "cuda/winograd/form_plan.h"
#include "cuda/winograd/four_stage_plan.h"
#include "cuda/winograd/fused_row_plan.h"
#include "cuda/winograd/params.h"
#include "cuda/winograd/pkf_plan.h"
#include "cuda/winograd/products_plan.h"

namespace jaxconv::winograd {
namespace {

// So that an element's offset within its tile's row fits in 32 bits: tiles have at most eight
// columns.
constexpr int64_t kMaxChannels = int64_t{1} << 27;

// The layout of a filter that was prepared for the instance.
FilterLayout PreparedLayout(const Instance& instance) {
  if (instance.axes == 1) return FilterLayout::kWinograd4x3;
  return instance.m == 2   ? FilterLayout::kWinograd2
         : instance.m == 4 ? FilterLayout::kWinograd4
                           : FilterLayout::kWinograd6;
}

Status CheckFilter(const KernelDesc& kernel, const Instance& instance, const ConvProblem& problem) {
  ConvProblem plain = problem;
  if (WinogradPoints(problem.filter_layout) > 0) {
    const FilterLayout wanted = PreparedLayout(instance);
    if (problem.filter_layout != wanted || (instance.axes == 1 && instance.m != 4)) {
      return Refuse("a filter prepared for the instance's tile", Name(problem.filter_layout));
    }
    // The record holds float16 for every operand type.
    plain.filter_layout = FilterLayout::kRsck;
    plain.w_dtype = kernel.dtype;
  }
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, plain, /*tf32=*/false));
  if (kernel.dtype == DType::kF32 && problem.precision != Precision::kDefault) {
    return Status::Unimplemented(
        std::string("multiplies float32 rounded to 11 bits, as TF32 does; precision ") +
        Name(problem.precision) + " asks for more");
  }
  return {};
}

Status CheckWindow(const ConvProblem& problem) {
  if (problem.rank != 2) return Refuse("2 spatial axes", problem.rank);
  if (problem.batch != 1) return Refuse("one batch", problem.batch);
  for (int a = 1; a < 3; ++a) {
    if (problem.filter[a] != kTaps) return Refuse("a 3x3 filter, extent 3", problem.filter[a]);
    if (problem.stride[a] != 1) return Refuse("stride 1", problem.stride[a]);
    if (problem.lhs_dilation[a] != 1) return Refuse("no lhs_dilation", problem.lhs_dilation[a]);
    if (problem.dilation[a] != 1) return Refuse("no dilation", problem.dilation[a]);
  }
  if (problem.c_per_group() % 8 != 0) {
    return Refuse("C/groups in multiples of 8", problem.c_per_group());
  }
  if (problem.k_per_group() % 8 != 0) {
    return Refuse("K/groups in multiples of 8", problem.k_per_group());
  }
  if (std::max(problem.c, problem.k) > kMaxChannels)
    return Refuse("at most 2^27 channels", std::max(problem.c, problem.k));
  return problem.RequireInt32();
}

Status DescribeGeometry(const ConvProblem& problem, const Instance& instance, Geometry* geometry) {
  const bool dgrad = problem.op == Op::kDgrad;
  const Spatial& in = dgrad ? problem.out : problem.in;
  const Spatial& out = dgrad ? problem.in : problem.out;
  auto padding = [&](int a) {
    return static_cast<int32_t>(dgrad ? kTaps - 1 - problem.pad_lo[a] : problem.pad_lo[a]);
  };
  Geometry& g = *geometry;
  g.images = static_cast<int32_t>(problem.n);
  g.in_h = static_cast<int32_t>(in[1]);
  g.in_w = static_cast<int32_t>(in[2]);
  g.out_h = static_cast<int32_t>(out[1]);
  g.out_w = static_cast<int32_t>(out[2]);
  g.pad_h = padding(1);
  g.pad_w = padding(2);
  g.groups = static_cast<int32_t>(problem.groups);
  g.red = static_cast<int32_t>(dgrad ? problem.k_per_group() : problem.c_per_group());
  g.cols = static_cast<int32_t>(dgrad ? problem.c_per_group() : problem.k_per_group());
  const int64_t tiles_h = instance.axes == 1 ? out[1] : CeilDiv(out[1], instance.m);
  const int64_t tiles_w = CeilDiv(out[2], instance.m);
  g.tiles_h = FastDivmod(tiles_h);
  g.tiles_w = FastDivmod(tiles_w);
  const int64_t tiles = problem.n * tiles_h * tiles_w;  // at most the number of pixels, which
                                                        // RequireInt32 has tested
  g.tiles = static_cast<int32_t>(tiles);
  // Kernels count pairs of channels of a block of 64 over the tiles, and CTAs of any tile, in 32
  // bits.
  constexpr int64_t kMaxTiles = int64_t{1} << 26;
  if (tiles >= kMaxTiles) return Refuse("less than 2^26 tiles", tiles);
  return {};
}

FilterStrides DescribeFilter(const ConvProblem& problem) {
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  const int64_t c = problem.c_per_group(), k = problem.k;
  const int64_t c_stride = krsc ? 1 : k, k_stride = krsc ? kTaps * kTaps * c : 1;
  FilterStrides filter;
  filter.s = krsc ? c : c * k;
  filter.r = kTaps * filter.s;
  filter.group = problem.k_per_group() * k_stride;
  const bool dgrad = problem.op == Op::kDgrad;
  filter.red = dgrad ? k_stride : c_stride;
  filter.col = dgrad ? c_stride : k_stride;
  if (dgrad) {
    filter.first = (kTaps - 1) * (filter.r + filter.s);
    filter.r = -filter.r;
    filter.s = -filter.s;
  }
  return filter;
}

// The form of the calibration. Products are of 16 bits for all operand types.
std::string_view FormOf(const Instance& instance) {
  if (instance.plan == PlanPingpong || instance.plan == PlanPingpongHalf) {
    return "winograd pingpong";
  }
  return instance.plan == PlanFusedRow ? "winograd rows" : "winograd";
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(CheckFilter(kernel, instance, problem));
  JAXCONV_RETURN_IF_ERROR(CheckWindow(problem));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  auto launch = std::make_shared<LaunchParams>();
  JAXCONV_RETURN_IF_ERROR(DescribeGeometry(problem, instance, &launch->geometry));
  launch->filter = DescribeFilter(problem);
  launch->m = instance.m;
  launch->one_dimensional = instance.axes == 1;
  launch->prepared = WinogradPoints(problem.filter_layout) > 0;
  launch->out_is_f32 = problem.output_dtype() == DType::kF32;
  launch->forward = problem.op == Op::kFprop;
  launch->dtype = kernel.dtype;
  launch->in_elements = problem.op == Op::kFprop ? problem.x_elements() : problem.y_elements();
  launch->filter_elements = problem.w_elements();
  plan->kernel = &kernel;
  plan->slices = 1;
  JAXCONV_RETURN_IF_ERROR(instance.plan(instance, gpu, launch.get(), &plan->terms));
  plan->form = FormTimeOf(FormOf(instance), "fprop, dgrad", "16-bit", gpu);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->workspace_bytes = launch->workspace.bytes;
  plan->params = std::move(launch);
  return {};
}

constexpr int MaxCapability(const Instance& instance) {
  return instance.capability == 90 ? 90 : 1000;
}

// Instances with float16 products have no alias: their error exceeds the one documented for the
// tile.
const char* Alias(const Instance& instance) {
  if (instance.plan == PlanPingpongHalf) return "";
  if (instance.axes == 1) {
    return instance.m == 2 ? "winograd_f2x3" : instance.m == 4 ? "winograd_f4x3" : "winograd_f6x3";
  }
  return instance.m == 2 ? "winograd_f2x2" : instance.m == 4 ? "winograd_f4x4" : "winograd_f6x6";
}

// The line of each form of kernels.def, from its arguments, the outputs of a tile along an axis
// first.
constexpr Instance FourStageLine(int32_t m, int32_t tile_m, int32_t tile_n, int32_t ctas_per_sm) {
  return {PlanFourStage, m, /*axes=*/2, /*capability=*/80, tile_m, tile_n, ctas_per_sm};
}
constexpr Instance ChunkedLine(int32_t m, int32_t tile_m, int32_t tile_n, int32_t ctas_per_sm) {
  return {PlanChunked, m, /*axes=*/2, /*capability=*/80, tile_m, tile_n, ctas_per_sm};
}
constexpr Instance FourStagePingpongLine(int32_t m, bool half_products = false,
                                         int32_t columns = 128) {
  const FormPlan plan = half_products ? PlanPingpongHalf : PlanPingpong;
  return {plan, m, /*axes=*/2, /*capability=*/90, 128, columns, /*ctas_per_sm=*/1};
}
constexpr Instance FusedRowLine(int32_t m) {
  return {PlanFusedRow, m, /*axes=*/1, /*capability=*/90, 64, 128, /*ctas_per_sm=*/1};
}
constexpr Instance SyncFreeLine(int32_t m, int32_t tile_m, int32_t tile_n) {
  return {PlanSyncFree, m, /*axes=*/2, /*capability=*/80, tile_m, tile_n, /*ctas_per_sm=*/2};
}
constexpr Instance PkfLlcLine(int32_t m, int32_t tile_m, int32_t tile_n) {
  return {PlanPkfLlc, m, /*axes=*/2, /*capability=*/80, tile_m, tile_n, /*ctas_per_sm=*/2};
}
constexpr Instance PkfShmemLine(int32_t m, int32_t tile_m, int32_t warp_n, int32_t parts,
                                int32_t /*set_blocks*/, int32_t ctas_per_sm) {
  return {PlanPkfShmem, m, /*axes=*/2, /*capability=*/80, tile_m, warp_n * parts, ctas_per_sm};
}
constexpr Instance ElementwiseLine(int32_t m) {
  return {PlanElementwise, m, /*axes=*/2, /*capability=*/80, 8, 16, /*ctas_per_sm=*/3};
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments)                   \
  JAXCONV_ADD_KERNELS(all, ops, types, winograd, variant, instance.capability, \
                      MaxCapability(instance), MakePlan, Instance, form##Line arguments)
#include "cuda/winograd/kernels.def"
  for (KernelDesc& kernel : all) {
    kernel.alias = Alias(*static_cast<const Instance*>(kernel.instance));
    kernel.on_request = true;
  }
  return all;
}

}  // namespace jaxconv::winograd
