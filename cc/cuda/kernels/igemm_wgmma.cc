#include "cuda/kernels/igemm_wgmma.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/implicit_gemm.h"
#include "cuda/kernels/filter_transpose.h"
#include "cuda/kernels/igemm_simt.h"
#include "cuda/select/wgmma_cost.h"

namespace jaxconv {
namespace {

constexpr const char* kFamily = "igemm_wgmma";

struct Instance {
  WgmmaTileId id;
  const char* suffix;
  bool rows;               // the taps of a filter row share a load
  bool one_tap;            // takes filters of one tap only
  bool drawn;              // and, where there are many, draws its tiles
  int64_t resident_steps;  // of the filter in shared memory; 0: none
  bool cluster;            // slices are the CTAs of a cluster
  bool wgrad_rows;         // rows in wgrad, a kernel of its own
  WgmmaTileCost cost;
};

constexpr Instance MakeInstance(WgmmaTileId id, const char* suffix, int64_t tile_m, int64_t tile_n,
                                bool pingpong, bool rows, int64_t resident_steps,
                                bool columns = false) {
  Instance instance{};
  instance.id = id;
  instance.suffix = suffix;
  instance.rows = rows;
  instance.cost.columns = columns;
  instance.resident_steps = resident_steps;
  instance.cost.tile_m = tile_m;
  instance.cost.tile_n = tile_n;
  instance.cost.pingpong = pingpong;
  instance.cost.resident = resident_steps > 0;
  return instance;
}

constexpr Instance MakeOneTapInstance(WgmmaTileId id, const char* suffix, int64_t tile_m,
                                      int64_t tile_n, int64_t resident_steps, bool drawn,
                                      bool columns = false) {
  Instance instance =
      MakeInstance(id, suffix, tile_m, tile_n, true, false, resident_steps, columns);
  instance.one_tap = true;
  instance.drawn = drawn;
  return instance;
}

constexpr Instance MakeMmaInstance(WgmmaTileId id, int64_t tile_m, int64_t tile_n, double pace) {
  Instance instance = MakeInstance(id, "_mma", tile_m, tile_n, false, false, 0);
  instance.cost.pace = pace;
  return instance;
}

constexpr Instance MakeClusterInstance(WgmmaTileId id, int64_t tile_m, int64_t tile_n) {
  Instance instance = MakeInstance(id, "_cluster", tile_m, tile_n, false, false, 0);
  instance.cluster = true;
  return instance;
}

constexpr Instance MakeWgradRowsInstance() {
  Instance instance =
      MakeInstance(WgmmaTileId::k192x64WgradRows, "_rows", kWgradRowTaps * 64, 64, false, false, 0);
  instance.wgrad_rows = true;
  return instance;
}

// As WgmmaTileOf in igemm_wgmma_sm90.cuh and igemm_wgmma_cluster_sm90.cuh, and WgradRowsTile in
// igemm_wgmma_wgrad_sm90.cuh.
constexpr Instance kInstances[] = {
    MakeInstance(WgmmaTileId::k128x256, "", 128, 256, false, false, 0),
    MakeInstance(WgmmaTileId::k256x128, "", 256, 128, false, false, 0),
    MakeInstance(WgmmaTileId::k128x320, "", 128, 320, false, false, 0),
    MakeInstance(WgmmaTileId::k128x192, "", 128, 192, false, false, 0),
    MakeInstance(WgmmaTileId::k192x128, "", 192, 128, false, false, 0),
    MakeInstance(WgmmaTileId::k128x128, "", 128, 128, false, false, 0),
    MakeInstance(WgmmaTileId::k128x128Pingpong, "_pingpong", 128, 128, true, false, 0),
    MakeInstance(WgmmaTileId::k192x128Pingpong, "_pingpong", 192, 128, true, false, 0),
    MakeInstance(WgmmaTileId::k128x64Pingpong, "_pingpong", 128, 64, true, false, 0),
    MakeInstance(WgmmaTileId::k128x128PingpongRows, "_pingpong_rows", 128, 128, true, true, 0),
    MakeInstance(WgmmaTileId::k256x64Columns, "_columns", 256, 64, true, false, 0, true),
    MakeInstance(WgmmaTileId::k256x64ColumnsRows, "_columns_rows", 256, 64, true, true, 0, true),
    MakeInstance(WgmmaTileId::k224x64ColumnsRows, "_columns_rows", 224, 64, true, true, 0, true),
    MakeInstance(WgmmaTileId::k192x64ColumnsResident, "_columns_resident", 192, 64, true, true, 9,
                 true),
    MakeInstance(WgmmaTileId::k128x64ColumnsResident, "_columns_resident", 128, 64, true, true, 9,
                 true),
    MakeInstance(WgmmaTileId::k128x64PingpongResidentF32, "_pingpong_resident", 128, 64, true, true,
                 18),
    MakeOneTapInstance(WgmmaTileId::k128x128PingpongOneTap, "_pingpong_one_tap", 128, 128, 0, true),
    MakeOneTapInstance(WgmmaTileId::k64x256PingpongOneTapC128, "_pingpong_one_tap_c128", 64, 256, 2,
                       true),
    MakeOneTapInstance(WgmmaTileId::k64x256PingpongOneTap, "_pingpong_one_tap", 64, 256, 4, false),
    MakeOneTapInstance(WgmmaTileId::k256x64ColumnsOneTap, "_columns_one_tap", 256, 64, 4, true,
                       true),
    MakeClusterInstance(WgmmaTileId::k64x64Cluster, 64, 64),
    MakeWgradRowsInstance(),
    // The last: a share of wgmma's pace. Measured 0.7, 0.7 and 0.3; a sixth more, because
    // igemm_wmma, the alternative, takes that much longer in TF32 than predicted.
    MakeMmaInstance(WgmmaTileId::k128x256Mma, 128, 256, 0.8),
    MakeMmaInstance(WgmmaTileId::k256x128Mma, 256, 128, 0.8),
    MakeMmaInstance(WgmmaTileId::k128x64Mma, 128, 64, 0.35),
};

// Whether the table has a row of this tile.
constexpr bool HasRow(const Instance& instance, Op op, DType dtype) {
  const bool f32 = dtype == DType::kF32;
  if (instance.wgrad_rows) return op == Op::kWgrad && !f32;
  if (op == Op::kWgrad &&
      (instance.rows || instance.one_tap || instance.cluster || instance.cost.columns)) {
    return false;
  }
  switch (instance.id) {
    case WgmmaTileId::k128x256Mma:
    case WgmmaTileId::k256x128Mma:
    case WgmmaTileId::k128x64Mma:
      return op == Op::kWgrad && f32;
    case WgmmaTileId::k128x64PingpongResidentF32:
      return f32;
    case WgmmaTileId::k192x128:  // elsewhere pingpong, never slower
      return (op == Op::kWgrad) != f32;
    case WgmmaTileId::k192x128Pingpong:
      return op != Op::kWgrad && !f32;
    case WgmmaTileId::k128x192:  // and 128x128, in float32 nowhere the best
    case WgmmaTileId::k128x128:
      return !f32;
    default:
      // wgmma has no wgrad in TF32, and the other forms of tiles are written for 16 bits.
      return !f32 ||
             !(op == Op::kWgrad || instance.one_tap || instance.cluster || instance.cost.columns);
  }
}

// Of the reduction, 128 bytes of channels.
constexpr int64_t StepChannels(DType dtype) { return dtype == DType::kF32 ? 32 : 64; }
// wgrad: output pixels of a step.
constexpr int64_t StepPixels(DType dtype) { return dtype == DType::kF32 ? 32 : 64; }
// Partial results of split-K take at most this much workspace.
constexpr int64_t kMaxWorkspaceBytes = 64'000'000;
// A slice shorter than this spends more time on filling the ring than on its sum.
constexpr int64_t kMinStepsPerSlice = 4;
constexpr int64_t kMaxSlices = 512;
// Tiles are drawn from so many bytes of activations on, those that are read and written: 205 MB are
// 3 to 5 % faster so, 128 MB 4 % slower. And, without a resident filter, up to so many operations a
// byte: 85 are 10 % faster, 102 1 % slower.
constexpr int64_t kDrawnFromBytes = 200'000'000;
constexpr int64_t kDrawnOperationsPerByte = 100;
// Ranges of columns that CTAs with resident filters keep to: at least four CTAs each.
constexpr int64_t kMostResidentColumns = kWgmmaDrawCounters;
// Row and pixel numbers of a tile past the end still fit.
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 4096;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t OutputElements(const ConvProblem& problem) {
  return problem.op == Op::kFprop   ? problem.y_elements()
         : problem.op == Op::kDgrad ? problem.x_elements()
                                    : problem.w_elements();
}

// wgmma takes TF32 K-major only: fprop reads the filter transposed.
bool TransposesFilter(const ConvProblem& problem) {
  return KernelOp(problem) == Op::kFprop && problem.w_dtype == DType::kF32;
}

int64_t TransposedFilterBytes(const ConvProblem& problem) {
  return TransposesFilter(problem) ? problem.w_elements() * int64_t{sizeof(float)} : 0;
}

int64_t PartialBytes(const Instance& instance, const ConvProblem& problem, int64_t slices) {
  return slices > 1 && !instance.cluster ? slices * OutputElements(problem) * int64_t{sizeof(float)}
                                         : 0;
}

// The counters of tiles that are drawn; 0: they go round by turns. SMs do not get on equally fast;
// drawn tiles end at the same time all the same, at the price of a launch that clears the counters.
int64_t DrawBytes(const Instance& instance, const ConvProblem& problem) {
  if (!instance.drawn) return 0;
  // A stride steps over pixels of x.
  const int64_t pixels = problem.batch * problem.n * problem.out_pixels();
  const int64_t bytes =
      std::min(problem.x_elements(), pixels * problem.c) * ByteWidth(problem.x_dtype) +
      problem.y_elements() * ByteWidth(problem.y_dtype);
  const bool drawn =
      bytes >= kDrawnFromBytes &&
      (instance.resident_steps > 0 || problem.flops() < kDrawnOperationsPerByte * bytes);
  return drawn ? kWgmmaDrawCounters * int64_t{sizeof(int32_t)} : 0;
}

// The transposed filter, then the partial results; or the counters of tiles.
int64_t WorkspaceBytes(const Instance& instance, const ConvProblem& problem, int64_t slices) {
  return TransposedFilterBytes(problem) + PartialBytes(instance, problem, slices) +
         DrawBytes(instance, problem);
}

// The fields of a tensor map and of the copy instruction, by spatial rank.
struct Im2colLimits {
  int64_t lower, upper, offset;
};
constexpr Im2colLimits kIm2colLimits[] = {
    {0, 0, 0}, {-32768, 32767, 65535}, {-128, 127, 255}, {-16, 15, 31}};
constexpr int32_t kMaxElementStride = 8;

struct Plan {
  IgemmWgmmaParams params;
  WgmmaOperands operands;
  int64_t tiles = 0;        // of one slice
  int64_t steps = 0;        // loads of the longest reduction
  double average_taps = 0;  // 128-byte pieces of the reduction, over phases
  double taps_of_load = 1;  // in rows
  double pieces_of_step = 1;
};

// Turns a plan of wgrad into one of wgrad in rows: the walk runs past a row's end, over as many
// columns of zeros as the wider side of the padding has, and a tile's rows are a chunk of the taps
// of a filter row (igemm_wgmma_wgrad_sm90.cuh).
Status PlanWgradRows(const ConvProblem& problem, const GatherAxis& axis, Plan* plan) {
  IgemmWgmmaParams& params = plan->params;
  WgmmaOperands& operands = plan->operands;
  WgmmaPhase& phase = params.phase[0];
  const int64_t taps = std::min<int64_t>(axis.taps, kWgradRowTaps);
  const int64_t span = (taps - 1) * axis.src_per_t;
  if (axis.taps == 1 || axis.src_per_j != 1 || span > kMaxWgmmaSpan) {
    return Status::Unimplemented(
        "rows need a filter of several taps along the last axis, of stride 1, that reach over at "
        "most " +
        std::to_string(kMaxWgmmaSpan) + " pixels");
  }
  if (problem.batch > 1) {
    return Status::Unimplemented("rows would carry one batch's infinities into another's filter");
  }
  const int64_t pad = -int64_t{axis.off};
  const int64_t reach = int64_t{axis.taps - 1} * axis.src_per_t;
  const int64_t walked =
      std::max({int64_t{axis.dst_extent}, axis.src_extent + std::max<int64_t>(pad, 0),
                axis.dst_extent + reach - pad});
  const Im2colLimits& limits = kIm2colLimits[problem.rank];
  if (walked - std::min(axis.src_extent, axis.dst_extent) > limits.upper ||
      walked - axis.src_extent < limits.lower) {
    return Status::Unimplemented("padding of " + std::to_string(walked - axis.src_extent) +
                                 " pixels, wider than the copy engine's fields");
  }
  const int64_t image = walked * phase.count[1].divisor * phase.count[2].divisor;
  if ((problem.n + 1) * image > kMaxRows) {
    return Status::Unimplemented("more than 2^31 - 2^12 pixels");
  }
  phase.count[0] = FastDivmod(walked);
  phase.offset0[0] = axis.off;
  phase.lower[0] = 0;
  operands.a_upper[0][0] = static_cast<int32_t>(walked - axis.src_extent);
  operands.b_upper = static_cast<int32_t>(walked - axis.dst_extent);
  for (int i = 0; i < 3; ++i) operands.b_extent[i] = problem.out[2 - i];
  plan->steps = CeilDiv(problem.n * image, kWgradRowsPixels);
  phase.steps = static_cast<int32_t>(plan->steps);
  plan->pieces_of_step = static_cast<double>(kWgradRowsPixels / StepPixels(problem.x_dtype));
  plan->average_taps = static_cast<double>(plan->steps) * plan->pieces_of_step;
  const int64_t units =
      CeilDiv(phase.taps[0], kWgradRowTaps) * phase.taps[1] * phase.taps[2] * params.slabs.divisor;
  phase.rows = static_cast<int32_t>(units * kWgradRowTaps * 64);
  return {};
}

Status MakePlan(const Instance& instance, const ConvProblem& problem, Plan* plan) {
  ImplicitGemm gemm;
  JAXCONV_RETURN_IF_ERROR(MakeImplicitGemm(problem, &gemm));
  const bool dgrad = problem.op == Op::kDgrad, wgrad = problem.op == Op::kWgrad;
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  const int64_t channels = wgrad ? gemm.row_channels : gemm.reduce_channels;
  auto multiple = [](const char* what, int64_t value, int64_t of) {
    if (value % of == 0) return Status();
    return Status::Unimplemented(std::string(what) + " " + std::to_string(value) +
                                 " is not a multiple of " + std::to_string(of));
  };
  // Pitches of tensor maps are multiples of 16 bytes, and so are the vectors of the output.
  const int64_t step_channels = StepChannels(problem.lhs_dtype());
  const int64_t step_pixels = StepPixels(problem.lhs_dtype());
  const int64_t vector = 16 / ByteWidth(problem.lhs_dtype());
  JAXCONV_RETURN_IF_ERROR(multiple("C/groups", problem.c_per_group(), vector));
  JAXCONV_RETURN_IF_ERROR(multiple("K/groups", problem.k_per_group(), vector));
  if (problem.groups > 1 && !wgrad) {
    // A step must not reach into the next group's channels.
    JAXCONV_RETURN_IF_ERROR(multiple(dgrad ? "K/groups" : "C/groups", channels, step_channels));
  }
  if (gemm.phases > kMaxWgmmaPhases) {
    return Status::Unimplemented(std::to_string(gemm.phases) +
                                 " phases (products of strides), expected at most " +
                                 std::to_string(kMaxWgmmaPhases));
  }
  if (std::max(gemm.batches * gemm.images * int64_t{gemm.axis[0].src_extent} *
                   gemm.axis[1].src_extent * gemm.axis[2].src_extent,
               gemm.batches * int64_t{gemm.gemm_m}) > kMaxRows) {
    return Status::Unimplemented("more than 2^31 - 2^12 pixels");
  }
  IgemmWgmmaParams& params = plan->params;
  WgmmaOperands& operands = plan->operands;
  params.images = gemm.images;
  params.gemm_n = gemm.gemm_n;
  params.rank = problem.rank;
  params.phases = gemm.phases;
  const int64_t slabs = CeilDiv(channels, step_channels);
  params.slabs = FastDivmod(slabs);
  params.filter_taps = static_cast<int32_t>(problem.taps());
  params.a_group = gemm.a_group;
  params.b_group = gemm.b_group;
  params.out_channels = gemm.out_channels;
  params.out_batch = gemm.out_batch;
  params.out_group = gemm.out_group;
  params.dense_rows = gemm.phases == 1;
  operands.a_channels = gemm.src_channels;
  operands.a_images = gemm.batches * gemm.images;
  operands.b_columns = problem.k;
  operands.b_rows = problem.c_per_group();
  if (TransposesFilter(problem)) std::swap(operands.b_columns, operands.b_rows);
  operands.b_taps = problem.taps() * problem.batch;
  if (krsc) {
    if (problem.batch * problem.groups > 1) {
      // To the kernel a group is somewhere along what is K in rsck, a batch so many taps further
      // on.
      return Status::Unimplemented("a filter stored as krsc of one group and one batch only");
    }
    if (TransposesFilter(problem)) {
      return Status::Unimplemented("dgrad in TF32 reads filters stored as rsck, got krsc");
    }
    JAXCONV_RETURN_IF_ERROR(CheckKrscLines(problem));
    if (dgrad && problem.taps() > 1 && problem.k % 16 == 0) {
      // The last step's rows past K cost as much as others, where lines past K cost nothing: 81 us
      // and not 65 for 3x3 with C = 256 and K = 32. With odd multiples of 8 the lines of rsck are
      // ragged and cost more than that: 123 us and not 94 for C = 128 and K = 1000.
      JAXCONV_RETURN_IF_ERROR(multiple("K of a filter stored as krsc", problem.k, step_channels));
    }
    std::swap(operands.b_columns, operands.b_rows);
    operands.b_row_stride = problem.taps() * problem.c;
    operands.b_tap_stride = problem.c;
  }

  if (wgrad) {
    if (!gemm.Dense()) return Status::Unimplemented("wgrad with lhs_dilation");
    const int64_t pixels = problem.n * problem.out_pixels();
    if (problem.lhs_dtype() == DType::kF32) {
      // One copy brings 32 columns of a pixel after another.
      JAXCONV_RETURN_IF_ERROR(multiple("K/groups", problem.k_per_group(), step_channels));
    }
    if (gemm.batches > 1 && pixels % step_pixels != 0) {
      // The last step would multiply another batch's pixels by zeros, which a NaN survives.
      return Status::Unimplemented("batched filters over " + std::to_string(pixels) +
                                   " pixels, not a multiple of " + std::to_string(step_pixels));
    }
    params.row_channels = gemm.row_channels;
    params.pixels = static_cast<int32_t>(pixels);
    operands.b_rows = pixels;
    operands.b_taps = problem.batch;
  }

  const Im2colLimits& limits = kIm2colLimits[problem.rank];
  bool matrix = gemm.phases == 1 && problem.taps() == 1;
  if (instance.one_tap && (wgrad || problem.taps() > 1)) {
    return Status::Unimplemented("one tap: a filter of " + std::to_string(problem.taps()) +
                                 " taps, expected fprop or dgrad with one");
  }
  if (wgrad && (instance.rows || instance.cluster || instance.cost.columns)) {
    return Status::Unimplemented("rows, clusters and columns of pixels serve fprop and dgrad");
  }
  if (!wgrad && instance.wgrad_rows) return Status::Unimplemented("rows that serve wgrad");
  for (int i = 0; i < 3; ++i) {
    const GatherAxis& axis = gemm.axis[2 - i];
    params.src_step[i] = axis.src_per_j;
    params.period[i] = axis.period;
    params.out_extent[i] = axis.dst_extent;
    operands.a_extent[i] = axis.src_extent;
    matrix = matrix && axis.src_per_j == 1 && axis.off == 0 && axis.div == 1 &&
             axis.dst_extent == axis.src_extent;
    if (axis.src_per_j > kMaxElementStride) {
      return Status::Unimplemented("a stride of " + std::to_string(axis.src_per_j) +
                                   ", expected at most " + std::to_string(kMaxElementStride));
    }
  }
  plan->steps = 0;
  double all_taps = 0;
  int64_t rows = 0;
  for (int p = 0; p < gemm.phases; ++p) {
    WgmmaPhase& phase = params.phase[p];
    AxisPhase axis_phase[3];
    bool empty = false;
    for (int a = 0; a < 3; ++a) axis_phase[a] = gemm.PhaseOfAxis(p, a);
    for (int a = 0; a < 3; ++a) empty = empty || axis_phase[a].tap_count == 0;
    int64_t phase_rows = gemm.images;
    int64_t filter_pitch = 1, taps = 1;
    phase.filter0 = 0;
    for (int i = 0; i < 3; ++i) {
      const GatherAxis& axis = gemm.axis[2 - i];
      const AxisPhase& on = axis_phase[2 - i];
      phase.phase[i] = on.phase;
      phase.taps[i] = empty ? 1 : on.tap_count;
      const int64_t reach = int64_t{phase.taps[i] - 1} * axis.src_per_t;
      const int64_t span = reach < 0 ? -reach : reach;
      const int64_t src0 = empty ? 0 : on.src0;
      const int64_t lower = src0 + std::min<int64_t>(0, reach);
      int64_t walked = on.dst_count;
      if (i == 0) {
        phase.width = on.dst_count;
        if (instance.rows) {
          if (axis.src_per_j != 1 || axis.taps == 1 || span > kMaxWgmmaSpan || matrix) {
            return Status::Unimplemented(
                "rows need a filter of several taps along the last axis, of stride 1, that reach "
                "over at most " +
                std::to_string(kMaxWgmmaSpan) + " pixels");
          }
          // The walk covers the padded row, so that a tap is the pixel that much further on; but
          // zeros behind a row and before the next are the same ones.
          walked = std::min(walked + span,
                            std::max({walked, axis.src_extent - lower, walked + span + lower}));
        }
      }
      phase.count[i] = FastDivmod(walked);
      phase_rows *= walked;
      phase.offset0[i] = static_cast<int32_t>(src0 - lower);
      phase.offset_step[i] = axis.src_per_t;
      phase.filter0 += static_cast<int32_t>(on.first_tap * filter_pitch * !empty);
      phase.filter_step[i] = static_cast<int32_t>(axis.tap_period * filter_pitch);
      filter_pitch *= axis.taps;
      taps *= phase.taps[i];
      phase.lower[i] = static_cast<int32_t>(lower);
      const int64_t upper = lower + (walked - 1) * axis.src_per_j + 1 - axis.src_extent;
      operands.a_upper[p][i] = static_cast<int32_t>(upper);
      if (i < problem.rank && !matrix &&
          (lower < limits.lower || lower > limits.upper || upper < limits.lower ||
           upper > limits.upper || span > limits.offset)) {
        return Status::Unimplemented(
            "a window from " + std::to_string(lower) + " to " + std::to_string(upper + span) +
            " beyond the tensor's end, wider than the copy engine's fields");
      }
    }
    if (empty && krsc && dgrad && !instance.rows && !instance.cluster && !instance.cost.columns) {
      // fprop's kernel takes a step of zeros where dgrad's stores them at once (kStoresZeros in
      // igemm_wgmma_sm90.cuh): 52 us and not 46 for 1x1 of 512 channels, more than XLA needs to
      // transpose the filter.
      return Status::Unimplemented("a filter stored as krsc only where every phase has taps");
    }
    if (phase_rows > kMaxRows) return Status::Unimplemented("more than 2^31 - 2^12 rows");
    phase.rows = static_cast<int32_t>(phase_rows);
    rows = std::max(rows, phase_rows);
    const int64_t row_taps = instance.rows ? phase.taps[0] : 1;
    phase.steps = static_cast<int32_t>(empty ? 1 : taps / row_taps * slabs);
    if (p == 0) plan->taps_of_load = static_cast<double>(row_taps);
    phase.channel0 =
        empty ? static_cast<int32_t>(CeilDiv(std::max(problem.c, problem.k), 64) * 64) : 0;
    plan->steps = std::max<int64_t>(plan->steps, phase.steps);
    all_taps += static_cast<double>(phase.steps * row_taps);
  }
  if (wgrad) {
    rows = problem.taps() * slabs * step_channels;
    params.phase[0].rows = static_cast<int32_t>(rows);
    plan->steps = CeilDiv(params.pixels, step_pixels);
    params.phase[0].steps = static_cast<int32_t>(plan->steps);
    all_taps = static_cast<double>(plan->steps);
  }
  plan->average_taps = all_taps / gemm.phases;
  if (instance.wgrad_rows) {
    JAXCONV_RETURN_IF_ERROR(PlanWgradRows(problem, gemm.axis[2], plan));
    rows = params.phase[0].rows;
  }
  if (matrix) params.rank = 0;
  if (instance.rows) params.dense_rows = 0;
  const int64_t n_tiles = CeilDiv(gemm.gemm_n, instance.cost.tile_n);
  if (instance.resident_steps > 0) {
    const int64_t filter_steps = problem.taps() * slabs;
    const int64_t most_tiles =
        instance.one_tap && !instance.cost.columns ? kMostResidentColumns : 1;
    if (n_tiles > most_tiles || gemm.batches * gemm.groups > 1 || gemm.phases > 1 ||
        filter_steps > instance.resident_steps) {
      return Status::Unimplemented("the filter does not fit in shared memory: expected at most " +
                                   std::to_string(most_tiles * instance.cost.tile_n) +
                                   " columns and " + std::to_string(instance.resident_steps) +
                                   " steps, got " + std::to_string(gemm.gemm_n) + " and " +
                                   std::to_string(filter_steps));
    }
  }
  if (instance.one_tap && gemm.phases > 1) {
    return Status::Unimplemented("one tap: " + std::to_string(gemm.phases) +
                                 " phases (products of strides), expected one");
  }
  const int64_t m_tiles = CeilDiv(rows, instance.cost.tile_m);
  params.n_tiles = FastDivmod(n_tiles);
  params.m_tiles = FastDivmod(m_tiles);
  params.groups = FastDivmod(gemm.groups);
  params.batches = FastDivmod(gemm.batches);
  plan->tiles = n_tiles * m_tiles * gemm.groups * gemm.batches * gemm.phases;
  if (plan->tiles >= (int64_t{1} << 30) / kMaxSlices) {
    return Status::Unimplemented("the grid has " + std::to_string(plan->tiles) +
                                 " tiles, expected less than 2^24");
  }
  return {};
}

// Whether the instance takes the problem, and how.
Status Accept(const Instance& instance, Op op, DType dtype, const ConvProblem& problem,
              Plan* plan) {
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
  return MakePlan(instance, problem, plan);
}

double SlicedCost(const Instance& instance, const ConvProblem& problem, const Plan& plan,
                  const DeviceInfo& device, int64_t slices) {
  WgmmaWork work;
  work.tiles = plan.tiles * slices;
  work.taps = slices == 1 ? plan.average_taps
                          : static_cast<double>(CeilDiv(plan.steps, slices)) * plan.taps_of_load *
                                plan.pieces_of_step;
  work.taps_of_load = plan.taps_of_load;
  work.gemm_n = plan.params.gemm_n;
  work.n_tiles = plan.params.n_tiles.divisor;
  work.dram_bytes = static_cast<double>(problem.x_elements() * ByteWidth(problem.x_dtype) +
                                        problem.w_elements() * ByteWidth(problem.w_dtype) +
                                        problem.y_elements() * ByteWidth(problem.y_dtype));
  work.written_bytes =
      static_cast<double>(OutputElements(problem) * ByteWidth(problem.output_dtype()));
  const int64_t x_pitch = problem.c * ByteWidth(problem.x_dtype);
  const int64_t y_pitch = problem.k * ByteWidth(problem.y_dtype);
  work.pitch_a = problem.op == Op::kDgrad ? y_pitch : x_pitch;
  work.pitch_b = TransposesFilter(problem) ? x_pitch / problem.groups : y_pitch;
  work.pitch_out = problem.op == Op::kDgrad ? x_pitch : y_pitch;
  if (problem.op != Op::kWgrad) {
    work.filter_bytes = static_cast<double>(problem.taps() * problem.c_per_group() *
                                            problem.k_per_group() * ByteWidth(problem.w_dtype));
  }
  work.partial_bytes = static_cast<double>(PartialBytes(instance, problem, slices));
  work.out_bytes =
      work.partial_bytes > 0 ? 4 : static_cast<double>(ByteWidth(problem.output_dtype()));
  work.tf32 = problem.lhs_dtype() == DType::kF32;
  work.transposed_bytes = static_cast<double>(TransposedFilterBytes(problem));
  work.drawn = DrawBytes(instance, problem) > 0;
  if (work.tf32 && instance.cost.pingpong) {
    work.sector_bytes = static_cast<double>(OutputElements(problem)) * work.out_bytes;
  }
  if (instance.wgrad_rows) {
    work.rows_of_load = kWgradRowTaps;
    work.pieces_of_step = plan.pieces_of_step;
  } else if (problem.op == Op::kWgrad) {
    const int64_t slabs = instance.cost.tile_m / StepChannels(problem.lhs_dtype());
    work.extra_copies = static_cast<double>(slabs - 1);
    // One of dy in float32, not one for 64 columns.
    if (work.tf32) {
      work.extra_copies +=
          1 - static_cast<double>(std::min(instance.cost.tile_n / 64, CeilDiv(work.gemm_n, 64)));
    }
  }
  if (instance.cluster) return PredictWgmmaClusterMicroseconds(instance.cost, work, slices, device);
  return PredictWgmmaMicroseconds(instance.cost, work, device);
}

double Cost(const Instance& instance, const ConvProblem& problem, const DeviceInfo& device,
            int64_t slices) {
  Plan plan;
  if (!MakePlan(instance, problem, &plan).ok()) return HUGE_VAL;
  return SlicedCost(instance, problem, plan, device, slices);
}

// Slices are all of the same length but the last; the kernel has no way through an empty one, but
// in clusters. Wgrad in rows deals its steps out in turn.
bool NoneEmpty(const Instance& instance, const Plan& plan, int64_t slices) {
  if (instance.wgrad_rows) return slices <= plan.steps;
  return instance.cluster || CeilDiv(plan.steps, CeilDiv(plan.steps, slices)) == slices;
}

int64_t MostSlices(const Instance& instance, const ConvProblem& problem, const Plan& plan) {
  if (instance.cluster) return std::min<int64_t>(plan.steps, kMaxWgmmaCluster);
  // Phases have reductions of different lengths, and a resident filter is whole.
  if (plan.params.phases > 1 || instance.resident_steps > 0 || instance.one_tap) return 1;
  return std::max<int64_t>(
      1,
      std::min({static_cast<int64_t>(plan.steps * plan.pieces_of_step) / kMinStepsPerSlice,
                kMaxWorkspaceBytes / std::max<int64_t>(1, PartialBytes(instance, problem, 2) / 2),
                kMaxSlices}));
}

int64_t Slices(const Instance& instance, const ConvProblem& problem, const DeviceInfo& device) {
  Plan plan;
  if (!MakePlan(instance, problem, &plan).ok()) return 1;
  const int64_t most = MostSlices(instance, problem, plan);
  int64_t best = 1;
  double best_cost = SlicedCost(instance, problem, plan, device, 1);
  for (int64_t slices = 2; slices <= most; ++slices) {
    if (!NoneEmpty(instance, plan, slices)) continue;
    const double cost = SlicedCost(instance, problem, plan, device, slices);
    if (cost < best_cost) best_cost = cost, best = slices;
  }
  return best;
}

template <Op kOp, DType kType>
Status LaunchTile(WgmmaTileId id, const Plan& plan, void* stream) {
  const IgemmWgmmaParams& params = plan.params;
  const WgmmaOperands& operands = plan.operands;
  switch (id) {
    case WgmmaTileId::k64x256PingpongOneTap:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k64x256PingpongOneTap>(params, operands,
                                                                                stream);
      }
      break;
    case WgmmaTileId::k128x128PingpongOneTap:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k128x128PingpongOneTap>(params, operands,
                                                                                 stream);
      }
      break;
    case WgmmaTileId::k64x256PingpongOneTapC128:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k64x256PingpongOneTapC128>(
            params, operands, stream);
      }
      break;
    case WgmmaTileId::k256x64ColumnsOneTap:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k256x64ColumnsOneTap>(params, operands,
                                                                               stream);
      }
      break;
    case WgmmaTileId::k128x256:
      return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k128x256>(params, operands, stream);
    case WgmmaTileId::k256x128:
      return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k256x128>(params, operands, stream);
    case WgmmaTileId::k128x320:
      return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k128x320>(params, operands, stream);
    case WgmmaTileId::k128x192:
      return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k128x192>(params, operands, stream);
    case WgmmaTileId::k192x128:
      if constexpr (kOp == Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k192x128>(params, operands, stream);
      }
      break;
    case WgmmaTileId::k128x128:
      return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k128x128>(params, operands, stream);
    case WgmmaTileId::k128x128Pingpong:
      return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k128x128Pingpong>(params, operands, stream);
    case WgmmaTileId::k192x128Pingpong:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k192x128Pingpong>(params, operands,
                                                                           stream);
      }
      break;
    case WgmmaTileId::k128x64Pingpong:
      return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k128x64Pingpong>(params, operands, stream);
    case WgmmaTileId::k128x128PingpongRows:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k128x128PingpongRows>(params, operands,
                                                                               stream);
      }
      break;
    case WgmmaTileId::k256x64Columns:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k256x64Columns>(params, operands, stream);
      }
      break;
    case WgmmaTileId::k256x64ColumnsRows:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k256x64ColumnsRows>(params, operands,
                                                                             stream);
      }
      break;
    case WgmmaTileId::k224x64ColumnsRows:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k224x64ColumnsRows>(params, operands,
                                                                             stream);
      }
      break;
    case WgmmaTileId::k192x64ColumnsResident:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k192x64ColumnsResident>(params, operands,
                                                                                 stream);
      }
      break;
    case WgmmaTileId::k128x64ColumnsResident:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmma<kOp, kType, WgmmaTileId::k128x64ColumnsResident>(params, operands,
                                                                                 stream);
      }
      break;
    case WgmmaTileId::k64x64Cluster:
      if constexpr (kOp != Op::kWgrad) {
        return LaunchIgemmWgmmaCluster<kOp, kType, WgmmaTileId::k64x64Cluster>(params, operands,
                                                                               stream);
      }
      break;
    case WgmmaTileId::k192x64WgradRows:
      return LaunchWgmmaWgradRows<kType>(params, operands, stream);
    default:
      break;
  }
  return Status::Internal("no such tile");
}

// The rows of float32.
template <Op kOp>
Status LaunchTf32Tile(WgmmaTileId id, const Plan& plan, void* stream) {
  const IgemmWgmmaParams& params = plan.params;
  const WgmmaOperands& operands = plan.operands;
  if constexpr (kOp == Op::kWgrad) {
    switch (id) {
      case WgmmaTileId::k128x256Mma:
        return LaunchIgemmWgmma<kOp, DType::kF32, WgmmaTileId::k128x256Mma>(params, operands,
                                                                            stream);
      case WgmmaTileId::k256x128Mma:
        return LaunchIgemmWgmma<kOp, DType::kF32, WgmmaTileId::k256x128Mma>(params, operands,
                                                                            stream);
      case WgmmaTileId::k128x64Mma:
        return LaunchIgemmWgmma<kOp, DType::kF32, WgmmaTileId::k128x64Mma>(params, operands,
                                                                           stream);
      default:
        break;
    }
  } else {
    switch (id) {
      case WgmmaTileId::k128x256:
        return LaunchIgemmWgmma<kOp, DType::kF32, WgmmaTileId::k128x256>(params, operands, stream);
      case WgmmaTileId::k256x128:
        return LaunchIgemmWgmma<kOp, DType::kF32, WgmmaTileId::k256x128>(params, operands, stream);
      case WgmmaTileId::k128x320:
        return LaunchIgemmWgmma<kOp, DType::kF32, WgmmaTileId::k128x320>(params, operands, stream);
      case WgmmaTileId::k192x128:
        return LaunchIgemmWgmma<kOp, DType::kF32, WgmmaTileId::k192x128>(params, operands, stream);
      case WgmmaTileId::k128x128Pingpong:
        return LaunchIgemmWgmma<kOp, DType::kF32, WgmmaTileId::k128x128Pingpong>(params, operands,
                                                                                 stream);
      case WgmmaTileId::k128x64Pingpong:
        return LaunchIgemmWgmma<kOp, DType::kF32, WgmmaTileId::k128x64Pingpong>(params, operands,
                                                                                stream);
      case WgmmaTileId::k128x128PingpongRows:
        return LaunchIgemmWgmma<kOp, DType::kF32, WgmmaTileId::k128x128PingpongRows>(
            params, operands, stream);
      case WgmmaTileId::k128x64PingpongResidentF32:
        return LaunchIgemmWgmma<kOp, DType::kF32, WgmmaTileId::k128x64PingpongResidentF32>(
            params, operands, stream);
      default:
        break;
    }
  }
  return Status::Internal("no such tile");
}

template <Op kOp>
Status LaunchType(DType dtype, WgmmaTileId id, const Plan& plan, void* stream) {
  if (dtype == DType::kF32) return LaunchTf32Tile<kOp>(id, plan, stream);
  return dtype == DType::kBF16 ? LaunchTile<kOp, DType::kBF16>(id, plan, stream)
                               : LaunchTile<kOp, DType::kF16>(id, plan, stream);
}

Status Launch(const Instance& instance, Op op, DType dtype, const ConvProblem& problem,
              const KernelArgs& args) {
  Plan plan;
  JAXCONV_RETURN_IF_ERROR(Accept(instance, op, dtype, problem, &plan));
  const int64_t most = MostSlices(instance, problem, plan);
  if (args.slices < 1 || args.slices > most) {
    return Status::InvalidArgument("slices: expected 1 to " + std::to_string(most) + ", got " +
                                   std::to_string(args.slices));
  }
  if (!NoneEmpty(instance, plan, args.slices)) {
    return Status::InvalidArgument("slices: " + std::to_string(args.slices) + " slices of " +
                                   std::to_string(plan.steps) + " steps leave one empty");
  }
  const int64_t workspace_bytes = WorkspaceBytes(instance, problem, args.slices);
  JAXCONV_RETURN_IF_ERROR(CheckBuffers(args, workspace_bytes));
  IgemmWgmmaParams& params = plan.params;
  plan.operands.a = args.lhs;
  plan.operands.b = TransposesFilter(problem) ? args.workspace : args.rhs;
  const bool split = PartialBytes(instance, problem, args.slices) > 0;
  float* const partial =
      static_cast<float*>(args.workspace) + TransposedFilterBytes(problem) / int64_t{sizeof(float)};
  params.out = split ? partial : args.out;
  params.out_is_f32 = split || problem.output_dtype() == DType::kF32;
  const int64_t slices = instance.cluster ? 1 : args.slices;
  params.cluster = FastDivmod(args.slices / slices);
  params.slices = FastDivmod(slices);
  params.steps_per_slice = static_cast<int32_t>(CeilDiv(plan.steps, slices));
  params.slice_elements = split ? OutputElements(problem) : 0;
  params.tiles = static_cast<int32_t>(plan.tiles * slices);
  if (DrawBytes(instance, problem) > 0) {
    params.drawn = static_cast<int32_t*>(args.workspace);
    JAXCONV_RETURN_IF_ERROR(LaunchWgmmaDrawReset(params.drawn, args.stream));
  }
  if (TransposesFilter(problem)) {
    JAXCONV_RETURN_IF_ERROR(LaunchFilterTranspose(args.rhs, problem.batch * problem.taps(),
                                                  problem.c_per_group(), problem.k, args.workspace,
                                                  args.stream));
  }
  const Op kernel = KernelOp(problem);
  const Status status =
      kernel == Op::kFprop   ? LaunchType<Op::kFprop>(dtype, instance.id, plan, args.stream)
      : kernel == Op::kDgrad ? LaunchType<Op::kDgrad>(dtype, instance.id, plan, args.stream)
                             : LaunchType<Op::kWgrad>(dtype, instance.id, plan, args.stream);
  if (!status.ok() || !split) return status;
  return LaunchSplitkReduce(partial, OutputElements(problem), args.slices, args.out,
                            problem.output_dtype(), args.stream);
}

}  // namespace

std::vector<KernelRow> IgemmWgmmaRows() {
  std::vector<KernelRow> rows;
  for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const Instance& instance : kInstances) {
        if (!HasRow(instance, op, dtype)) continue;
        KernelRow row;
        row.name = std::string(Name(op)) + "_" + kFamily + "_" + Name(dtype) + "_" +
                   std::to_string(instance.cost.tile_m) + "x" +
                   std::to_string(instance.cost.tile_n) + "x" +
                   std::to_string(instance.wgrad_rows ? kWgradRowsPixels : StepChannels(dtype)) +
                   instance.suffix;
        row.family = kFamily;
        row.op = op;
        row.min_cc = row.max_cc = 90;  // wgmma is of this architecture alone
        row.can_implement = [&instance, op, dtype](const ConvProblem& problem) {
          Plan plan;
          return Accept(instance, op, dtype, problem, &plan);
        };
        row.slices = [&instance](const ConvProblem& problem, const DeviceInfo& device) {
          return Slices(instance, problem, device);
        };
        row.workspace_bytes = [&instance](const ConvProblem& problem, int64_t slices) {
          return WorkspaceBytes(instance, problem, slices);
        };
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
