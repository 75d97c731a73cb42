#include "cuda/kernels/igemm_wmma.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "cuda/kernels/igemm_simt.h"
#include "cuda/select/cost_model.h"

namespace jaxconv {
namespace {

constexpr const char* kFamily = "igemm_wmma";

struct Instance {
  WmmaTileId id;
  int a_copy, b_copy;  // bytes of one copy; 0: any
  const char* suffix;
  int64_t stages;
  TileCost cost;
};

constexpr Instance MakeInstance(WmmaTileId id, int a_copy, int b_copy, const char* suffix,
                                int64_t tile_m, int64_t tile_n, int64_t tile_k_bytes,
                                int64_t warps_m, int64_t warps_n, int64_t stages,
                                int64_t ctas_per_sm, double gather_efficiency,
                                double wgrad_efficiency) {
  Instance instance{};
  instance.id = id;
  instance.a_copy = a_copy;
  instance.b_copy = b_copy;
  instance.suffix = suffix;
  instance.stages = stages;
  instance.cost.tile_m = tile_m;
  instance.cost.tile_n = tile_n;
  instance.cost.tile_k_bytes = tile_k_bytes;
  instance.cost.warps_m = warps_m;
  instance.cost.warps_n = warps_n;
  instance.cost.ctas_per_sm = ctas_per_sm;
  // The stages, and the row and pixel tables.
  instance.cost.shared_bytes =
      stages * (tile_m + tile_n) * tile_k_bytes + (a_copy == 0 ? 7168 : 3072);
  instance.cost.gather_efficiency = gather_efficiency;
  instance.cost.wgrad_efficiency = wgrad_efficiency;
  return instance;
}

// As WmmaTileOf in igemm_wmma.cuh.
// The last two columns: share of the pace in fprop and dgrad, and in wgrad, measured.
constexpr Instance kInstances[] = {
    MakeInstance(WmmaTileId::k128x256, 16, 16, "", 128, 256, 128, 2, 4, 3, 1, 0.81, 0.73),
    MakeInstance(WmmaTileId::k256x128, 16, 16, "", 256, 128, 128, 4, 2, 3, 1, 0.71, 0.685),
    MakeInstance(WmmaTileId::k128x128, 16, 16, "", 128, 128, 128, 2, 2, 3, 2, 0.7, 0.67),
    MakeInstance(WmmaTileId::k256x64, 16, 16, "", 256, 64, 64, 4, 1, 4, 2, 0.63, 0.61),
    MakeInstance(WmmaTileId::k128x64, 16, 16, "", 128, 64, 128, 2, 2, 3, 3, 0.9, 0.68),
    MakeInstance(WmmaTileId::k64x64, 16, 16, "", 64, 64, 128, 2, 2, 3, 4, 0.94, 0.8),
    MakeInstance(WmmaTileId::k256x16, 16, 16, "", 256, 16, 128, 4, 1, 3, 2, 0.86, 0.87),
    MakeInstance(WmmaTileId::k128x64Half, 8, 8, "_half", 128, 64, 128, 2, 2, 3, 2, 0.5, 0.48),
    MakeInstance(WmmaTileId::k256x16ThinB, 16, 0, "_thin", 256, 16, 128, 4, 1, 3, 2, 0.85, 0.83),
    MakeInstance(WmmaTileId::k128x64Narrow, 0, 0, "_narrow", 128, 64, 64, 2, 2, 3, 2, 0.27, 0.35),
    MakeInstance(WmmaTileId::k128x16Narrow, 0, 0, "_narrow", 128, 16, 128, 4, 1, 3, 2, 0.27, 0.35),
};

// Partial results of split-K take at most this much workspace.
constexpr int64_t kMaxWorkspaceBytes = 64'000'000;
// A slice shorter than this spends more time on filling the pipeline than on its sum.
constexpr int64_t kMinBlocksPerSlice = 4;
constexpr int64_t kMaxSlices = 512;
// Pixels are located in groups past the end of the reduction.
constexpr int64_t kMaxReducePixels = (int64_t{1} << 31) - (1 << 16);
// The bytes of a pixel and of a row of the filter fit in 32 bits.
constexpr int64_t kMaxChannels = int64_t{1} << 28;
// kMaxTableTaps of device/async_loaders.cuh.
constexpr int64_t kMaxTableTaps = 64;
// Bit 31 of a GatherPixel says that a tap does not exist.
constexpr int64_t kMaxTapBits = 31;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t OutputElements(const ConvProblem& problem) {
  return problem.op == Op::kFprop   ? problem.y_elements()
         : problem.op == Op::kDgrad ? problem.x_elements()
                                    : problem.w_elements();
}

int64_t WorkspaceBytes(const ConvProblem& problem, int64_t slices) {
  return slices > 1 ? slices * OutputElements(problem) * int64_t{sizeof(float)} : 0;
}

// The launch of a problem on an instance, without its pointers and its slices.
struct Plan {
  IgemmWmmaParams params;
  int64_t tiles = 0;
  int64_t taps = 0;           // of the phase that has most
  int64_t blocks = 0;         // stages of the longest reduction
  double average_blocks = 0;  // over phases
};

// The widest copy that `channels` neighbouring elements fall into evenly.
int32_t CopyBytes(int64_t channels, int64_t element_bytes) {
  int64_t bytes = 16;
  while (channels * element_bytes % bytes != 0) bytes /= 2;
  return static_cast<int32_t>(bytes);
}

Status MakePlan(const Instance& instance, const ConvProblem& problem, Plan* plan) {
  IgemmWmmaParams& params = plan->params;
  JAXCONV_RETURN_IF_ERROR(MakeImplicitGemm(problem, &params.gemm));
  const ImplicitGemm& gemm = params.gemm;
  const bool wgrad = problem.op == Op::kWgrad, dgrad = problem.op == Op::kDgrad;
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  const int64_t element_bytes = ByteWidth(problem.lhs_dtype());
  const int64_t tile_k = instance.cost.tile_k_bytes / element_bytes;
  if (wgrad && !gemm.Dense()) {
    return Status::Unimplemented("wgrad with lhs_dilation is left to igemm_simt");
  }
  int64_t bits = 0, taps = 1;
  double average_taps = static_cast<double>(problem.taps());
  for (const GatherAxis& axis : gemm.axis) {
    const int64_t count = axis.Phase(0).tap_count;
    bits += count;
    taps *= count;
    average_taps /= axis.tap_period;
  }
  if (bits > kMaxTapBits) {
    return Status::Unimplemented("the filter's extents add up to " + std::to_string(bits) +
                                 ", expected at most " + std::to_string(kMaxTapBits));
  }
  if (wgrad && gemm.reduce_pixels > kMaxReducePixels) {
    return Status::Unimplemented("more than 2^31 - 2^16 pixels");
  }
  plan->taps = taps;
  const int64_t n_tiles = CeilDiv(gemm.gemm_n, instance.cost.tile_n);
  const int64_t m_tiles = CeilDiv(gemm.gemm_m, instance.cost.tile_m);
  const int64_t batch_groups = gemm.batches * gemm.groups;
  plan->tiles = n_tiles * m_tiles * batch_groups * (wgrad ? 1 : gemm.phases);
  if (plan->tiles >= (int64_t{1} << 31) / kMaxSlices) {
    return Status::Unimplemented("the grid has " + std::to_string(plan->tiles) +
                                 " tiles, expected less than 2^22");
  }
  // At least one, though no tap may hit anything: somebody has to write the zeros.
  plan->blocks = std::max<int64_t>(
      1, CeilDiv(wgrad ? gemm.reduce_pixels : taps * gemm.reduce_channels, tile_k));
  plan->average_blocks =
      wgrad ? static_cast<double>(plan->blocks)
            : std::max(1.0, average_taps * gemm.reduce_channels / static_cast<double>(tile_k));
  params.n_tiles = FastDivmod(n_tiles);
  params.m_tiles = FastDivmod(m_tiles);
  params.batch_groups = FastDivmod(batch_groups);
  params.all_taps = KernelOp(problem) == Op::kFprop && gemm.Dense();
  params.a_copy_bytes =
      CopyBytes(dgrad ? problem.k_per_group() : problem.c_per_group(), element_bytes);
  params.b_copy_bytes =
      CopyBytes(krsc ? problem.c_per_group() : problem.k_per_group(), element_bytes);
  return {};
}

// Whether the table has a row of this tile. In dgrad both operands have the same copy width; the
// result of float32 operands is float32, which narrow copies do not serve.
bool HasRow(const Instance& instance, Op op, DType dtype) {
  if (op == Op::kDgrad && instance.a_copy != instance.b_copy) return false;
  return dtype != DType::kF32 || (instance.a_copy == 16 && instance.b_copy == 16);
}

// What of a filter stored as krsc the kernels can read.
Status CheckKrsc(const Instance& instance, DType dtype, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckKrscLines(problem));
  if (!HasRow(instance, KernelOp(problem), dtype)) {
    return Status::Unimplemented("this tile reads filters stored as rsck, got krsc");
  }
  if (problem.op == Op::kDgrad && (problem.taps() > 1 || problem.stride != Spatial{1, 1, 1})) {
    // fprop's kernel reads its taps as one matrix, which krsc is in one tap only.
    return Status::Unimplemented("dgrad reads filters stored as krsc of one tap and stride 1 only");
  }
  if (problem.taps() * problem.c_per_group() > kMaxChannels) {
    return Status::Unimplemented("more than 2^28 elements of a filter for one output channel");
  }
  return {};
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
  if (dtype == DType::kF32 && problem.precision != Precision::kDefault) {
    return Status::Unimplemented(std::string("multiplies float32 in TF32, precision ") +
                                 Name(problem.precision) + " asks for more");
  }
  if (problem.output_dtype() == DType::kF32 && (instance.a_copy != 16 || instance.b_copy != 16)) {
    // Tensor cores cut off the lower bits of what they add. Where the result keeps float32, that is
    // a loss, and at narrow copies no gain that would pay for it.
    return Status::Unimplemented("gathers narrow rows for 16-bit results only, got f32");
  }
  auto require = [&](const char* what, int64_t value, int copy) {
    const int64_t width = copy == 0 ? 1 : copy / ByteWidth(dtype);
    if (value % width == 0) return Status();
    return Status::Unimplemented(std::string(what) + " " + std::to_string(value) +
                                 " is not a multiple of " + std::to_string(width));
  };
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  if (krsc) JAXCONV_RETURN_IF_ERROR(CheckKrsc(instance, dtype, problem));
  if (op != Op::kDgrad) {
    JAXCONV_RETURN_IF_ERROR(require("C/groups", problem.c_per_group(), instance.a_copy));
  }
  if (op != Op::kFprop || !krsc) {
    JAXCONV_RETURN_IF_ERROR(require("K/groups", problem.k_per_group(), instance.b_copy));
  }
  if (std::max(problem.c, problem.k) > kMaxChannels) {
    return Status::Unimplemented("more than 2^28 channels");
  }
  Plan plan;
  JAXCONV_RETURN_IF_ERROR(MakePlan(instance, problem, &plan));
  if (instance.a_copy != 0 && op != Op::kWgrad && plan.taps > kMaxTableTaps) {
    return Status::Unimplemented(std::to_string(plan.taps) + " taps, expected at most " +
                                 std::to_string(kMaxTableTaps));
  }
  if (KernelOp(problem) == Op::kFprop && !plan.params.all_taps &&
      instance.cost.warps_m * instance.cost.warps_n > 4) {
    return Status::Unimplemented("fprop with lhs_dilation is left to tiles of four warps");
  }
  return {};
}

double SlicedCost(const Instance& instance, const ConvProblem& problem, const Plan& plan,
                  const DeviceInfo& device, int64_t slices) {
  TiledWork work;
  work.wgrad = problem.op == Op::kWgrad;
  work.element_bytes = ByteWidth(problem.lhs_dtype());
  work.ctas = plan.tiles * slices;
  work.blocks = slices == 1 ? plan.average_blocks : std::ceil(plan.average_blocks / slices);
  work.dram_bytes = static_cast<double>(problem.x_elements() * ByteWidth(problem.x_dtype) +
                                        problem.w_elements() * ByteWidth(problem.w_dtype) +
                                        problem.y_elements() * ByteWidth(problem.y_dtype));
  work.partial_bytes = static_cast<double>(WorkspaceBytes(problem, slices));
  work.unaligned_output =
      slices == 1 && (plan.params.gemm.gemm_n % 8 != 0 || plan.params.gemm.out_channels % 8 != 0);
  // The model's efficiency of copies of any width is that of 4 bytes; single elements pass through
  // registers.
  const double single_elements = instance.a_copy != 0 || plan.params.a_copy_bytes > 2 ? 1.0
                                 : work.wgrad                                         ? 2.2
                                                                                      : 1.4;
  // dgrad reads the filter along K: few channels are 16 bytes here and there.
  const double scattered_filter =
      problem.op == Op::kDgrad && instance.a_copy == 16 && problem.k_per_group() <= 16 ? 1.4 : 1.0;
  return PredictMicroseconds(instance.cost, work, device) * single_elements * scattered_filter;
}

double Cost(const Instance& instance, const ConvProblem& problem, const DeviceInfo& device,
            int64_t slices) {
  Plan plan;
  if (!MakePlan(instance, problem, &plan).ok()) return HUGE_VAL;
  return SlicedCost(instance, problem, plan, device, slices);
}

int64_t Slices(const Instance& instance, const ConvProblem& problem, const DeviceInfo& device) {
  Plan plan;
  if (!MakePlan(instance, problem, &plan).ok()) return 1;
  const int64_t most = std::min(
      {plan.blocks / kMinBlocksPerSlice,
       kMaxWorkspaceBytes / std::max<int64_t>(1, WorkspaceBytes(problem, 2) / 2), kMaxSlices});
  int64_t best = 1;
  double best_cost = SlicedCost(instance, problem, plan, device, 1);
  for (int64_t slices = 2; slices <= most; ++slices) {
    // Only slices that are all of the same length but the last, and none empty.
    if (CeilDiv(plan.blocks, CeilDiv(plan.blocks, slices)) != slices) continue;
    const double cost = SlicedCost(instance, problem, plan, device, slices);
    if (cost < best_cost) best_cost = cost, best = slices;
  }
  return best;
}

template <Op kOp, DType kType>
Status LaunchTile(WmmaTileId id, const IgemmWmmaParams& params, int64_t ctas, void* stream) {
  switch (id) {
    case WmmaTileId::k128x256:
      return LaunchIgemmWmma<kOp, kType, WmmaTileId::k128x256>(params, ctas, stream);
    case WmmaTileId::k256x128:
      return LaunchIgemmWmma<kOp, kType, WmmaTileId::k256x128>(params, ctas, stream);
    case WmmaTileId::k128x128:
      return LaunchIgemmWmma<kOp, kType, WmmaTileId::k128x128>(params, ctas, stream);
    case WmmaTileId::k256x64:
      return LaunchIgemmWmma<kOp, kType, WmmaTileId::k256x64>(params, ctas, stream);
    case WmmaTileId::k128x64:
      return LaunchIgemmWmma<kOp, kType, WmmaTileId::k128x64>(params, ctas, stream);
    case WmmaTileId::k64x64:
      return LaunchIgemmWmma<kOp, kType, WmmaTileId::k64x64>(params, ctas, stream);
    case WmmaTileId::k256x16:
      return LaunchIgemmWmma<kOp, kType, WmmaTileId::k256x16>(params, ctas, stream);
    default:
      break;
  }
  if constexpr (kType != DType::kF32) {  // rows of narrow copies: HasRow
    switch (id) {
      case WmmaTileId::k128x64Half:
        return LaunchIgemmWmma<kOp, kType, WmmaTileId::k128x64Half>(params, ctas, stream);
      case WmmaTileId::k128x64Narrow:
        return LaunchIgemmWmma<kOp, kType, WmmaTileId::k128x64Narrow>(params, ctas, stream);
      case WmmaTileId::k128x16Narrow:
        return LaunchIgemmWmma<kOp, kType, WmmaTileId::k128x16Narrow>(params, ctas, stream);
      case WmmaTileId::k256x16ThinB:
        if constexpr (kOp != Op::kDgrad) {
          return LaunchIgemmWmma<kOp, kType, WmmaTileId::k256x16ThinB>(params, ctas, stream);
        }
        break;
      default:
        break;
    }
  }
  return Status::Internal("igemm_wmma has no such row");
}

template <Op kOp>
Status LaunchType(DType dtype, WmmaTileId id, const IgemmWmmaParams& params, int64_t ctas,
                  void* stream) {
  if (dtype == DType::kF32) return LaunchTile<kOp, DType::kF32>(id, params, ctas, stream);
  if (dtype == DType::kF16) return LaunchTile<kOp, DType::kF16>(id, params, ctas, stream);
  return LaunchTile<kOp, DType::kBF16>(id, params, ctas, stream);
}

Status Launch(const Instance& instance, Op op, DType dtype, const ConvProblem& problem,
              const KernelArgs& args) {
  JAXCONV_RETURN_IF_ERROR(CanImplement(instance, op, dtype, problem));
  Plan plan;
  JAXCONV_RETURN_IF_ERROR(MakePlan(instance, problem, &plan));
  if (args.slices < 1 || args.slices > std::min(plan.blocks, kMaxSlices)) {
    return Status::InvalidArgument("slices: expected 1 to " +
                                   std::to_string(std::min(plan.blocks, kMaxSlices)) + ", got " +
                                   std::to_string(args.slices));
  }
  const int64_t workspace_bytes = WorkspaceBytes(problem, args.slices);
  JAXCONV_RETURN_IF_ERROR(CheckBuffers(args, workspace_bytes));
  IgemmWmmaParams& params = plan.params;
  params.a = args.lhs;
  params.b = args.rhs;
  params.out = workspace_bytes > 0 ? args.workspace : args.out;
  params.out_is_f32 = workspace_bytes > 0 || problem.output_dtype() == DType::kF32;
  const int64_t out_width = params.out_is_f32 ? 4 : 8;
  params.out_vector =
      params.gemm.gemm_n % out_width == 0 && params.gemm.out_channels % out_width == 0;
  params.slices = FastDivmod(args.slices);
  params.blocks_per_slice = static_cast<int32_t>(CeilDiv(plan.blocks, args.slices));
  params.slice_elements = workspace_bytes > 0 ? OutputElements(problem) : 0;
  const int64_t ctas = plan.tiles * args.slices;
  const Op kernel = KernelOp(problem);
  const Status status = kernel == Op::kFprop
                            ? LaunchType<Op::kFprop>(dtype, instance.id, params, ctas, args.stream)
                        : kernel == Op::kDgrad
                            ? LaunchType<Op::kDgrad>(dtype, instance.id, params, ctas, args.stream)
                            : LaunchType<Op::kWgrad>(dtype, instance.id, params, ctas, args.stream);
  if (!status.ok() || workspace_bytes == 0) return status;
  return LaunchSplitkReduce(static_cast<const float*>(args.workspace), OutputElements(problem),
                            args.slices, args.out, problem.output_dtype(), args.stream);
}

std::string InstanceName(const Instance& instance, Op op, DType dtype) {
  std::string name = std::string(Name(op)) + "_" + kFamily + "_" + Name(dtype) + "_" +
                     std::to_string(instance.cost.tile_m) + "x" +
                     std::to_string(instance.cost.tile_n) + "x" +
                     std::to_string(instance.cost.tile_k_bytes / ByteWidth(dtype)) + "_" +
                     std::to_string(instance.stages) + "stage";
  return name + instance.suffix;
}

}  // namespace

std::vector<KernelRow> IgemmWmmaRows() {
  std::vector<KernelRow> rows;
  for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const Instance& instance : kInstances) {
        if (!HasRow(instance, op, dtype)) continue;
        KernelRow row;
        row.name = InstanceName(instance, op, dtype);
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
