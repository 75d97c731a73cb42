#include "cuda/kernels/igemm_simt.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace jaxconv {
namespace {

constexpr const char* kFamily = "igemm_simt";
constexpr int kTileK = 8;  // kSimtTileK of device/simt_tile.cuh

struct Instance {
  SimtTileId id;
  const char* suffix;
  int64_t tile_m, tile_n;
  int threads, ctas_per_sm;
  bool vec, wide;
  // Share of the FMA peak of an SM full of such CTAs: in fprop and dgrad, and in wgrad. Measured
  // (layers of 576 and 288 stages on an H200 at 1.97 GHz, docs/notes/igemm_simt.md).
  double gather_efficiency, wgrad_efficiency;
};

constexpr Instance kInstances[] = {
    {SimtTileId::kVec128x128, "128x128x8_vec", 128, 128, 256, 2, true, false, 0.69, 0.67},
    {SimtTileId::kVec128x128Wide, "128x128x8_vec_wide", 128, 128, 128, 2, true, true, 0.76, 0.75},
    {SimtTileId::kVec128x64, "128x64x8_vec", 128, 64, 128, 3, true, false, 0.715, 0.69},
    {SimtTileId::kVec128x64Wide, "128x64x8_vec_wide", 128, 64, 64, 4, true, true, 0.74, 0.68},
    {SimtTileId::kVec64x64, "64x64x8_vec", 64, 64, 64, 6, true, false, 0.70, 0.66},
    {SimtTileId::kScalar128x64, "128x64x8_scalar", 128, 64, 128, 3, false, false, 0.33, 0.49},
    {SimtTileId::kScalar128x32, "128x32x8_scalar", 128, 32, 64, 6, false, false, 0.20, 0.36},
};

// Partial results of split-K take at most this much workspace.
constexpr int64_t kMaxWorkspaceBytes = 64'000'000;
// A slice shorter than this spends more time on its prologue and epilogue than on its sum.
constexpr int64_t kMinBlocksPerSlice = 16;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The launch of a problem on an instance, without its pointers.
struct Plan {
  IgemmParams params;
  int64_t ctas = 0;
  int64_t blocks = 0;  // stages of one CTA, averaged over phases and not below 1
  int64_t slices = 1;
};

int64_t ReduceBlocks(const ConvProblem& problem) {
  return CeilDiv(problem.n * problem.out_pixels(), kTileK);
}

Status MakePlan(const Instance& instance, const ConvProblem& problem, int64_t slices, Plan* plan) {
  IgemmParams& params = plan->params;
  JAXCONV_RETURN_IF_ERROR(MakeImplicitGemm(problem, &params.gemm));
  const ImplicitGemm& gemm = params.gemm;
  const int64_t n_tiles = CeilDiv(gemm.gemm_n, instance.tile_n);
  const int64_t m_tiles = CeilDiv(gemm.gemm_m, instance.tile_m);
  const int64_t batch_groups = gemm.batches * gemm.groups;
  plan->ctas = n_tiles * m_tiles * batch_groups;
  if (problem.op == Op::kWgrad) {
    plan->blocks = CeilDiv(ReduceBlocks(problem), slices);
    plan->ctas *= slices;
    params.blocks_per_slice = static_cast<int32_t>(plan->blocks);
    params.slice_elements = slices > 1 ? problem.w_elements() : 0;
  } else {
    plan->ctas *= gemm.phases;
    const double taps =
        static_cast<double>(problem.taps()) /
        (gemm.axis[0].tap_period * gemm.axis[1].tap_period * gemm.axis[2].tap_period);
    const double blocks = instance.vec ? taps * CeilDiv(gemm.reduce_channels, kTileK)
                                       : std::ceil(taps * gemm.reduce_channels / kTileK);
    plan->blocks = std::max<int64_t>(1, std::llround(blocks));
  }
  if (plan->ctas >= int64_t{1} << 31) {
    return Status::Unimplemented("the grid has " + std::to_string(plan->ctas) +
                                 " tiles, expected less than 2^31");
  }
  const int64_t b_step_bytes = gemm.b_reduce * kTileK * ByteWidth(problem.rhs_dtype());
  if (b_step_bytes >> 32 != 0) {
    return Status::Unimplemented("more than 2^27 output channels");
  }
  params.b_step_bytes = static_cast<uint32_t>(b_step_bytes);
  params.n_tiles = FastDivmod(n_tiles);
  params.m_tiles = FastDivmod(m_tiles);
  params.batch_groups = FastDivmod(batch_groups);
  params.slices = FastDivmod(slices);
  plan->slices = slices;
  return {};
}

Status RequireMultipleOf4(const char* what, int64_t value) {
  if (value % 4 == 0) return {};
  return Status::Unimplemented(std::string(what) + " " + std::to_string(value) +
                               " is not a multiple of 4");
}

Status CanImplement(const Instance& instance, Op op, DType dtype, const ConvProblem& problem) {
  if (problem.op != op) {
    return Status::Unimplemented(std::string("expected ") + Name(op) + ", got " + Name(problem.op));
  }
  if (problem.lhs_dtype() != dtype || problem.rhs_dtype() != dtype) {
    return Status::Unimplemented(std::string("expected operands of type ") + Name(dtype) +
                                 ", got " + Name(problem.lhs_dtype()) + " and " +
                                 Name(problem.rhs_dtype()));
  }
  if (problem.output_dtype() != dtype && problem.output_dtype() != DType::kF32) {
    return Status::Unimplemented(std::string("expected an output of type ") + Name(dtype) +
                                 " or f32, got " + Name(problem.output_dtype()));
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireRsck());
  if (instance.vec) {
    JAXCONV_RETURN_IF_ERROR(RequireMultipleOf4("C/groups", problem.c_per_group()));
    JAXCONV_RETURN_IF_ERROR(RequireMultipleOf4("K/groups", problem.k_per_group()));
    if (op == Op::kWgrad && problem.lhs_dilation != Spatial{1, 1, 1}) {
      return Status::Unimplemented("wgrad with lhs_dilation is left to the scalar instances");
    }
  }
  Plan plan;
  return MakePlan(instance, problem, 1, &plan);
}

int64_t WorkspaceBytes(const ConvProblem& problem, int64_t slices) {
  return slices > 1 ? slices * problem.w_elements() * int64_t{sizeof(float)} : 0;
}

// The FMA rate of an SM that holds only `ctas` CTAs, against a full one. An SM has four schedulers
// and the slowest sets the pace: it has ceil(warps / 4) of the warps. Measured on last waves of one
// and two CTAs: one warp alone hides none of its own latencies (0.5), two 8x8 warps nearly all
// (0.88), two 8x16 warps all.
double RateOfCtas(const Instance& instance, int64_t ctas) {
  if (ctas >= instance.ctas_per_sm) return 1;
  const int64_t warps = ctas * instance.threads / 32;
  const int64_t deepest = CeilDiv(warps, 4);
  const double rate = deepest == 1 ? 0.5 : deepest == 2 && !instance.wide ? 0.88 : 1.0;
  return rate * warps / (4 * deepest);
}

// Microseconds at a nominal 1.97 GHz. The SMs take CTAs as they finish, so the busiest one runs
// ceil(ctas / SMs) of them, as many at a time as fit.
double Cost(const Instance& instance, const ConvProblem& problem, const DeviceInfo& device,
            int64_t slices) {
  Plan plan;
  if (!MakePlan(instance, problem, slices, &plan).ok()) return HUGE_VAL;
  constexpr double kFmaPerCycle = 128;
  constexpr double kLaunchCycles = 6000;  // 3 us from one kernel to the next
  // A CTA's first loads and its stores leave the FMA units idle for about as long as its outputs
  // take at 12 bytes a cycle (measured on 8-stage CTAs).
  constexpr double kEdgeBytesPerCycle = 12;
  const double efficiency =
      problem.op == Op::kWgrad ? instance.wgrad_efficiency : instance.gather_efficiency;
  const double outputs = static_cast<double>(instance.tile_m * instance.tile_n);
  const double cta_cycles =
      plan.blocks * outputs * kTileK / kFmaPerCycle / efficiency + outputs * 4 / kEdgeBytesPerCycle;
  const int64_t per_sm = CeilDiv(plan.ctas, device.sm_count);
  const int64_t rest = per_sm % instance.ctas_per_sm;
  double cycles = kLaunchCycles + (per_sm - rest) * cta_cycles;
  if (rest > 0) cycles += rest * cta_cycles / RateOfCtas(instance, rest);
  // 16 bytes per cycle and SM is what HBM gives a large part of today.
  const double bytes = problem.x_elements() * ByteWidth(problem.x_dtype) +
                       problem.w_elements() * ByteWidth(problem.w_dtype) +
                       problem.y_elements() * ByteWidth(problem.y_dtype);
  cycles = std::max(cycles, bytes / (16.0 * device.sm_count));
  if (slices > 1) {
    // Written once, read once, by a kernel of its own.
    cycles += kLaunchCycles + 2.0 * WorkspaceBytes(problem, slices) / (16.0 * device.sm_count);
  }
  return cycles / 1970;
}

int64_t Slices(const Instance& instance, const ConvProblem& problem, const DeviceInfo& device) {
  if (problem.op != Op::kWgrad) return 1;
  const int64_t blocks = ReduceBlocks(problem);
  const int64_t most = std::max<int64_t>(
      1, std::min({blocks / kMinBlocksPerSlice, kMaxWorkspaceBytes / WorkspaceBytes(problem, 2) * 2,
                   int64_t{1024}}));
  int64_t best = 1;
  double best_cost = Cost(instance, problem, device, 1);
  for (int64_t slices = 2; slices <= most; ++slices) {
    // Round up to slices that are all of the same length but the last, and none empty.
    const int64_t used = CeilDiv(blocks, CeilDiv(blocks, slices));
    if (used != slices || WorkspaceBytes(problem, slices) > kMaxWorkspaceBytes) continue;
    const double cost = Cost(instance, problem, device, slices);
    if (cost < best_cost) best_cost = cost, best = slices;
  }
  return best;
}

Status Dispatch(Op op, DType dtype, SimtTileId id, const IgemmParams& params, int64_t ctas,
                void* stream) {
  auto launch = [&](auto of_f32, auto of_f16, auto of_bf16) {
    auto of_dtype = dtype == DType::kF32 ? of_f32 : dtype == DType::kF16 ? of_f16 : of_bf16;
    return of_dtype(id, params, ctas, stream);
  };
  switch (op) {
    case Op::kFprop:
      return launch(LaunchIgemmSimt<Op::kFprop, DType::kF32>,
                    LaunchIgemmSimt<Op::kFprop, DType::kF16>,
                    LaunchIgemmSimt<Op::kFprop, DType::kBF16>);
    case Op::kDgrad:
      return launch(LaunchIgemmSimt<Op::kDgrad, DType::kF32>,
                    LaunchIgemmSimt<Op::kDgrad, DType::kF16>,
                    LaunchIgemmSimt<Op::kDgrad, DType::kBF16>);
    case Op::kWgrad:
      break;
  }
  return launch(LaunchIgemmSimt<Op::kWgrad, DType::kF32>, LaunchIgemmSimt<Op::kWgrad, DType::kF16>,
                LaunchIgemmSimt<Op::kWgrad, DType::kBF16>);
}

Status Launch(const Instance& instance, Op op, DType dtype, const ConvProblem& problem,
              const KernelArgs& args) {
  JAXCONV_RETURN_IF_ERROR(CanImplement(instance, op, dtype, problem));
  const int64_t slices = op == Op::kWgrad ? args.slices : 1;
  if (slices < 1 || slices > ReduceBlocks(problem)) {
    return Status::InvalidArgument("slices: expected 1 to " +
                                   std::to_string(ReduceBlocks(problem)) + ", got " +
                                   std::to_string(slices));
  }
  const int64_t workspace_bytes = op == Op::kWgrad ? WorkspaceBytes(problem, slices) : 0;
  JAXCONV_RETURN_IF_ERROR(CheckBuffers(args, workspace_bytes));
  Plan plan;
  JAXCONV_RETURN_IF_ERROR(MakePlan(instance, problem, slices, &plan));
  plan.params.a = args.lhs;
  plan.params.b = args.rhs;
  plan.params.out = workspace_bytes > 0 ? args.workspace : args.out;
  plan.params.out_is_f32 = workspace_bytes > 0 || problem.output_dtype() == DType::kF32;
  JAXCONV_RETURN_IF_ERROR(Dispatch(op, dtype, instance.id, plan.params, plan.ctas, args.stream));
  if (workspace_bytes == 0) return {};
  return LaunchSplitkReduce(static_cast<const float*>(args.workspace), problem.w_elements(), slices,
                            args.out, problem.output_dtype(), args.stream);
}

}  // namespace

std::vector<KernelRow> IgemmSimtRows() {
  std::vector<KernelRow> rows;
  for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const Instance& instance : kInstances) {
        KernelRow row;
        row.name =
            std::string(Name(op)) + "_" + kFamily + "_" + Name(dtype) + "_" + instance.suffix;
        row.family = kFamily;
        row.op = op;
        row.min_cc = 80;
        row.can_implement = [&instance, op, dtype](const ConvProblem& problem) {
          return CanImplement(instance, op, dtype, problem);
        };
        row.slices = [&instance](const ConvProblem& problem, const DeviceInfo& device) {
          return Slices(instance, problem, device);
        };
        row.workspace_bytes = WorkspaceBytes;
        row.cost = [&instance](const ConvProblem& problem, const DeviceInfo& device,
                               int64_t slices) { return Cost(instance, problem, device, slices); };
        row.launch = [&instance, op, dtype](const ConvProblem& problem, const KernelArgs& args) {
          return Launch(instance, op, dtype, problem, args);
        };
        rows.push_back(std::move(row));
      }
    }
  }
  return rows;
}

}  // namespace jaxconv
