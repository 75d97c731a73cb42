#include "cuda/depthwise/plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "cuda/common/instances.h"
#include "cuda/common/rates.h"
#include "cuda/depthwise/hankel_plan.h"
#include "cuda/depthwise/operands.h"
#include "cuda/depthwise/pairs_plan.h"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/toeplitz_plan.h"
#include "cuda/depthwise/toeplitz_wgmma_plan.h"
#include "cuda/depthwise/walk_plan.h"

namespace jaxconv::depthwise {
namespace {

// A line of kernels.def for direct.cuh or wgrad.cuh: its arguments, in their order.
struct Instance {
  int64_t filter_rows, filter_columns, stride, vec, rows, strip, ctas_per_sm, lanes = 32;
  bool tma = false;
  bool any() const { return filter_rows == 0; }
  int64_t channels() const { return lanes * vec; }
  int64_t blocks() const { return kThreads / lanes; }  // of a tile
  // Whether the code handles dy of a strided convolution (Axis::halved).
  bool spread(Op op) const { return op == Op::kDgrad && stride == 2; }
};

// The same for direct_tma_sm90.cuh or wgrad_tma_sm90.cuh.
struct TmaInstance : Instance {
  template <typename... Arguments>
  constexpr TmaInstance(Arguments... arguments) : Instance{arguments...} {
    tma = true;
  }
};

// A warp's issue slots for 16 bytes of a box, latencies included. Fitted to the times of this
// family on an H200 (docs/notes/depthwise.md).
constexpr double kCopySlots = 42;
// For the choice of a tile: a pixel of a box that TMA copies, relative to an output, which costs
// about as much as one that threads copy.
constexpr double kTmaPixel = 0.25;

// The cost of tiles that hold a part of a pixel's channels: memory moves 64 bytes at a time and
// caches lines of 128, which such tiles share. Parts of such lines are stored twice. The share of
// the store time where tiles begin elsewhere, measured with 96, 144 and 192 channels.
constexpr double kUnalignedStored = 2;
struct SharedLines {
  double stored = 0, read = 0;
  SharedLines(int64_t tile_bytes, int64_t pixel_bytes) {
    if (pixel_bytes <= tile_bytes) return;
    stored = pixel_bytes % 64 == 0 ? PartOfLines(tile_bytes, pixel_bytes) : kUnalignedStored;
    read = tile_bytes % kLineBytes == 0 ? 0 : kWrittenExcess;
  }

 private:
  // The share of a tile's bytes that lie in half-stored lines, averaged over pixels that begin at a
  // line and pixels that begin in the middle of one, if any.
  static double PartOfLines(int64_t tile_bytes, int64_t pixel_bytes) {
    const int64_t starts = pixel_bytes % 128 == 0 ? 1 : 2;
    int64_t parts = 0;
    for (int64_t start = 0; start < starts; ++start) {
      for (int64_t at = 0; at < pixel_bytes; at += tile_bytes) {
        const int64_t first = start * 64 + at;
        const int64_t last = start * 64 + std::min(at + tile_bytes, pixel_bytes);
        parts += (first % 128 != 0 ? 64 : 0) + (last % 128 != 0 ? 64 : 0);
      }
    }
    return static_cast<double>(parts) / static_cast<double>(starts * pixel_bytes);
  }
};

// For direct_tma_sm90.cuh and wgrad_tma_sm90.cuh. A wgrad slice has at least two items, because
// both are copied from the start.
constexpr int64_t kMinTmaItems = 2;
constexpr int64_t kMostStages = 4, kMostBoxPixels = 256, kCopyAlignment = 128;

Status Check(const KernelDesc& kernel, const Instance& instance, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckOperands(kernel, problem));
  if (kernel.fused && problem.k % instance.vec != 0) {
    return Status::Unimplemented("with an epilogue stores pairs of channels, got " +
                                 std::to_string(problem.k));
  }
  if (instance.any()) return {};
  if (problem.filter[1] != instance.filter_rows || problem.filter[2] != instance.filter_columns) {
    return Status::Unimplemented("expected a filter of " + std::to_string(instance.filter_rows) +
                                 "x" + std::to_string(instance.filter_columns) + ", got " +
                                 std::to_string(problem.filter[1]) + "x" +
                                 std::to_string(problem.filter[2]));
  }
  if (!instance.spread(problem.op)) return CheckStride(problem, instance.stride);
  if (problem.stride[1] != 2 || problem.stride[2] != 2) {
    return Status::Unimplemented("expected stride 2 of rows and columns");
  }
  return CheckStride(problem, 1);
}

// Shared memory without the stages: two buffers of taps (wgrad: none, its sums overlay the stages).
// With TMA: taps, scale and bias, and the stages' barriers.
int64_t TapBytes(const Instance& instance, const Params& params, bool wgrad) {
  const int64_t barriers = instance.tma ? 2 * kMostStages * 8 : 0;
  if (wgrad) return barriers;
  const int64_t row_taps = instance.any() ? 1 : params.axis[1].taps;
  const int64_t bytes =
      row_taps * params.axis[2].taps * instance.channels() * int64_t{sizeof(float)};
  if (!instance.tma) return 2 * bytes;
  return bytes + 2 * instance.channels() * int64_t{sizeof(float)} + barriers;
}

// The offset of wgrad's tiles of dy in a stage.
int64_t BoxBytes(const Instance& instance, const Params& params, int64_t width) {
  const int64_t bytes = params.tile_images * int64_t{params.axis[1].box} * params.axis[2].box *
                        instance.channels() * width;
  return instance.tma ? CeilDiv(bytes, kCopyAlignment) * kCopyAlignment : bytes;
}

int64_t StageBytes(const Instance& instance, const Params& params, int64_t width, bool wgrad) {
  const int64_t boxes = BoxBytes(instance, params, width);
  if (!wgrad) return boxes;
  const int64_t bytes = params.tile_images * int64_t{params.axis[1].tile} * params.axis[2].tile *
                        instance.channels() * width;
  return boxes + (instance.tma ? CeilDiv(bytes, kCopyAlignment) * kCopyAlignment : bytes);
}

int64_t SharedBytes(const Instance& instance, const Params& params, int64_t width, bool wgrad) {
  const int64_t stages = params.stages * StageBytes(instance, params, width, wgrad) +
                         TapBytes(instance, params, wgrad);
  if (!wgrad) return stages;
  const int64_t taps =
      instance.any() ? instance.filter_columns : instance.filter_rows * instance.filter_columns;
  return std::max(stages, kWarps * taps * instance.channels() * int64_t{sizeof(float)});
}

// Shapes tiles of 8 blocks: side by side, below each other, in several images. It chooses the shape
// with the least copies and computation that fits.
Status ShapeTile(const Instance& instance, const ConvProblem& problem, int64_t width,
                 const Gpu& gpu, Params* params) {
  const bool wgrad = problem.op == Op::kWgrad;
  double least = HUGE_VAL;
  int64_t fewest_bytes = INT64_MAX;
  Params best;
  auto consider = [&](int64_t across, int64_t images) {
    Params shape = *params;
    const Axis &rows = shape.axis[1], &columns = shape.axis[2];
    const int64_t down = instance.blocks() / across / images;
    const int64_t tile_rows = down * instance.rows, tile_columns = across * instance.strip;
    if (!ShapeBox(tile_rows, tile_columns, instance.any() ? 1 : rows.taps, &shape)) return;
    shape.blocks_across = static_cast<int32_t>(across);
    shape.blocks_down = static_cast<int32_t>(down);
    shape.tile_images = static_cast<int32_t>(images);
    if (instance.tma && std::max(rows.box, columns.box) > kMostBoxPixels) return;
    const int64_t bytes = SharedBytes(instance, shape, width, wgrad);
    fewest_bytes = std::min(fewest_bytes, bytes);
    const int64_t ctas = CtasOfSm(instance.ctas_per_sm, bytes, gpu);
    if (ctas == 0) return;
    // For one image.
    const double pixel = instance.tma ? kTmaPixel : 1;
    const double work = (ctas == 1 ? kAlone : 1) * static_cast<double>(rows.tiles.divisor) *
                        columns.tiles.divisor *
                        (pixel * static_cast<double>(rows.box) * columns.box +
                         static_cast<double>(tile_rows * tile_columns));
    if (work >= least) return;
    least = work;
    best = shape;
  };
  for (int64_t across = 1; across <= instance.blocks(); across *= 2) {
    // A tile's images share a filter.
    const int64_t most = problem.batch == 1 ? problem.n : 1;
    for (int64_t images = 1; images <= std::min(instance.blocks() / across, most); images *= 2) {
      consider(across, images);
    }
  }
  if (least == HUGE_VAL) {
    if (fewest_bytes == INT64_MAX) {
      return Status::Unimplemented("the window is wider than a box may be");
    }
    return RefuseSharedBytes("two boxes of pixels need", fewest_bytes, gpu);
  }
  *params = best;
  return {};
}

// A warp's issue slots for its block and its share of a box.
double SlotsOfStep(const Instance& instance, const Params& params, int64_t stage_bytes,
                   const ConvProblem& problem) {
  const bool wgrad = problem.op == Op::kWgrad;
  const auto vec = static_cast<double>(instance.vec);
  const auto outputs = static_cast<double>(instance.rows * instance.strip);
  const double copied = static_cast<double>(stage_bytes) / (kChunkBytes * kLanes * kWarps);
  const double item = kItemSlots + (instance.tma ? 0 : copied * kCopySlots);
  if (instance.any()) {
    const double taps = wgrad ? static_cast<double>(instance.filter_columns) : params.axis[2].taps;
    return item + taps * outputs * (2 + 2 * vec);
  }
  const int64_t spread = instance.spread(problem.op) ? 2 : 1;
  const int64_t stride = problem.op == Op::kDgrad ? 1 : instance.stride;
  auto extent = [&](int64_t block, int64_t taps) {
    return static_cast<double>(((block - 1) * stride + taps - 1) / spread + 1);
  };
  const double window =
      extent(instance.rows, instance.filter_rows) * extent(instance.strip, instance.filter_columns);
  const double multiplications =
      outputs * vec * static_cast<double>(instance.filter_rows * instance.filter_columns) /
      static_cast<double>(spread * spread);
  return item + window * (1 + vec) + multiplications;
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem));
  const bool wgrad = problem.op == Op::kWgrad;
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  DescribeOperands(problem, kernel.dtype, &params);
  params.epilogue = EpilogueParams(problem.epilogue);
  if (instance.spread(problem.op)) HalveBoxes(&params);
  if (instance.tma) JAXCONV_RETURN_IF_ERROR(CheckTma(problem, params));
  const int64_t width = ByteWidth(kernel.dtype);
  JAXCONV_RETURN_IF_ERROR(ShapeTile(instance, problem, width, gpu, &params));

  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const int64_t stage_bytes = StageBytes(instance, params, width, wgrad);
  params.stage_bytes = static_cast<int32_t>(stage_bytes);
  params.walked_offset = static_cast<int32_t>(BoxBytes(instance, params, width));
  launch->shared_bytes = SharedBytes(instance, params, width, wgrad);

  JAXCONV_RETURN_IF_ERROR(CountItems(problem, instance.channels(), &params));
  const int64_t ctas_of_sm = CtasOfSm(instance.ctas_per_sm, launch->shared_bytes, gpu);
  while (instance.tma && params.stages < kMostStages &&
         CtasOfSm(ctas_of_sm, launch->shared_bytes + stage_bytes, gpu) == ctas_of_sm) {
    ++params.stages;
    launch->shared_bytes = SharedBytes(instance, params, width, wgrad);
  }
  const int64_t resident = gpu.sm_count * ctas_of_sm;
  const int64_t row_taps = instance.any() ? rows.taps : 1;
  int64_t longest;  // steps of a CTA
  if (wgrad) {
    const int64_t column_parts =
        instance.any() ? CeilDiv(columns.taps, instance.filter_columns) : 1;
    const int64_t parts = params.axis[0].taps * row_taps * column_parts;
    params.tap_parts = static_cast<int32_t>(parts);
    const int64_t ctas = params.channel_tiles.divisor * parts * problem.batch;
    JAXCONV_RETURN_IF_ERROR(CutIntoSlices(problem, ctas, resident, slices, &params, &launch->ctas,
                                          plan, instance.tma ? kMinTmaItems : kMinItemsOfSlice));
    launch->out_elements = problem.w_elements();
    longest = CeilDiv(params.items, plan->slices) * CeilDiv(launch->ctas, resident);
  } else {
    JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
    launch->ctas = ShareItems(resident, &params);
    longest = CeilDiv(params.items, launch->ctas) * params.axis[0].taps * row_taps * params.reduce;
  }
  launch->out_dtype = problem.output_dtype();
  const double waste = instance.tma ? static_cast<double>(params.channel_tiles.divisor) *
                                          instance.channels() / params.channels
                                    : 1;
  const auto x_bytes = static_cast<double>(width * problem.x_elements());
  const auto y_bytes = static_cast<double>(width * problem.y_elements());
  const double stored = wgrad ? 0 : problem.op == Op::kFprop ? y_bytes : x_bytes;
  const SharedLines shared(instance.channels() * width, params.channels * width);
  const double bytes = x_bytes + y_bytes + shared.stored * stored + WrittenExcess(stored, gpu) +
                       shared.read * (x_bytes + y_bytes - stored) +
                       static_cast<double>(EpilogueBytes(problem));
  const auto warps = static_cast<double>(
      longest * std::min(ctas_of_sm, CeilDiv(launch->ctas, gpu.sm_count)) * kWarps);
  // Products, copies and stores take issue slots of the same warps.
  plan->terms.tensor_cores = waste * warps * SlotsOfStep(instance, params, stage_bytes, problem) /
                             (kSchedulers * gpu.cycles_per_us());
  plan->terms.dram = waste * bytes / gpu.dram_bytes_per_us;
  plan->terms.launch = gpu.launch_us * (wgrad ? 2 : 1);
  plan->form = FormTimeOf(instance.tma ? "depthwise tma" : "depthwise", OperationsName(problem),
                          OperandsName(problem, /*tf32=*/false, /*three_tf32=*/false), gpu);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->kernel = &kernel;
  plan->params = std::move(launch);
  return {};
}

// The first and last compute capability of an instance.
std::pair<int, int> CapabilitiesOf(const Instance& instance) {
  return instance.tma ? std::pair(90, 90) : std::pair(80, 1000);
}
std::pair<int, int> CapabilitiesOf(const ToeplitzInstance&) { return {80, 1000}; }
std::pair<int, int> CapabilitiesOf(const HankelInstance&) { return {80, 1000}; }
std::pair<int, int> CapabilitiesOf(const PairsInstance&) { return {90, 90}; }
std::pair<int, int> CapabilitiesOf(const ToeplitzWgmmaInstance&) { return {90, 90}; }
std::pair<int, int> CapabilitiesOf(const WalkInstance&) { return {90, 90}; }

PlanFunction PlanOf(const Instance&) { return MakePlan; }
PlanFunction PlanOf(const ToeplitzInstance&) { return PlanToeplitz; }
PlanFunction PlanOf(const ToeplitzWgmmaInstance&) { return PlanToeplitzWgmma; }
PlanFunction PlanOf(const PairsInstance&) { return PlanPairs; }
PlanFunction PlanOf(const WalkInstance&) { return PlanWalk; }
PlanFunction PlanOf(const HankelInstance&) { return PlanHankel; }

using DirectInstance = Instance;
using DirectTmaInstance = TmaInstance;
using WgradInstance = Instance;
using WgradTmaInstance = TmaInstance;

// An epilogue with code of its own takes straight lines; in the loop for all others so does the
// activation.
EpilogueCost EpilogueCostOf(const KernelDesc& kernel) {
  EpilogueCost cost;
  cost.of_products = true;
  cost.activation = EpilogueCost::kStraightCycles;
  if (kernel.plan == PlanPairs) {
    cost.clamps = cost.swish = EpilogueCost::kStraightCycles;
  } else if (kernel.plan == PlanWalk) {
    // One copy of the code for all epilogues. A 5x5 filter leaves few registers, so a loop adds to
    // it.
    const bool small = static_cast<const WalkInstance*>(kernel.instance)->filter_rows == 3;
    cost.terms = cost.clamps =
        EpilogueCost::kStraightCycles + (small ? 0 : EpilogueCost::kLoopCycles);
    cost.activation = 0;
  } else if (kernel.plan == MakePlan) {
    const auto& instance = *static_cast<const Instance*>(kernel.instance);
    // StoreInside is compiled where registers allow it in addition to the other stores.
    if ((instance.tma || instance.vec == 1) && !instance.any())
      cost.clamps = EpilogueCost::kStraightCycles;
  }
  return cost;
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments)                               \
  JAXCONV_ADD_KERNELS(all, ops, types, depthwise, variant, CapabilitiesOf(instance).first, \
                      CapabilitiesOf(instance).second, PlanOf(instance), form##Instance,   \
                      JAXCONV_UNPACK arguments)
#define FUSED(...)
#include "cuda/depthwise/kernels.def"
  for (KernelDesc& kernel : all) {
    kernel.epilogue_cost = EpilogueCostOf(kernel);
  }
  return all;
}

}  // namespace jaxconv::depthwise
