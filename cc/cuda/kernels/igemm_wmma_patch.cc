#include "cuda/kernels/igemm_wmma_patch.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "core/implicit_gemm.h"
#include "cuda/kernels/igemm_simt.h"

namespace jaxconv {
namespace {

constexpr const char* kFamily = "igemm_wmma";

struct Instance {
  PatchTileId id;
  Op op;
  const char* tile;
  int64_t extent;       // of the GEMM's narrow extent in one CTA; fprop: none
  int64_t ctas_per_sm;  // that its registers allow
  int64_t warps_k = 1;  // wgrad: that share a tile's pixels
};

constexpr Instance kInstances[] = {
    {PatchTileId::kFprop, Op::kFprop, "128x64", 0, 4},
    {PatchTileId::kDgrad16, Op::kDgrad, "256x16", 16, 5},
    {PatchTileId::kDgrad24, Op::kDgrad, "256x24", 24, 5},
    {PatchTileId::kDgrad48, Op::kDgrad, "256x48", 48, 2},
    {PatchTileId::kWgrad32, Op::kWgrad, "32x64", 32, 5, 2},
    {PatchTileId::kWgrad64, Op::kWgrad, "64x64", 64, 5},
    {PatchTileId::kWgrad192, Op::kWgrad, "192x64", 192, 3},
};

// At least two CTAs fit an SM.
constexpr int64_t kMaxSharedBytes = 100 * 1024;
constexpr int64_t kReservedBytesOfCta = 1024;
constexpr int64_t kThreads = 128;           // kPatchThreads
constexpr int64_t kPairsOfFetch = 4 * 128;  // kInFlight of every thread
constexpr int64_t kPixelsOfTile = 128;
constexpr int64_t kColumnsOfTile = 64;
constexpr int64_t kMaxWorkspaceBytes = 64'000'000;
constexpr int64_t kMaxGridY = 65535;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t FloorDiv(int64_t a, int64_t b) { return a >= 0 ? a / b : -CeilDiv(-a, b); }
int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

struct Plan {
  PatchParams params;
  int64_t shared_bytes = 0;
  int64_t grid_y = 1;
  int64_t patch_elements = 0;  // that a tile copies
};

PatchAxis MakeAxis(const ConvProblem& problem, int a) {
  PatchAxis axis;
  axis.in = static_cast<int32_t>(problem.in[a]);
  axis.out = static_cast<int32_t>(problem.out[a]);
  axis.filter = static_cast<int32_t>(problem.filter[a]);
  axis.stride = static_cast<int32_t>(problem.stride[a]);
  // One tap has no distance to the next.
  axis.dilation = static_cast<int32_t>(problem.filter[a] > 1 ? problem.dilation[a] : 1);
  axis.pad = static_cast<int32_t>(problem.pad_lo[a]);
  return axis;
}

// Bytes of `elements` as they are copied, twice if `twice`; the copies' banks differ by half.
void SetPatchBytes(int64_t elements, bool twice, PatchParams* params) {
  const int64_t bytes = RoundUp(elements * 2 + 16, 128);
  params->copy_bytes = static_cast<int32_t>(twice ? bytes + 64 : 0);
  params->patch_bytes = static_cast<int32_t>(RoundUp(params->copy_bytes + bytes, 128));
}

// Steps of a warp for each part in which the next patch is fetched.
int32_t StepsOfFetch(int64_t steps, const PatchParams& params) {
  return static_cast<int32_t>(CeilDiv(steps, CeilDiv(params.patch_pairs, kPairsOfFetch)));
}

// fprop and wgrad: the shape of a tile of 128 pixels that copies least in all.
void ShapeTile(const ConvProblem& problem, Plan* plan) {
  PatchParams& params = plan->params;
  int64_t row_elements = 0;
  double least = HUGE_VAL;
  for (int32_t log2_across = 0; log2_across <= 3; ++log2_across) {
    const int64_t rows = 8 >> log2_across, columns = int64_t{16} << log2_across;
    const int64_t patch_rows =
        (rows - 1) * params.rows.stride + (params.rows.filter - 1) * params.rows.dilation + 1;
    const int64_t patch_columns = (columns - 1) * params.columns.stride +
                                  (params.columns.filter - 1) * params.columns.dilation + 1;
    const int64_t down = CeilDiv(params.rows.out, rows);
    const int64_t across = CeilDiv(params.columns.out, columns);
    const int64_t elements = patch_rows * patch_columns * problem.c;
    // A pixel's row of y is worth about 16 elements of x.
    const double work =
        static_cast<double>(down * across) * static_cast<double>(elements + kPixelsOfTile * 16);
    if (work >= least) continue;
    least = work;
    params.log2_across = log2_across;
    params.tile_rows = static_cast<int32_t>(rows);
    params.tile_columns = static_cast<int32_t>(columns);
    params.patch_rows = static_cast<int32_t>(patch_rows);
    row_elements = patch_columns * problem.c;
    params.tiles_down = FastDivmod(down);
    params.tiles_across = FastDivmod(across);
    plan->patch_elements = elements;
  }
  // A tile's first column is a multiple of 16, so all tiles begin at elements of one parity.
  params.patch_lead = static_cast<int32_t>(std::abs(params.columns.pad * problem.c) % 2);
  params.patch_words = params.columns.in * problem.c % 2 == 0;
  const int64_t pairs = CeilDiv(row_elements + params.patch_lead, 2);
  params.patch_row_divmod = FastDivmod(pairs);
  params.patch_pairs = static_cast<int32_t>(params.patch_rows * pairs);
  params.rows_a_pass = static_cast<int32_t>(kThreads / pairs);
  params.pairs_a_pass = static_cast<int32_t>(kThreads % pairs);
}

Status PlanFprop(const ConvProblem& problem, Plan* plan) {
  PatchParams& params = plan->params;
  ShapeTile(problem, plan);
  const bool whole_rows = params.columns.dilation == 1;
  if (!whole_rows && problem.c % 2 != 0) {
    return Status::Unimplemented("a dilated filter row of an odd number of channels");
  }
  params.runs_of_row = whole_rows ? 1 : params.columns.filter;
  params.runs = params.rows.filter * params.runs_of_row;
  params.run_elements =
      static_cast<int32_t>(whole_rows ? params.columns.filter * problem.c : problem.c);
  const int64_t pairs = CeilDiv(params.run_elements, 2);
  params.pairs_of_run = FastDivmod(pairs);
  params.steps = static_cast<int32_t>(CeilDiv(params.runs * pairs, 8));
  params.steps_a_fetch = StepsOfFetch(params.steps, params);
  params.pitch = static_cast<int32_t>(params.patch_row_divmod.divisor * 2);
  SetPatchBytes(int64_t{params.patch_rows} * params.pitch,
                params.patch_lead != 0 || params.columns.stride * problem.c % 2 != 0, &params);
  plan->shared_bytes = int64_t{params.steps} * (16 * 128 + 64) + 2 * int64_t{params.patch_bytes} +
                       kThreads / 32 * 16 * kColumnsOfTile * 2;
  const int64_t parts = CeilDiv(problem.k, kColumnsOfTile);
  params.column_parts = FastDivmod(parts);
  plan->grid_y = parts * problem.batch;
  return {};
}

Status PlanWgrad(const Instance& instance, const ConvProblem& problem, Plan* plan) {
  PatchParams& params = plan->params;
  ShapeTile(problem, plan);
  const PatchAxis& columns = params.columns;
  const int64_t most =
      params.tile_columns - 1 + int64_t{columns.filter - 1} * columns.dilation / columns.stride;
  // 4 words beyond a multiple of 8: neighbouring rows of the filter meet few banks twice.
  params.pitch = static_cast<int32_t>((most + 2 + 7) / 16 * 16 + 8);
  bool odd = false;
  for (int64_t s = 0; s < columns.filter && !odd; ++s) {
    odd = s * columns.dilation / columns.stride % 2 != 0;
  }
  const int64_t row_elements = problem.c * columns.stride * params.pitch;
  const int64_t elements = params.patch_rows * row_elements;
  // Behind the last row, whichever row it is counted from.
  params.patch_spare = static_cast<int32_t>(row_elements - 1);
  SetPatchBytes(elements, odd, &params);
  plan->shared_bytes = 2 * (kPixelsOfTile * 128 + int64_t{params.patch_bytes}) +
                       int64_t{params.patch_row_divmod.divisor} * 4;
  const int64_t column_parts = CeilDiv(problem.k, kColumnsOfTile);
  const int64_t row_parts = CeilDiv(problem.taps() * problem.c, instance.extent);
  params.column_parts = FastDivmod(column_parts);
  params.row_parts = FastDivmod(row_parts);
  params.out_elements = problem.w_elements();
  params.steps_a_fetch = StepsOfFetch(kPixelsOfTile / 16 / instance.warps_k, params);
  plan->grid_y = column_parts * row_parts * problem.batch;
  return {};
}

Status PlanDgrad(const Instance& instance, const ConvProblem& problem, Plan* plan) {
  PatchParams& params = plan->params;
  const PatchAxis &rows = params.rows, &columns = params.columns;
  if (columns.filter * problem.c > instance.extent) {
    return Status::Unimplemented("C S is " + std::to_string(columns.filter * problem.c) +
                                 ", expected at most " + std::to_string(instance.extent));
  }
  const int64_t first_row = -FloorDiv((rows.filter - 1) * rows.dilation - rows.pad, rows.stride);
  const int64_t first_column =
      -FloorDiv((columns.filter - 1) * columns.dilation - columns.pad, columns.stride);
  double least = HUGE_VAL;
  for (int32_t log2_across = 0; log2_across <= 3; ++log2_across) {
    const int64_t block_rows = 16 >> log2_across, pixels = int64_t{16} << log2_across;
    // A warp's rows are four apart where it has several.
    if (log2_across < 2 && 4 % rows.stride != 0) continue;
    const int64_t tile_rows = block_rows / rows.stride * rows.stride;
    // The columns of dx whose pixels of dy all lie among `pixels`.
    const int64_t most =
        ((pixels + first_column) * columns.stride - columns.pad) / columns.stride * columns.stride;
    if (tile_rows == 0 || (pixels + first_column) * columns.stride - columns.pad < columns.stride) {
      continue;
    }
    const int64_t across = CeilDiv(columns.in, most);
    const int64_t tile_columns = RoundUp(CeilDiv(columns.in, across), columns.stride);
    const int64_t down = CeilDiv(rows.in, tile_rows);
    const int64_t patch_rows = FloorDiv(block_rows - 1 + rows.pad, rows.stride) - first_row + 1;
    const double work =
        static_cast<double>(down * across) * static_cast<double>(256 + patch_rows * pixels);
    if (work >= least) continue;
    least = work;
    params.log2_across = log2_across;
    params.tile_rows = static_cast<int32_t>(tile_rows);
    params.tile_columns = static_cast<int32_t>(tile_columns);
    params.patch_rows = static_cast<int32_t>(patch_rows);
    params.tiles_down = FastDivmod(down);
    params.tiles_across = FastDivmod(across);
    plan->patch_elements = patch_rows * pixels * 64;
  }
  if (least == HUGE_VAL) return Status::Unimplemented("strides and filter fit no tile");
  params.first_row = static_cast<int32_t>(first_row);
  params.first_column = static_cast<int32_t>(first_column);
  params.row_period = rows.stride / std::gcd(rows.dilation, rows.stride);
  params.column_period = columns.stride / std::gcd(columns.dilation, columns.stride);
  params.steps = static_cast<int32_t>(CeilDiv(problem.k, 16));
  const int64_t blocks_n = instance.extent / 8;
  const int64_t z_pitch = blocks_n <= 3 ? 24 : 56;  // kDgradPitch
  const int64_t z_bytes = 256 * z_pitch * 4;
  params.z_step =
      static_cast<int32_t>(params.column_period * problem.c -
                           columns.dilation * params.column_period / columns.stride * z_pitch);
  params.patch_bytes = static_cast<int32_t>(std::max(plan->patch_elements * 2, z_bytes));
  plan->shared_bytes = params.patch_bytes + int64_t{rows.filter} * params.steps * blocks_n * 256 +
                       params.tile_columns * problem.c * 8;
  plan->grid_y = problem.batch;
  return {};
}

Status MakePlan(const Instance& instance, const ConvProblem& problem, Plan* plan) {
  PatchParams& params = plan->params;
  params.rows = MakeAxis(problem, 1);
  params.columns = MakeAxis(problem, 2);
  params.c = static_cast<int32_t>(problem.c);
  params.k = static_cast<int32_t>(problem.k);
  params.k_vector = problem.k % 8 == 0;
  const int64_t x = problem.x_elements() / problem.batch;
  const int64_t w = problem.w_elements() / problem.batch;
  const int64_t y = problem.y_elements() / problem.batch;
  params.lhs_batch = problem.op == Op::kDgrad ? y : x;
  params.rhs_batch = problem.op == Op::kWgrad ? y : w;
  params.out_batch = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : w;
  params.c_divmod = FastDivmod(problem.c);
  params.row_stride_divmod = FastDivmod(problem.stride[1]);
  params.column_stride_divmod = FastDivmod(problem.stride[2]);
  JAXCONV_RETURN_IF_ERROR(problem.op == Op::kFprop   ? PlanFprop(problem, plan)
                          : problem.op == Op::kDgrad ? PlanDgrad(instance, problem, plan)
                                                     : PlanWgrad(instance, problem, plan));
  if (plan->shared_bytes > kMaxSharedBytes) {
    return Status::Unimplemented("a tile needs " + std::to_string(plan->shared_bytes) +
                                 " bytes of shared memory, expected at most " +
                                 std::to_string(kMaxSharedBytes));
  }
  if (plan->grid_y > kMaxGridY) return Status::Unimplemented("too many batches for the grid");
  params.tiles =
      static_cast<int32_t>(problem.n * params.tiles_down.divisor * params.tiles_across.divisor);
  return {};
}

Status CanImplement(const Instance& instance, DType dtype, const ConvProblem& problem) {
  if (problem.op != instance.op) {
    return Status::Unimplemented(std::string("expected ") + Name(instance.op) + ", got " +
                                 Name(problem.op));
  }
  for (DType of : {problem.x_dtype, problem.w_dtype, problem.y_dtype}) {
    if (of != dtype) {
      return Status::Unimplemented(std::string("expected tensors of type ") + Name(dtype) +
                                   ", got " + Name(of));
    }
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireRsck());
  if (problem.groups != 1) return Status::Unimplemented("patches of one group only");
  if (problem.in[0] != 1 || problem.filter[0] != 1 || problem.out[0] != 1) {
    return Status::Unimplemented("patches have two axes");
  }
  for (int64_t dilation : problem.lhs_dilation) {
    if (dilation != 1) return Status::Unimplemented("patches without lhs_dilation only");
  }
  if (problem.op != Op::kFprop && problem.k % 8 != 0) {
    return Status::Unimplemented("K " + std::to_string(problem.k) + " is not a multiple of 8");
  }
  // The sizes that 32-bit coordinates hold.
  ImplicitGemm gemm;
  JAXCONV_RETURN_IF_ERROR(MakeImplicitGemm(problem, &gemm));
  if (problem.in_pixels() * problem.c >= (int64_t{1} << 31)) {
    return Status::Unimplemented("an image of 2^31 elements");
  }
  Plan plan;
  return MakePlan(instance, problem, &plan);
}

int64_t OutputElements(const ConvProblem& problem) {
  return problem.op == Op::kFprop   ? problem.y_elements()
         : problem.op == Op::kDgrad ? problem.x_elements()
                                    : problem.w_elements();
}

// wgrad sums through the workspace even in one slice: there is one way to store the sums.
int64_t WorkspaceBytes(const ConvProblem& problem, int64_t slices) {
  return problem.op == Op::kWgrad ? slices * problem.w_elements() * int64_t{sizeof(float)} : 0;
}

// 0 where an SM does not hold one.
int64_t CtasOfSm(const Instance& instance, const Plan& plan, const DeviceInfo& device) {
  return std::min(instance.ctas_per_sm, (device.smem_per_block_optin + kReservedBytesOfCta) /
                                            (plan.shared_bytes + kReservedBytesOfCta));
}

int64_t Slices(const Instance& instance, const ConvProblem& problem, const DeviceInfo& device) {
  Plan plan;
  if (problem.op != Op::kWgrad || !MakePlan(instance, problem, &plan).ok()) return 1;
  const int64_t slots = device.sm_count * CtasOfSm(instance, plan, device) / plan.grid_y;
  const int64_t most =
      std::min<int64_t>(plan.params.tiles, kMaxWorkspaceBytes / WorkspaceBytes(problem, 1));
  return std::max<int64_t>(1, std::min(slots, most));
}

// Cycles of a tile: what it takes of its SM, and how long it lasts where few CTAs share the SM. As
// all constants of Cost fitted to 70 timings on an H200 (docs/notes/igemm_wmma.md), within 10 %.
struct TileCycles {
  double start = 0;  // of a CTA: the filter or the tables
  double work = 0, latency = 0;
};

TileCycles CyclesOfTile(const Instance& instance, const ConvProblem& problem, const Plan& plan) {
  const PatchParams& params = plan.params;
  const auto elements = static_cast<double>(plan.patch_elements);
  const double steps = params.steps;
  if (problem.op == Op::kFprop) {
    const double twice = params.copy_bytes > 0 ? 1.19 : 1.0;
    const double pairwise_stores = params.k_vector != 0 ? 0 : 2200;
    const double work = 375 + 0.42 * elements * twice + 157 * steps + pairwise_stores;
    return {300, work, work + 2900 + 630 * steps};
  }
  if (problem.op == Op::kDgrad) {
    const double copies = elements / 64 * std::ceil(steps / 4);
    const double products = static_cast<double>(params.rows.filter) / params.rows.stride * steps *
                            static_cast<double>(instance.extent);
    const double outputs = static_cast<double>(params.tile_rows) * params.tile_columns * params.c;
    const double work = 210 + 1.07 * copies + 6.4 * products + 0.46 * outputs;
    return {6700, work, work + 4800};
  }
  const double work = 880 + 0.34 * elements + 6.8 * static_cast<double>(instance.extent);
  return {5500, work, work + 2600};
}

double Cost(const Instance& instance, const ConvProblem& problem, const DeviceInfo& device,
            int64_t slices) {
  Plan plan;
  if (!MakePlan(instance, problem, &plan).ok()) return HUGE_VAL;
  constexpr double kCyclesPerMicrosecond = 1750;
  constexpr double kLaunchCycles = 1500;
  constexpr double kDramBytesPerCycle = 13.4;  // of an SM's share
  constexpr double kPartialBytesPerCycle = 20;
  const bool wgrad = problem.op == Op::kWgrad;
  const int64_t tiles = plan.params.tiles;
  const int64_t resident = CtasOfSm(instance, plan, device);
  if (resident == 0) return HUGE_VAL;
  const int64_t ctas =
      wgrad ? slices : std::clamp<int64_t>(device.sm_count * resident / plan.grid_y, 1, tiles);
  const int64_t active = std::min(resident, CeilDiv(ctas * plan.grid_y, device.sm_count));
  const int64_t waves = CeilDiv(ctas * plan.grid_y, device.sm_count * resident);
  const TileCycles tile = CyclesOfTile(instance, problem, plan);
  double cycles = tile.start + static_cast<double>(CeilDiv(tiles, ctas) * waves) *
                                   std::max(static_cast<double>(active) * tile.work, tile.latency);
  const double bytes =
      2.0 * static_cast<double>(problem.x_elements() + problem.w_elements() + problem.y_elements());
  cycles = std::max(cycles, bytes / (kDramBytesPerCycle * device.sm_count)) + kLaunchCycles;
  if (wgrad) {
    cycles += kLaunchCycles + 2 * static_cast<double>(WorkspaceBytes(problem, slices)) /
                                  (kPartialBytesPerCycle * device.sm_count);
  }
  return cycles / kCyclesPerMicrosecond;
}

template <DType kType>
Status LaunchTile(PatchTileId id, const Plan& plan, int64_t ctas, void* stream) {
  auto launch = [&](auto function) {
    return function(plan.params, plan.shared_bytes, ctas, plan.grid_y, stream);
  };
  switch (id) {
    case PatchTileId::kFprop:
      return launch(LaunchPatch<kType, PatchTileId::kFprop>);
    case PatchTileId::kDgrad16:
      return launch(LaunchPatch<kType, PatchTileId::kDgrad16>);
    case PatchTileId::kDgrad24:
      return launch(LaunchPatch<kType, PatchTileId::kDgrad24>);
    case PatchTileId::kDgrad48:
      return launch(LaunchPatch<kType, PatchTileId::kDgrad48>);
    case PatchTileId::kWgrad32:
      return launch(LaunchPatch<kType, PatchTileId::kWgrad32>);
    case PatchTileId::kWgrad64:
      return launch(LaunchPatch<kType, PatchTileId::kWgrad64>);
    case PatchTileId::kWgrad192:
      return launch(LaunchPatch<kType, PatchTileId::kWgrad192>);
  }
  return Status::Internal("igemm_wmma has no such patch");
}

Status Launch(const Instance& instance, DType dtype, const ConvProblem& problem,
              const KernelArgs& args) {
  JAXCONV_RETURN_IF_ERROR(CanImplement(instance, dtype, problem));
  Plan plan;
  JAXCONV_RETURN_IF_ERROR(MakePlan(instance, problem, &plan));
  const bool wgrad = problem.op == Op::kWgrad;
  const int64_t most = wgrad ? plan.params.tiles : 1;
  if (args.slices < 1 || args.slices > most) {
    return Status::InvalidArgument("slices: expected 1 to " + std::to_string(most) + ", got " +
                                   std::to_string(args.slices));
  }
  JAXCONV_RETURN_IF_ERROR(CheckBuffers(args, WorkspaceBytes(problem, args.slices)));
  plan.params.lhs = args.lhs;
  plan.params.rhs = args.rhs;
  plan.params.out = wgrad ? args.workspace : args.out;
  const int64_t ctas = wgrad ? args.slices : 0;
  const Status status = dtype == DType::kF16
                            ? LaunchTile<DType::kF16>(instance.id, plan, ctas, args.stream)
                            : LaunchTile<DType::kBF16>(instance.id, plan, ctas, args.stream);
  if (!status.ok() || !wgrad) return status;
  return LaunchSplitkReduce(static_cast<const float*>(args.workspace), OutputElements(problem),
                            args.slices, args.out, dtype, args.stream);
}

}  // namespace

std::vector<KernelRow> IgemmWmmaPatchRows() {
  std::vector<KernelRow> rows;
  for (const Instance& instance : kInstances) {
    for (DType dtype : {DType::kF16, DType::kBF16}) {
      KernelRow row;
      row.name = std::string(Name(instance.op)) + "_" + kFamily + "_" + Name(dtype) + "_" +
                 instance.tile + "_patch";
      row.family = kFamily;
      row.op = instance.op;
      row.min_cc = 80;
      row.can_implement = [&instance, dtype](const ConvProblem& problem) {
        return CanImplement(instance, dtype, problem);
      };
      row.slices = [&instance](const ConvProblem& problem, const DeviceInfo& device) {
        return Slices(instance, problem, device);
      };
      row.workspace_bytes = WorkspaceBytes;
      row.cost = [&instance](const ConvProblem& problem, const DeviceInfo& device, int64_t slices) {
        return Cost(instance, problem, device, slices);
      };
      row.launch = [&instance, dtype](const ConvProblem& problem, const KernelArgs& args) {
        return Launch(instance, dtype, problem, args);
      };
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace jaxconv
