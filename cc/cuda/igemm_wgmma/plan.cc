#include "cuda/igemm_wgmma/plan.h"

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

#include "core/implicit_gemm.h"
#include "cuda/common/instances.h"
#include "cuda/igemm_wgmma/cost.h"
#include "cuda/igemm_wgmma/geometry.h"

namespace jaxconv::igemm_wgmma {
namespace {

// Partial results of split-K take at most this much workspace.
constexpr int64_t kMaxWorkspaceBytes = 64'000'000;
// A slice of fewer k-blocks spends more time on filling the ring than on its sum.
constexpr int64_t kMinKBlocksPerSlice = 4;
// Dynamic scheduling pays from so many bytes of activations on, those read and those written: 205
// MB are 3 to 5 % faster so, 128 MB 4 % slower. And, without a stationary filter, up to so many
// operations a byte: 85 are 10 % faster, 102 1 % slower.
constexpr int64_t kDynamicFromBytes = 200'000'000;
constexpr int64_t kDynamicOperationsPerByte = 100;
// And where a tile moves so many bytes: taking a tile from the counter takes 0.95 us, in which an
// SM moves about 32 KB. A tile of 14 KB (16 to 96 channels of 112x112 maps) made a layer twice as
// slow.
constexpr int64_t kDynamicTileBytes = 32 * 1024;

// Of a pingpong CTA.
constexpr int64_t kConsumers = 2;

// Nanoseconds of an SM for an output whose statistics are formed, beside the merging kernel. With
// pixels as rows: where sums of so many products hide the store, and where not; where the filter
// stays, by whether at most 128 channels leave memory time for it. Of swap-AB: where it is
// pointwise, stored by TMA, or not.
constexpr int64_t kLongSum = 1024;
constexpr double kLongSumStatistics = 0.018, kShortSumStatistics = 0.065;
constexpr double kStationaryStatistics = 0.035, kStationaryStatisticsC128 = 0.015;
constexpr double kPointwiseSwapAbStatistics = 0.006, kSwapAbStatistics = 0.016;

// The forms' traits, by the names in kernels.def.
constexpr uint32_t kTraitsOfCooperative = 0, kTraitsOfWgradCooperative = 0,
                   kTraitsOfWgradMmaSync = 0, kTraitsOfPingpong = kPingpong,
                   kTraitsOfWgradPingpong = kPingpong, kTraitsOfSwapAb = kPingpong | kSwapAb,
                   kTraitsOfFilterRow = kPingpong | kFilterRow,
                   kTraitsOfWeightStationary = kPingpong | kFilterRow,
                   kTraitsOfSwapAbFilterRow = kPingpong | kSwapAb | kFilterRow,
                   kTraitsOfSwapAbWeightStationary = kPingpong | kSwapAb | kFilterRow,
                   kTraitsOfPatches = kPingpong | kPatches, kTraitsOfPingpongC48 = kPingpong | kC48,
                   kTraitsOfPointwise = kPingpong | kPointwise,
                   kTraitsOfPointwiseSwapAb = kPingpong | kSwapAb | kPointwise,
                   kTraitsOfThreeTf32 = kThreeTf32, kTraitsOfWgradThreeTf32 = kThreeTf32,
                   kTraitsOfCluster = kCluster, kTraitsOfWgradFilterRow = kFilterRow;

// Whether the fused form of an instance gives the statistics of y (statistics_sm90.cuh): of 16-bit
// results in pingpong, whose tiles lie in the output's rows.
bool HasStatistics(const KernelDesc& kernel) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  if (kernel.op != Op::kFprop || kernel.dtype == DType::kF32) return false;
  return instance.Is(kPingpong) && (instance.Is(kSwapAb) || !instance.Is(kFilterRow));
}

double StatisticsNanoseconds(const Instance& instance, const ConvProblem& problem) {
  if (instance.Is(kSwapAb)) {
    return instance.Is(kPointwise) ? kPointwiseSwapAbStatistics : kSwapAbStatistics;
  }
  if (instance.WeightStationary()) {
    return instance.stationary_k_blocks < 4 ? kStationaryStatisticsC128 : kStationaryStatistics;
  }
  return problem.taps() * problem.c_per_group() >= kLongSum ? kLongSumStatistics
                                                            : kShortSumStatistics;
}

int64_t PartialBytes(const Instance& instance, const Geometry& geometry, int64_t slices) {
  return slices > 1 && !instance.Is(kCluster)
             ? slices * geometry.launch.output_elements * int64_t{sizeof(float)}
             : 0;
}

// Whether tiles are scheduled dynamically: SMs progress at different speeds, and so they end at the
// same time, at the price of a launch that resets the counters.
bool Dynamic(const Instance& instance, const ConvProblem& problem) {
  if (!instance.dynamic) return false;
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

// Slices have the same length but the last; none may be empty, except in clusters. Wgrad filter-row
// deals its loads out in turn.
bool NoneEmpty(const Instance& instance, const ConvProblem& problem, int64_t k_blocks,
               int64_t slices) {
  if (problem.op == Op::kWgrad && instance.Is(kFilterRow)) return slices <= k_blocks;
  return instance.Is(kCluster) || CeilDiv(k_blocks, CeilDiv(k_blocks, slices)) == slices;
}

int64_t MostSlices(const Instance& instance, const ConvProblem& problem, const Geometry& geometry) {
  // The moments of a tile are those of whole sums.
  if (problem.epilogue.statistics) return 1;
  if (instance.Is(kCluster)) return std::min<int64_t>(geometry.k_blocks, kMaxClusterCtas);
  // Residue classes have reductions of different lengths, and a stationary filter is whole.
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

// Which tiles' sums the consumers of a CTA join: where a CTA keeps to a range of columns, all tiles
// that are the CTAs' in turn, and of dynamically scheduled ones so many as no SM is behind with.
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

// The instance whose device code reads the filter as it is stored: fprop's of dgrad's krsc, and the
// reverse.
const KernelDesc* KernelOf(const KernelDesc& kernel, const ConvProblem& problem) {
  if (KernelOp(problem) == kernel.op) return &kernel;
  const std::string_view rest = std::string_view(kernel.name).substr(5);  // past "fprop" or "dgrad"
  static const std::vector<KernelDesc> kernels = Kernels();
  for (const KernelDesc& other : kernels) {
    const std::string_view name = other.name;
    if (other.op == KernelOp(problem) && name.substr(5) == rest) return &other;
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
  auto microseconds = [&](int64_t count) {
    return PredictMicroseconds(instance, problem, geometry, count,
                               PartialBytes(instance, geometry, count), dynamic, gpu);
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
  // A cluster's CTAs have one tile; others are persistent. With a stationary filter a CTA keeps its
  // range of output channels.
  const int64_t ranges = instance.WeightStationary() ? params.n_tiles.divisor : 1;
  const int64_t persistent = std::max<int64_t>(1, gpu.sm_count / ranges) * ranges;
  launch->ctas = static_cast<int32_t>(
      instance.Is(kCluster) ? params.tiles * slices : std::min<int64_t>(params.tiles, persistent));
  // The workspace: the transposed or split filter, then the partial results; or the counters.
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
    plan->microseconds += launch->moments.Microseconds(gpu);
    plan->microseconds += static_cast<double>(problem.y_elements()) / gpu.sm_count *
                          StatisticsNanoseconds(instance, problem) / 1000;
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

// 16-bit results are finished on the fragments, other activations than clamps by a loop, whose turns
// are shorter where 192 accumulators leave few registers. A residual costs what its loads expose:
// hardly anything where slots of its own bring it (slot_store_sm90.cuh), most where 192 accumulators
// leave no registers to load ahead and in swap-AB, whose warps meet twice for 32 pixels.
EpilogueCost EpilogueCostOf(const KernelDesc& kernel) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  EpilogueCost cost;
  if (kernel.dtype == DType::kF32) return cost;
  const bool slots = instance.Is(kPointwise) && !instance.Is(kSwapAb);
  cost.clamps = slots && instance.WeightStationary() ? 0.01 : 0.03;
  cost.terms = 0.05;
  cost.activation = instance.Is(kSwapAb) ? 0.07 : instance.tile_m == 192 ? 0.2 : 0.1;
  cost.residual = slots ? 0.005 : instance.Is(kSwapAb) || instance.tile_m == 192 ? 0.14 : 0.07;
  return cost;
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments, host)                             \
  JAXCONV_ADD_KERNELS(all, ops, types, igemm_wgmma, variant, 90, 90, PlanIgemmWgmma, Instance, \
                      kTraitsOf##form, JAXCONV_UNPACK host)
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
