#include "cuda/igemm_simt/plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/common/instances.h"
#include "cuda/common/rates.h"
#include "cuda/igemm_simt/params.h"

namespace jaxconv::igemm_simt {
namespace {

// A line of kernels.def.
struct Instance {
  int64_t tile_m, tile_n, thread_n, warps_m, warps_n, lanes_m, lanes_n, ctas_per_sm;
  bool vec;

  bool wide() const { return thread_n == 16; }
  int64_t warps() const { return warps_m * warps_n; }
};

// Partial results of split-K take at most this much workspace.
constexpr int64_t kMaxWorkspaceBytes = 64'000'000;
constexpr int64_t kMaxSlices = 1024;
// A shorter slice spends more time on its prologue and epilogue than on its sum.
constexpr int64_t kMinBlocksPerSlice = 16;
constexpr int64_t kMaxCtas = (int64_t{1} << 31) - 1;

// From docs/notes/igemm_simt.md. Scalar fprop with few channels gathers whole lines, because a
// filter row's taps are contiguous.
constexpr int64_t kFewChannels = 4;
// A warp's load of 32 single elements, in cycles: of pixels that lie apart, and of neighbours.
// Fitted.
constexpr double kApartLoadCycles = 25, kNeighbourLoadCycles = 13;
// From L2, bytes a cycle and SM (igemm_wmma measures the same).

int64_t WorkspaceBytes(const ConvProblem& problem, int64_t slices) {
  return slices > 1 ? slices * problem.w_elements() * int64_t{sizeof(float)} : 0;
}

Status RequireMultipleOf4(const char* what, int64_t value) {
  if (value % 4 == 0) return {};
  return Status::Unimplemented(std::string(what) + " " + std::to_string(value) +
                               " is not a multiple of 4");
}

Status Check(const KernelDesc& kernel, const Instance& instance, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, problem, /*tf32=*/false));
  JAXCONV_RETURN_IF_ERROR(problem.RequireRsck());
  if (!instance.vec) return {};
  JAXCONV_RETURN_IF_ERROR(RequireMultipleOf4("C/groups", problem.c_per_group()));
  JAXCONV_RETURN_IF_ERROR(RequireMultipleOf4("K/groups", problem.k_per_group()));
  if (problem.op == Op::kWgrad && problem.lhs_dilation != Spatial{1, 1, 1}) {
    return Status::Unimplemented("wgrad with lhs_dilation is left to the scalar instances");
  }
  return {};
}

// k-blocks of an fprop or dgrad CTA, averaged over stride residue classes, at least 1.
int64_t GatherBlocks(const Instance& instance, const ConvProblem& problem,
                     const ImplicitGemm& gemm) {
  double taps = static_cast<double>(problem.taps());
  for (const GatherAxis& axis : gemm.axis) taps /= axis.tap_period;
  const double blocks = instance.vec ? taps * CeilDiv(gemm.reduce_channels, kTileK)
                                     : std::ceil(taps * gemm.reduce_channels / kTileK);
  return std::max<int64_t>(1, std::llround(blocks));
}

// The FMA rate of an SM with only `ctas` CTAs, relative to a full SM. The busiest of the four
// schedulers, with ceil(warps / 4) warps, limits the throughput. Measured on last waves of one and
// two CTAs: one warp alone hides none of its own latencies, two 8x8 warps nearly all, two 8x16
// warps all.
constexpr double kOneWarpRate = 0.5, kTwoWarpsRate = 0.88;
double RateOfCtas(const Instance& instance, int64_t ctas) {
  if (ctas >= instance.ctas_per_sm) return 1;
  const int64_t warps = ctas * instance.warps();
  const int64_t deepest = CeilDiv(warps, kSchedulers);
  const double rate = deepest == 1                       ? kOneWarpRate
                      : deepest == 2 && !instance.wide() ? kTwoWarpsRate
                                                         : 1;
  return rate * static_cast<double>(warps) / static_cast<double>(kSchedulers * deepest);
}

// `ctas` CTAs of `blocks` k-blocks each. The busiest SM runs ceil(ctas / SMs) of them, as many at a
// time as fit.
TimeTerms TermsOf(const Instance& instance, const ConvProblem& problem, const Gpu& gpu,
                  int64_t ctas, int64_t blocks, int64_t slices) {
  const auto outputs = static_cast<double>(instance.tile_m * instance.tile_n);
  const auto loaded = static_cast<double>((instance.tile_m + instance.tile_n) * kTileK);
  // A CTA's first loads and its stores leave the FMA units idle, each for about as long as its
  // outputs take to store.
  const double fma = static_cast<double>(blocks) * outputs * kTileK / gpu.fma_per_clock +
                     2 * outputs * kFloatBytes / kStoreBytesPerCycle;
  const bool neighbours =
      problem.op == Op::kWgrad ||
      (problem.op == Op::kFprop && problem.groups == 1 && problem.c <= kFewChannels);
  const double load =
      static_cast<double>(blocks) * loaded *
      (instance.vec ? static_cast<double>(ByteWidth(problem.lhs_dtype())) / kTileL2BytesPerCycle
                    : (neighbours ? kNeighbourLoadCycles : kApartLoadCycles) / kLanes);
  const int64_t per_sm = CeilDiv(ctas, gpu.sm_count);
  const int64_t rest = per_sm % instance.ctas_per_sm;
  auto busy = static_cast<double>(per_sm - rest);
  if (rest > 0) busy += static_cast<double>(rest) / RateOfCtas(instance, rest);
  const double bytes = problem.x_elements() * ByteWidth(problem.x_dtype) +
                       problem.w_elements() * ByteWidth(problem.w_dtype) +
                       problem.y_elements() * ByteWidth(problem.y_dtype) + EpilogueBytes(problem);
  TimeTerms terms;
  terms.tensor_cores = busy * fma / gpu.cycles_per_us();
  terms.loads = busy * load / gpu.cycles_per_us();
  terms.dram = bytes / gpu.dram_bytes_per_us;
  terms.launch = gpu.launch_us;
  if (slices > 1) {
    // The partial sums are written once, and read once by a second kernel.
    terms.launch += gpu.launch_us + 2.0 * WorkspaceBytes(problem, slices) / gpu.dram_bytes_per_us;
  }
  return terms;
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem));
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  JAXCONV_RETURN_IF_ERROR(MakeImplicitGemm(problem, &params.gemm));
  const ImplicitGemm& gemm = params.gemm;
  const int64_t n_tiles = CeilDiv(gemm.gemm_n, instance.tile_n);
  const int64_t m_tiles = CeilDiv(gemm.gemm_m, instance.tile_m);
  const int64_t batch_groups = gemm.batches * gemm.groups;
  const bool wgrad = problem.op == Op::kWgrad;
  const int64_t tiles = n_tiles * m_tiles * batch_groups * (wgrad ? 1 : gemm.phases);
  const int64_t blocks =
      wgrad ? CeilDiv(gemm.reduce_pixels, kTileK) : GatherBlocks(instance, problem, gemm);
  const int64_t most_slices = wgrad ? blocks : 1;
  if (slices < 0 || slices > most_slices) {
    return Status::InvalidArgument("slices: expected 1 to " + std::to_string(most_slices) +
                                   ", got " + std::to_string(slices));
  }
  if (tiles * std::max<int64_t>(1, slices) > kMaxCtas) {
    return Status::Unimplemented("the grid has " +
                                 std::to_string(tiles * std::max<int64_t>(1, slices)) +
                                 " tiles, expected less than 2^31");
  }
  const int64_t b_step_bytes = gemm.b_reduce * kTileK * ByteWidth(problem.rhs_dtype());
  if (b_step_bytes >> 32 != 0) {
    return Status::Unimplemented("more than 2^27 output channels");
  }
  auto terms = [&](int64_t count) {
    return TermsOf(instance, problem, gpu, tiles * count, CeilDiv(blocks, count), count);
  };
  plan->form = FormTimeOf("igemm_simt", OperationsName(problem),
                          OperandsName(problem, /*tf32=*/false, /*three_tf32=*/false), gpu);
  const int64_t most = wgrad ? std::min({blocks / kMinBlocksPerSlice,
                                         kMaxWorkspaceBytes / WorkspaceBytes(problem, 2) * 2,
                                         kMaxSlices, kMaxCtas / tiles})
                             : 1;
  plan->slices = slices == 0 ? FastestSlices(most, blocks, plan->form, terms) : slices;
  plan->terms = terms(plan->slices);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  params.out_is_f32 = plan->slices > 1 || problem.output_dtype() == DType::kF32;
  params.epilogue = EpilogueParams(problem.epilogue);
  params.n_tiles = FastDivmod(n_tiles);
  params.m_tiles = FastDivmod(m_tiles);
  params.batch_groups = FastDivmod(batch_groups);
  params.slices = FastDivmod(plan->slices);
  params.b_step_bytes = static_cast<uint32_t>(b_step_bytes);
  if (wgrad) {
    params.blocks_per_slice = static_cast<int32_t>(CeilDiv(blocks, plan->slices));
    params.slice_elements = plan->slices > 1 ? problem.w_elements() : 0;
  }
  launch->ctas = tiles * plan->slices;
  launch->out_dtype = problem.output_dtype();
  plan->kernel = &kernel;
  plan->workspace_bytes = WorkspaceBytes(problem, plan->slices);
  plan->params = std::move(launch);
  return {};
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments)                              \
  JAXCONV_ADD_KERNELS(all, ops, types, igemm_simt, variant, 80, 1000, MakePlan, Instance, \
                      JAXCONV_UNPACK arguments)
#define FUSED(...)
#include "cuda/igemm_simt/kernels.def"
  return all;
}

}  // namespace jaxconv::igemm_simt
