#include "cuda/imma_nchw32/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>

#include "cuda/common/instances.h"
#include "cuda/common/rates.h"
#include "cuda/imma_nchw32/params.h"

namespace jaxconv::imma_nchw32 {
namespace {

// A line of kernels.def.
struct Instance {
  int64_t tile_m, tile_n, tile_k, warps_m, warps_n, stages, ctas_per_sm;
  int64_t copy;  // bytes of one copy of x
  double share;

  bool few() const { return copy == 4; }
  // The stages and the table of pixels.
  int64_t shared_bytes() const { return stages * (tile_m + tile_n) * tile_k + tile_m * 8; }
};

// Offsets of sources are 32-bit numbers of units.
constexpr int64_t kMaxUnits = (int64_t{1} << 31) - 1;
// Shared memory that the runtime reserves for each CTA.
constexpr int64_t kReservedBytesOfCta = 1024;

Status CheckSizes(const Instance& instance, const ConvProblem& problem, const Gpu& gpu) {
  if (problem.batch != 1) return Refuse("one batch", problem.batch);
  for (int64_t dilation : problem.lhs_dilation) {
    if (dilation != 1) return Refuse("no lhs_dilation", dilation);
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireInt32());
  if (instance.few()) {
    if (problem.groups != 1) return Refuse("one group", problem.groups);
    if (problem.c != 4) return Refuse("4 channels", problem.c);
  } else if (problem.c_per_group() % 32 != 0) {
    return Refuse("C/groups in multiples of 32", problem.c_per_group());
  }
  if (problem.k_per_group() % 8 != 0) {
    return Refuse("K/groups in multiples of 8", problem.k_per_group());
  }
  if (problem.taps() > kMaxTaps) {
    return Refuse("at most " + std::to_string(kMaxTaps) + " taps", problem.taps());
  }
  if (instance.shared_bytes() > gpu.smem_per_block_optin) {
    return Refuse(std::to_string(instance.shared_bytes()) + " bytes of shared memory",
                  gpu.smem_per_block_optin);
  }
  return {};
}

// Whether a tap of some output lies outside x.
bool Padded(const ConvProblem& problem, int a) {
  const int64_t last = (problem.out[a] - 1) * problem.stride[a] +
                       (problem.filter[a] - 1) * problem.dilation[a] - problem.pad_lo[a];
  return problem.pad_lo[a] > 0 || last >= problem.in[a];
}

// Sets the axes and the strides of x; refuses values that the kernel could not compute in 32 bits.
Status DescribeInput(const ConvProblem& problem, bool few, Params* params) {
  const bool blocked = problem.activation_layout == ActivationLayout::kNchw32 && !few;
  int64_t bits = 0, pitch = 1, reach = 0;
  for (int a = 2; a >= 0; --a) {
    Axis& axis = params->axis[a];
    axis.in = static_cast<int32_t>(problem.in[a]);
    axis.stride = static_cast<int32_t>(problem.stride[a]);
    axis.pad = static_cast<int32_t>(problem.pad_lo[a]);
    axis.out = FastDivmod(problem.out[a]);
    axis.dilation = FastDivmod(problem.dilation[a]);
    axis.mask_bits = Padded(problem, a) ? static_cast<int32_t>(problem.filter[a]) : 0;
    bits += Padded(problem, a) ? problem.filter[a] : 0;
    reach += pitch * (problem.in[a] + problem.out[a] * problem.stride[a] +
                      problem.filter[a] * problem.dilation[a] + std::abs(problem.pad_lo[a]));
    pitch *= problem.in[a];
  }
  if (bits > kMaxTapBits) {
    return Refuse(
        "the filter's extents on padded axes to add up to at most " + std::to_string(kMaxTapBits),
        bits);
  }
  params->pixel_units = static_cast<int32_t>(blocked || few ? 1 : problem.c / 32);
  const int64_t image = problem.in_pixels() * (blocked ? problem.c / 32 : 1);
  if (int64_t units = (problem.n * image + reach) * params->pixel_units; units > kMaxUnits) {
    return Refuse("x and its padding below 2^31 units of 32 bytes", units);
  }
  params->image_pixels = static_cast<int32_t>(image);
  params->x_group = problem.c_per_group() * (blocked ? problem.in_pixels() : 1);
  return {};
}

// Sets the two loops over the reduction, and each column's path through them.
void DescribeReduction(const ConvProblem& problem, bool few, int64_t tile_k, Params* params) {
  const auto taps = static_cast<int32_t>(problem.taps());
  auto coordinates = [&](int64_t tap) {
    return Spatial{tap / problem.filter[2] / problem.filter[1],
                   tap / problem.filter[2] % problem.filter[1], tap % problem.filter[2]};
  };
  auto tap_units = [&](int64_t tap) {
    const Spatial at = coordinates(tap);
    int64_t pixel = 0;
    for (int a = 0; a < 3; ++a) pixel = pixel * problem.in[a] + at[a] * problem.dilation[a];
    return pixel * params->pixel_units;
  };
  for (int64_t tap = 0; tap < taps; ++tap) {
    const Spatial at = coordinates(tap);
    uint32_t bits = 0;
    int64_t first_bit = 0;
    for (int a = 0; a < 3; ++a) {
      if (params->axis[a].mask_bits > 0) bits |= uint32_t{1} << (first_bit + at[a]);
      first_bit += params->axis[a].mask_bits;
    }
    params->tap[tap].bits = bits;
  }
  const bool blocked = problem.activation_layout == ActivationLayout::kNchw32;
  const int64_t blocks = few ? 1 : problem.c_per_group() / 32;
  const int64_t block_units = blocked ? problem.in_pixels() : 1;
  const int64_t columns = tile_k / (few ? 4 : 32);
  params->taps_inside = few || blocked;
  // With 4 channels there is no carry: taps past the last mark the end.
  const int64_t inner = few ? int64_t{1} << 30 : blocked ? taps : blocks;
  params->inner = FastDivmod(inner);
  params->inner_step = static_cast<int32_t>(columns % inner);
  params->outer_step = static_cast<int32_t>(columns / inner);
  for (int64_t column = 0; column < std::min(columns, taps * blocks); ++column) {
    const int64_t i = column % inner, o = column / inner;
    params->first[column] = static_cast<int32_t>(
        params->taps_inside ? tap_units(i) + o * block_units : tap_units(o) + i * block_units);
  }
  for (int64_t tap = 0; tap < taps; ++tap) {
    for (int64_t carry = 0; carry < 2; ++carry) {
      const int64_t inner_moves = params->inner_step - carry * inner;
      const int64_t outer_moves = params->outer_step + carry;
      const int64_t from = tap - (params->taps_inside ? inner_moves : outer_moves);
      if (from < 0 || from >= taps) continue;  // no column takes this path
      const int64_t block_moves = params->taps_inside ? outer_moves : inner_moves;
      params->tap[tap].arrival[carry] = static_cast<int32_t>(tap_units(tap) - tap_units(from) +
                                                             (few ? 0 : block_moves * block_units));
    }
  }
}

// The slowest of three resources times the waves, plus the epilogue of every CTA. Fitted to 184
// times of 28 problems on an H200: the choices are 1.4 % slower on average than the best tile, 13 %
// at most.
TimeTerms TermsOf(const Instance& instance, const ConvProblem& problem, const Gpu& gpu,
                  int64_t ctas, int64_t k_blocks) {
  // SM cycles for each byte of an output that is written or read.
  constexpr double kOutputByteCycles = 0.2;
  const int64_t resident =
      std::min(instance.ctas_per_sm, (gpu.smem_per_block_optin + kReservedBytesOfCta) /
                                         (instance.shared_bytes() + kReservedBytesOfCta));
  const auto rows = static_cast<double>(instance.tile_m + instance.tile_n);
  const auto tile_k = static_cast<double>(instance.tile_k);
  const auto outputs = static_cast<double>(instance.tile_m * instance.tile_n);
  const double tensor = outputs * tile_k / (2 * gpu.mma_sync_per_clock);
  const double fill = rows * tile_k;
  const double fragments =
      static_cast<double>(instance.tile_m * instance.warps_n + instance.tile_n * instance.warps_m) *
      tile_k;
  const double shared = (fill + fragments) / kSharedBytesPerCycle;
  const double copies = instance.few()
                            ? static_cast<double>(instance.tile_m) * tile_k /
                                  static_cast<double>(instance.copy) * kWarpCopyCycles / kLanes
                            : 0;
  const double block = std::max({tensor, shared, copies}) / instance.share;
  const double cta = static_cast<double>(k_blocks) * block;
  const double edge = outputs * Int8OutputBytes(problem) * kOutputByteCycles;
  const int64_t per_sm = CeilDiv(ctas, gpu.sm_count);
  const int64_t last = per_sm % resident;
  // The last CTAs are too few to hide each other's waits: their throughput is the square root of
  // their share of a full SM, as in igemm_wmma.
  const double cycles =
      static_cast<double>(per_sm) * edge +
      (static_cast<double>(per_sm - last) + std::sqrt(static_cast<double>(last * resident))) * cta;
  TimeTerms terms;
  terms.tensor_cores = cycles / gpu.cycles_per_us();
  terms.dram = Int8Bytes(problem) / gpu.dram_bytes_per_us;
  terms.launch = gpu.launch_us;
  return terms;
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(CheckInt8Types(kernel, problem));
  JAXCONV_RETURN_IF_ERROR(CheckSizes(instance, problem, gpu));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  JAXCONV_RETURN_IF_ERROR(DescribeInput(problem, instance.few(), &params));
  DescribeReduction(problem, instance.few(), instance.tile_k, &params);
  params.rows = static_cast<int32_t>(problem.n * problem.out_pixels());
  params.channels = static_cast<int32_t>(problem.k_per_group());
  params.w_row = static_cast<int32_t>(problem.packed_row());
  params.w_group = problem.k_per_group() * problem.packed_row();
  params.k_blocks = static_cast<int32_t>(CeilDiv(params.w_row, instance.tile_k));
  params.epilogue = MakeRequantizeParams(problem);
  const int64_t n_tiles = CeilDiv(params.channels, instance.tile_n);
  params.n_tiles = FastDivmod(n_tiles);
  params.groups = FastDivmod(problem.groups);
  launch->ctas = n_tiles * problem.groups * CeilDiv(params.rows, instance.tile_m);
  if (launch->ctas >= int64_t{1} << 31) return Refuse("less than 2^31 tiles", launch->ctas);
  plan->kernel = &kernel;
  plan->slices = 1;
  plan->workspace_bytes = 0;
  plan->terms = TermsOf(instance, problem, gpu, launch->ctas, params.k_blocks);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->params = std::move(launch);
  return {};
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments, share)                        \
  JAXCONV_ADD_KERNELS(all, ops, types, imma_nchw32, variant, 80, 1000, MakePlan, Instance, \
                      JAXCONV_UNPACK arguments, JAXCONV_UNPACK share)
#include "cuda/imma_nchw32/kernels.def"
  return all;
}

}  // namespace jaxconv::imma_nchw32
