#include "cuda/igemm_wgmma/plan.h"

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

#include "core/implicit_gemm.h"
#include "cuda/common/epilogue_cost.h"
#include "cuda/common/instances.h"
#include "cuda/igemm_wgmma/cost.h"
#include "cuda/igemm_wgmma/geometry.h"

namespace jaxconv::igemm_wgmma {
namespace {

// Partial results of split-K take at most this much workspace.
constexpr int64_t kMaxWorkspaceBytes = 64'000'000;
// A slice of fewer k-blocks takes longer to fill the ring than to multiply.
constexpr int64_t kMinKBlocksPerSlice = 4;
// Tiles are scheduled dynamically above this many bytes of activations, read and written: with 205
// MB dynamic scheduling is 3 to 5 % faster, with 128 MB 4 % slower. Without a stationary filter
// also only below this many operations a byte: with 85 it is 10 % faster, with 102 1 % slower.
constexpr int64_t kDynamicFromBytes = 200'000'000;
constexpr int64_t kDynamicOperationsPerByte = 100;
// And only if a tile moves at least this many bytes: the atomic for a tile takes 0.95 us, in which
// an SM moves about 32 KB. Tiles of 14 KB (16 to 96 channels of 112x112 maps) made a layer twice as
// slow.
constexpr int64_t kDynamicTileBytes = 32 * 1024;

// Consumer warpgroups of a pingpong CTA.
constexpr int64_t kConsumers = 2;

// Cycles of a consumer for the statistics of an output, without the merging kernel: where the form
// hides a part of them, as long as an epilogue in straight lines; in other swap-AB forms as one in
// a loop; and elsewhere. Hidden are those of reductions of at least kLongSum, of weight-stationary
// forms, and of pointwise swap-AB, which TMA stores. Fitted to few times.
constexpr int64_t kLongSum = 1024;
constexpr double kStatistics = 0.26;

// The line of each form of kernels.def, from its arguments. Those of the pipeline (stages, staging,
// filter slots) matter to the device kernel alone.
constexpr int64_t kBlockRows = 64;       // of one wgmma
constexpr int64_t kSwapAbChannels = 64;  // of a swap-AB tile: one block of rows
constexpr Instance CooperativeLine(int64_t consumers, int64_t blocks, int64_t columns,
                                   int64_t second_columns, int64_t /*stages*/) {
  return {0, consumers * blocks * kBlockRows, columns + second_columns};
}
constexpr Instance PingpongLine(int64_t blocks, int64_t columns, int64_t /*stages*/,
                                int64_t /*staging*/) {
  return {kPingpong, blocks * kBlockRows, columns};
}
constexpr Instance PingpongC48Line(int64_t blocks, int64_t columns, int64_t /*stages*/,
                                   int64_t /*staging*/) {
  return {kPingpong | kC48, blocks * kBlockRows, columns};
}
constexpr Instance PatchesLine(int64_t blocks, int64_t columns, int64_t /*stages*/,
                               int64_t /*staging*/) {
  return {kPingpong | kPatches, blocks * kBlockRows, columns};
}
constexpr Instance FilterRowLine(int64_t blocks, int64_t columns, int64_t /*stages*/,
                                 int64_t /*slots*/) {
  return {kPingpong | kFilterRow, blocks * kBlockRows, columns};
}
constexpr Instance WeightStationaryLine(int64_t blocks, int64_t columns, int64_t /*stages*/,
                                        int64_t kept) {
  return {kPingpong | kFilterRow, blocks * kBlockRows, columns, kept};
}
constexpr Instance PointwiseLine(int64_t blocks, int64_t columns, int64_t /*stages*/, int64_t kept,
                                 bool /*whole_rows*/) {
  return {kPingpong | kPointwise, blocks * kBlockRows, columns, kept};
}
constexpr Instance SwapAbLine(int64_t pixels, int64_t /*stages*/) {
  return {kPingpong | kSwapAb, pixels, kSwapAbChannels};
}
constexpr Instance SwapAbFilterRowLine(int64_t pixels, int64_t /*stages*/, int64_t /*slots*/) {
  return {kPingpong | kSwapAb | kFilterRow, pixels, kSwapAbChannels};
}
constexpr Instance SwapAbWeightStationaryLine(int64_t pixels, int64_t /*stages*/, int64_t kept) {
  return {kPingpong | kSwapAb | kFilterRow, pixels, kSwapAbChannels, kept};
}
constexpr Instance PointwiseSwapAbLine(int64_t pixels, int64_t /*stages*/, int64_t kept) {
  return {kPingpong | kSwapAb | kPointwise, pixels, kSwapAbChannels, kept};
}
constexpr Instance ClusterLine(int64_t columns, int64_t /*stages*/) {
  return {kCluster, kBlockRows, columns};
}
constexpr Instance ThreeTf32Line(int64_t consumers, int64_t columns, int64_t /*stages*/) {
  return {kThreeTf32, consumers * kBlockRows, columns};
}
constexpr Instance WgradCooperativeLine(int64_t consumers, int64_t blocks, int64_t columns,
                                        int64_t second_columns, int64_t stages) {
  return CooperativeLine(consumers, blocks, columns, second_columns, stages);
}
constexpr Instance WgradPingpongLine(int64_t blocks, int64_t columns, int64_t /*stages*/) {
  return {kPingpong, blocks * kBlockRows, columns};
}
constexpr Instance WgradFilterRowLine(int64_t /*stages*/) {
  return {kFilterRow, kWgradRowTaps * kBlockRows, 64};
}
constexpr Instance WgradTf32FilterRowLine(int64_t /*stages*/) {
  return {kFilterRow | kTransposesDy, kTf32WgradRowUnits * kWgradRowTaps * kBlockRows, 64};
}
constexpr Instance WgradTf32Line(int64_t blocks, int64_t columns, int64_t /*stages*/) {
  return {kTransposesDy, 2 * blocks * kBlockRows, columns};
}
constexpr Instance WgradMmaSyncLine(int64_t warps_m, int64_t warps_n, int64_t rows, int64_t columns,
                                    int64_t /*stages*/) {
  return {kMmaSync, warps_m * rows, warps_n * columns};
}
constexpr Instance WgradThreeTf32Line(int64_t columns, int64_t /*stages*/) {
  return {kThreeTf32, 2 * kBlockRows, columns};
}

// Whether the fused form of an instance forms the statistics of y (statistics_sm90.cuh): pingpong
// forms with 16-bit results whose tiles are rows of the output.
bool HasStatistics(const KernelDesc& kernel) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  if (kernel.op != Op::kFprop || kernel.dtype == DType::kF32) return false;
  return instance.Is(kPingpong) && (instance.Is(kSwapAb) || !instance.Is(kFilterRow));
}

double StatisticsCycles(const Instance& instance, const ConvProblem& problem) {
  if (instance.Is(kSwapAb)) {
    return instance.Is(kPointwise) ? EpilogueCost::kStraightCycles : EpilogueCost::kLoopCycles;
  }
  const bool hidden =
      instance.WeightStationary() || problem.taps() * problem.c_per_group() >= kLongSum;
  return hidden ? EpilogueCost::kStraightCycles : kStatistics;
}

int64_t PartialBytes(const Instance& instance, const Geometry& geometry, int64_t slices) {
  return slices > 1 && !instance.Is(kCluster)
             ? slices * geometry.launch.output_elements * int64_t{sizeof(float)}
             : 0;
}

// Whether tiles are scheduled dynamically. SMs progress at different speeds; dynamic scheduling
// makes them end together, at the price of a launch that resets the counters.
bool Dynamic(const Instance& instance, const ConvProblem& problem) {
  if (!instance.Is(kPointwise)) return false;
  // A stride skips pixels of x.
  const int64_t pixels = problem.batch * problem.n * problem.out_pixels();
  const int64_t bytes =
      std::min(problem.x_elements(), pixels * problem.c) * ByteWidth(problem.x_dtype) +
      problem.y_elements() * ByteWidth(problem.y_dtype);
  const int64_t tile_bytes =
      bytes /
      (pixels * CeilDiv(problem.op == Op::kDgrad ? problem.c : problem.k, instance.tile_n)) *
      instance.tile_m;
  return bytes >= kDynamicFromBytes && tile_bytes >= kDynamicTileBytes &&
         (instance.WeightStationary() || problem.flops() < kDynamicOperationsPerByte * bytes);
}

// All slices but the last have the same length; none may be empty, except in clusters. wgrad
// filter-row assigns its k-blocks round-robin.
bool NoneEmpty(const Instance& instance, const ConvProblem& problem, int64_t k_blocks,
               int64_t slices) {
  if (problem.op == Op::kWgrad && instance.Is(kFilterRow)) return slices <= k_blocks;
  return instance.Is(kCluster) || CeilDiv(k_blocks, CeilDiv(k_blocks, slices)) == slices;
}

int64_t MostSlices(const Instance& instance, const ConvProblem& problem, const Geometry& geometry) {
  // Statistics need complete sums, so no split-K.
  if (problem.epilogue.statistics) return 1;
  if (instance.Is(kCluster)) return std::min<int64_t>(geometry.k_blocks, kMaxClusterCtas);
  // Residue classes have reductions of different lengths, and a stationary filter holds the whole
  // reduction.
  if (geometry.launch.kernel.residue_classes > 1 || instance.WeightStationary() ||
      instance.Is(kPointwise) || instance.Is(kPatches)) {
    return 1;
  }
  const auto taps =
      static_cast<int64_t>(static_cast<double>(geometry.k_blocks) * geometry.taps_per_stage);
  const int64_t partial = std::max<int64_t>(1, PartialBytes(instance, geometry, 2) / 2);
  return std::max<int64_t>(
      1, std::min({taps / kMinKBlocksPerSlice, kMaxWorkspaceBytes / partial, kMaxSlices}));
}

// Tiles whose statistics a consumer joins into one slot. This needs CTAs that stay in one range of
// columns. Static scheduling joins all tiles. Dynamic scheduling joins the first 7/8 of the rounds,
// which are assigned round-robin: no SM falls further behind than the rest.
void JoinTiles(const Params& params, int64_t ctas, bool dynamic, EpilogueParams* epilogue) {
  const int64_t n_tiles = params.n_tiles.divisor, m_tiles = params.m_tiles.divisor;
  if (params.groups.divisor > 1 || ctas % n_tiles != 0) return;
  const int64_t rounds = m_tiles * n_tiles / ctas;
  const int64_t joined = dynamic ? rounds * 7 / 8 * ctas / n_tiles : m_tiles;
  const int64_t slots = kConsumers * ctas / n_tiles;
  if (slots >= joined) return;
  epilogue->joined_tiles = static_cast<int32_t>(joined);
  epilogue->joined_slots = static_cast<int32_t>(slots);
}

// The instance whose device code reads the filter as it is stored: for krsc, dgrad's code serves
// fprop and fprop's serves dgrad. Both are of one line of kernels.def, which has one description.
const KernelDesc* KernelOf(const KernelDesc& kernel, const ConvProblem& problem) {
  const Op op = KernelOp(problem);
  if (op == kernel.op) return &kernel;
  static const std::vector<KernelDesc> kernels = Kernels();
  for (const KernelDesc& other : kernels) {
    if (other.op == op && other.instance == kernel.instance && other.dtype == kernel.dtype) {
      return &other;
    }
  }
  return nullptr;
}

Status PlanIgemmWgmma(const KernelDesc& kernel, const ConvProblem& asked, const Gpu& gpu,
                      int64_t slices, Plan* plan) {
  const Instance& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, asked, /*tf32=*/true));
  ConvProblem problem = asked;
  if (instance.Is(kPatches)) JAXCONV_RETURN_IF_ERROR(PatchesAsPixels(asked, &problem));
  Geometry geometry;
  JAXCONV_RETURN_IF_ERROR(MakeGeometry(instance, problem, &geometry));
  if (instance.Is(kPatches)) StorePatches(asked, &geometry.launch);
  if (problem.epilogue.statistics && geometry.launch.kernel.residue_classes > 1) {
    return Refuse("statistics of one residue class", geometry.launch.kernel.residue_classes);
  }
  const int64_t most = MostSlices(instance, problem, geometry);
  const bool dynamic = Dynamic(instance, problem);
  plan->form = FormTimeOf(instance.Is(kTransposesDy) ? "igemm_wgmma transposing" : "igemm_wgmma",
                          OperationsName(problem),
                          OperandsName(problem, /*tf32=*/true, instance.Is(kThreeTf32)), gpu);
  const bool clamps = ActivationFactor(problem.epilogue.activation) == 0 && !problem.epilogue.pre;
  const double epilogue_cycles = problem.epilogue.statistics ? StatisticsCycles(instance, problem)
                                 : kernel.fused
                                     ? EpilogueCycles(kernel.epilogue_cost, problem.epilogue)
                                     : 0;
  auto terms = [&](int64_t count) {
    const int64_t partial_bytes = PartialBytes(instance, geometry, count);
    return TermsOf(instance, problem, geometry,
                   {count, partial_bytes, dynamic, epilogue_cycles, clamps}, gpu);
  };
  auto microseconds = [&](int64_t count) {
    return PredictedMicroseconds(terms(count), plan->form);
  };
  if (slices == 0) {
    slices = 1;
    plan->microseconds = microseconds(1);
    for (int64_t count = 2; count <= most; ++count) {
      if (!NoneEmpty(instance, problem, geometry.k_blocks, count)) continue;
      const double us = microseconds(count);
      if (us < plan->microseconds) plan->microseconds = us, slices = count;
    }
  } else if (slices > most) {
    return Status::InvalidArgument("slices: expected 1 to " + std::to_string(most) + ", got " +
                                   std::to_string(slices));
  } else if (!NoneEmpty(instance, problem, geometry.k_blocks, slices)) {
    return Status::InvalidArgument("slices: " + std::to_string(slices) + " slices of " +
                                   std::to_string(geometry.k_blocks) + " k-blocks leave one empty");
  } else {
    plan->microseconds = microseconds(slices);
  }

  plan->terms = terms(slices);
  auto launch = std::make_shared<LaunchParams>(geometry.launch);
  Params& params = launch->kernel;
  const int64_t partial_bytes = PartialBytes(instance, geometry, slices);
  const int64_t grid_slices = instance.Is(kCluster) ? 1 : slices;
  params.cluster = FastDivmod(slices / grid_slices);
  params.slices = FastDivmod(grid_slices);
  params.k_blocks_per_slice = static_cast<int32_t>(CeilDiv(geometry.k_blocks, grid_slices));
  params.epilogue = EpilogueParams(problem.epilogue);
  params.slice_elements = partial_bytes > 0 ? launch->output_elements : 0;
  params.out_is_f32 = partial_bytes > 0 || launch->output_is_f32;
  params.tiles = static_cast<int32_t>(geometry.tiles * grid_slices);
  // A cluster processes one tile; other forms are persistent. With a stationary filter a CTA stays
  // in its range of output channels.
  const int64_t ranges = instance.WeightStationary() ? params.n_tiles.divisor : 1;
  const int64_t persistent = std::max<int64_t>(1, gpu.sm_count / ranges) * ranges;
  launch->ctas = static_cast<int32_t>(
      instance.Is(kCluster) ? params.tiles * slices : std::min<int64_t>(params.tiles, persistent));
  // The workspace holds the transposed or split filter, then the partial results; or the counters.
  if (SplitsFilter(instance, problem)) {
    launch->partial_offset = launch->filter_split.bytes();
  } else if (TransposesFilter(problem)) {
    launch->transposes_filter = true;
    launch->partial_offset = problem.w_elements() * int64_t{sizeof(float)};
  }
  launch->resets_counters = dynamic;
  const int64_t counter_bytes = dynamic ? kTileCounters * int64_t{sizeof(int32_t)} : 0;
  if (problem.epilogue.statistics) {
    launch->moments_offset = (launch->partial_offset + counter_bytes + 15) / 16 * 16;
    JoinTiles(params, launch->ctas, dynamic, &params.epilogue);
    launch->moments = {
        params.epilogue.joined_slots + params.m_tiles.divisor - params.epilogue.joined_tiles,
        problem.k};
    launch->rows = problem.n * problem.out_pixels();
    plan->terms.launch += launch->moments.Microseconds(gpu);
    plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  }
  launch->reduced_slices = grid_slices;
  plan->kernel = KernelOf(kernel, problem);
  plan->slices = slices;
  plan->workspace_bytes = launch->moments.slots > 0
                              ? launch->moments_offset + launch->moments.Bytes()
                              : launch->partial_offset + partial_bytes + counter_bytes;
  plan->params = std::move(launch);
  return {};
}

// Cycles of a consumer for an output. Scale, bias and a clamp on the fragments of 16-bit results;
// behind slots (slot_store_sm90.cuh) they take straight lines. Those of float32 results take as
// long as a loop over twice as many outputs. Other activations of 16-bit results take a loop, and
// silu in it as long again. So does a residual, whose latency is exposed but behind slots. Silu
// takes twice as much in float32 and where nothing hides it: 192 accumulators leave few registers,
// and with a stationary filter the main loop is too short. So does a residual with 192
// accumulators, which leave no registers to load ahead, and in swap-AB, whose warps synchronise
// twice for 32 pixels. Fitted to 300 times of fused layers.
constexpr double kClampCycles = 0.14;

EpilogueCost EpilogueCostOf(const KernelDesc& kernel) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  EpilogueCost cost;
  cost.in_plan = true;
  const bool wide = kernel.dtype == DType::kF32;
  const bool slots = instance.Is(kPointwise) && !instance.Is(kSwapAb);
  const bool full = !wide && instance.tile_m == 192;
  const bool exposed = full || (slots && instance.WeightStationary());
  if (wide) cost.terms = 2 * EpilogueCost::kLoopCycles;
  cost.clamps = wide ? cost.terms : slots ? EpilogueCost::kStraightCycles : kClampCycles;
  cost.activation = EpilogueCost::kLoopCycles * (wide || exposed ? 2 : 1);
  cost.residual = slots ? 0 : EpilogueCost::kLoopCycles * (full || instance.Is(kSwapAb) ? 2 : 1);
  return cost;
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments)                                   \
  JAXCONV_ADD_KERNELS(all, ops, types, igemm_wgmma, variant, 90, 90, PlanIgemmWgmma, Instance, \
                      form##Line arguments)
#define PADDED(...)
#define FUSED(...)
#include "cuda/igemm_wgmma/kernels.def"
  for (KernelDesc& kernel : all) {
    kernel.epilogue_cost = EpilogueCostOf(kernel);
    kernel.statistics = HasStatistics(kernel);
    kernel.three_tf32 = static_cast<const Instance*>(kernel.instance)->Is(kThreeTf32);
  }
  return all;
}

}  // namespace jaxconv::igemm_wgmma
