#include "cuda/winograd_int8/plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "cuda/common/instances.h"
#include "cuda/common/rates.h"
#include "cuda/winograd_int8/matrices.h"
#include "cuda/winograd_int8/params.h"

namespace jaxconv::winograd_int8 {
namespace {

// The argument of a line of kernels.def.
struct Instance {
  int m;  // outputs of a tile along an axis
};

constexpr int64_t kAlignment = 1024;
// M times its power of two is below 2^15, hence below float16's largest number.
constexpr int kHalfExponent = 15;
constexpr int64_t kMaxTiles = int64_t{1} << 26;

Status CheckProblem(const KernelDesc& kernel, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckInt8Types(kernel, problem));
  if (problem.rank != 2) return Refuse("2 spatial axes", problem.rank);
  if (problem.batch != 1) return Refuse("one batch", problem.batch);
  if (problem.groups != 1) return Refuse("one group", problem.groups);
  for (int a = 1; a < 3; ++a) {
    if (problem.filter[a] != kTaps) return Refuse("a 3x3 filter, extent 3", problem.filter[a]);
    if (problem.stride[a] != 1) return Refuse("stride 1", problem.stride[a]);
    if (problem.lhs_dilation[a] != 1) return Refuse("no lhs_dilation", problem.lhs_dilation[a]);
    if (problem.dilation[a] != 1) return Refuse("no dilation", problem.dilation[a]);
  }
  if (problem.c % 32 != 0) return Refuse("C in multiples of 32", problem.c);
  if (problem.k % 32 != 0) return Refuse("K in multiples of 32", problem.k);
  return problem.RequireInt32();
}

template <int m>
void SetUnits(Rows* input, Rows* filter) {
  constexpr int kAlpha = m + 2;
  for (int p = 0; p < kAlpha * kAlpha; ++p) {
    const auto& exact = kMatrices<m>;
    input->unit[p] = exact.input_unit[p / kAlpha] * exact.input_unit[p % kAlpha];
    filter->unit[p] = exact.filter_unit[p / kAlpha] * exact.filter_unit[p % kAlpha];
  }
}

void SetLanes(int64_t rows, int64_t channels, int64_t most, Rows* lanes) {
  const int64_t words = channels / kWordChannels;
  lanes->rows = static_cast<int32_t>(rows);
  lanes->words = static_cast<int32_t>(words);
  lanes->passes = static_cast<int32_t>(CeilDiv(words, most));
  const int64_t of_row = CeilDiv(CeilDiv(words, lanes->passes), 8) * 8;
  lanes->rows_of_cta = static_cast<int32_t>(std::max<int64_t>(1, kShortRowThreads / of_row));
  lanes->lanes = FastDivmod(of_row);
}

Status DescribeProducts(const ConvProblem& problem, int64_t tiles, int64_t points, const Gpu& gpu,
                        LaunchParams* launch) {
  ProductsParams& products = launch->products;
  const int64_t n_tiles = CeilDiv(problem.k, kProductsRows);
  const int64_t m_tiles = CeilDiv(tiles, kProductsCtas * kProductsRows),
                all = n_tiles * m_tiles * points;
  if (all >= int64_t{1} << 30) return Refuse("less than 2^30 tiles of the products", all);
  products.rows = static_cast<int32_t>(tiles);
  products.columns = static_cast<int32_t>(problem.k);
  products.points = static_cast<int32_t>(points);
  products.k_blocks = static_cast<int32_t>(CeilDiv(problem.c, kProductsChannels));
  products.m_point = launch->output.m_point = tiles * problem.k;
  products.tiles = static_cast<int32_t>(all);
  products.n_tiles = FastDivmod(n_tiles);
  products.m_tiles = FastDivmod(m_tiles);
  launch->products_ctas = static_cast<int32_t>(
      kProductsCtas * std::min<int64_t>(all, std::max(1, gpu.sm_count / kProductsCtas)));
  return {};
}

// SM cycles for an output of the products apart from multiply-adds. Fitted to 12 layers of an H200.
constexpr double kProductCycles = 0.17;
constexpr double kInt8Rate = 2;  // multiply-adds for one of 16-bit operands

double PredictMicroseconds(int64_t m, const ConvProblem& problem, int64_t tiles, const Gpu& gpu) {
  const auto rows = static_cast<double>(tiles);
  const auto c = static_cast<double>(problem.c), k = static_cast<double>(problem.k);
  const auto points = static_cast<double>((m + 2) * (m + 2));
  // A transform thread (four channels of a tile) takes about a cycle of the SM for each point.
  const double transforms = (rows + k) * points * c / kWordChannels;
  const double products =
      rows * points * k * (c / (kInt8Rate * gpu.wgmma_per_clock) + kProductCycles);
  const double output_bytes =
      rows * points * k * 2 + static_cast<double>(problem.y_elements()) * Int8OutputBytes(problem);
  return (transforms + products) / gpu.sm_count / gpu.cycles_per_us() +
         output_bytes / (gpu.dram_bytes_per_us * kPassShare) + 4 * gpu.launch_us;
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const int64_t m = static_cast<const Instance*>(kernel.instance)->m;
  JAXCONV_RETURN_IF_ERROR(CheckProblem(kernel, problem));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  const int64_t points = (m + 2) * (m + 2);
  const int64_t tiles_h = CeilDiv(problem.out[1], m), tiles_w = CeilDiv(problem.out[2], m);
  const int64_t tiles = problem.n * tiles_h * tiles_w;
  if (tiles >= kMaxTiles) return Refuse("less than 2^26 tiles", tiles);
  auto launch = std::make_shared<LaunchParams>();
  JAXCONV_RETURN_IF_ERROR(DescribeProducts(problem, tiles, points, gpu, launch.get()));

  const bool blocked = problem.activation_layout == ActivationLayout::kNchw32;
  InputParams& input = launch->input;
  FilterParams& filter = launch->filter;
  OutputParams& output = launch->output;
  if (m == 2) {
    SetUnits<2>(&input.rows, &filter.rows);
  } else {
    SetUnits<4>(&input.rows, &filter.rows);
  }
  const int64_t lanes = m == 2 ? kMaxLanes<2> : kMaxLanes<4>;
  SetLanes(tiles, problem.c, lanes, &input.rows);
  SetLanes(problem.k, problem.c, lanes, &filter.rows);
  // A sum has C products of at most 127 * 127.
  int exponent = 0;
  while ((int64_t{1} << (exponent + kHalfExponent)) < problem.c << 2 * 7) ++exponent;
  input.exponent = std::ldexp(1.0f, exponent);
  filter.exponent = std::ldexp(1.0f, -exponent);

  input.channels = filter.channels = static_cast<int32_t>(problem.c);
  input.in_h = static_cast<int32_t>(problem.in[1]);
  input.in_w = static_cast<int32_t>(problem.in[2]);
  input.pad_h = static_cast<int32_t>(problem.pad_lo[1]);
  input.pad_w = static_cast<int32_t>(problem.pad_lo[2]);
  input.tiles_h = output.tiles_h = FastDivmod(tiles_h);
  input.tiles_w = output.tiles_w = FastDivmod(tiles_w);
  input.pixel_stride = static_cast<int32_t>(blocked ? 32 : problem.c);
  input.block_stride = blocked ? problem.in_pixels() * 32 : 32;
  input.image_stride = problem.in_pixels() * problem.c;
  filter.row_stride = static_cast<int32_t>(problem.packed_row());
  filter.tap_stride = static_cast<int32_t>(blocked ? 32 : problem.c);
  filter.block_stride = static_cast<int32_t>(blocked ? kTaps * kTaps * 32 : 32);
  output.requantize = MakeRequantizeParams(problem);
  output.tiles = static_cast<int32_t>(tiles);
  output.columns = static_cast<int32_t>(problem.k);
  output.out_h = static_cast<int32_t>(problem.out[1]);
  output.out_w = static_cast<int32_t>(problem.out[2]);
  output.block_channels = problem.k % 64 == 0 ? 64 : 32;

  int64_t bytes = 0;
  auto take = [&bytes](int64_t size) {
    const int64_t at = bytes;
    bytes += CeilDiv(size, kAlignment) * kAlignment;
    return at;
  };
  launch->v = take(tiles * points * problem.c);
  launch->v_scale = take(tiles * points * 4);
  launch->u = take(points * problem.k * problem.c);
  launch->u_scale = take(points * problem.k * 4);
  launch->m = take(tiles * points * problem.k * 2);
  plan->kernel = &kernel;
  plan->slices = 1;
  plan->workspace_bytes = bytes;
  plan->microseconds = PredictMicroseconds(m, problem, tiles, gpu);
  plan->params = std::move(launch);
  return {};
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments)                               \
  JAXCONV_ADD_KERNELS(all, ops, types, winograd_int8, variant, 90, 90, MakePlan, Instance, \
                      JAXCONV_UNPACK arguments)
#define PADDED(...)
#include "cuda/winograd_int8/kernels.def"
  for (KernelDesc& kernel : all) kernel.on_request = true;
  return all;
}

}  // namespace jaxconv::winograd_int8
