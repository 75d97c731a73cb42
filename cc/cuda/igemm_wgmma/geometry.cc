#include "cuda/igemm_wgmma/geometry.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/implicit_gemm.h"
#include "cuda/common/folded_columns.h"
#include "cuda/common/im2col_box.h"

namespace jaxconv::igemm_wgmma {
namespace {

Status Multiple(const char* what, int64_t value, int64_t of) {
  if (value % of == 0) return {};
  return Status::Unimplemented(std::string(what) + " " + std::to_string(value) +
                               " is not a multiple of " + std::to_string(of));
}

Status CheckChannels(const ConvProblem& problem) {
  // Tensor map pitches must be multiples of 16 bytes; output vectors have 16 bytes.
  const int64_t vector = 16 / ByteWidth(problem.lhs_dtype());
  const int64_t k_block = KBlockElements(problem.lhs_dtype());
  JAXCONV_RETURN_IF_ERROR(Multiple("C/groups", problem.c_per_group(), vector));
  JAXCONV_RETURN_IF_ERROR(Multiple("K/groups", problem.k_per_group(), vector));
  if (problem.op == Op::kWgrad) {
    if (problem.lhs_dtype() != DType::kF32) return {};
    // One box loads 32 columns of consecutive pixels.
    return Multiple("K/groups", problem.k_per_group(), k_block);
  }
  if (problem.groups == 1) return {};
  // A k-block must not reach into the next group's channels.
  return problem.op == Op::kDgrad ? Multiple("K/groups", problem.k_per_group(), k_block)
                                  : Multiple("C/groups", problem.c_per_group(), k_block);
}

// The filter as a tensor map.
Status PlaceFilter(const ConvProblem& problem, LaunchParams* launch) {
  launch->b_columns = problem.k;
  launch->b_rows = problem.c_per_group();
  launch->b_taps = problem.taps() * problem.batch;
  if (TransposesFilter(problem)) std::swap(launch->b_columns, launch->b_rows);
  if (problem.filter_layout == FilterLayout::kRsck) return {};
  if (problem.batch * problem.groups > 1) {
    // To the kernel a group is a range of the axis that is K in rsck, a batch a range of taps.
    return Status::Unimplemented("a filter stored as krsc of one group and one batch only");
  }
  if (TransposesFilter(problem)) {
    return Status::Unimplemented("dgrad in TF32 reads filters stored as rsck, got krsc");
  }
  JAXCONV_RETURN_IF_ERROR(CheckKrscLines(problem));
  if (problem.op == Op::kDgrad && problem.taps() > 1 && problem.k % 16 == 0) {
    // With krsc, rows of the last k-block past K cost as much as the others; with rsck they cost
    // nothing: 81 us instead of 65 for 3x3 with C = 256 and K = 32. If K is an odd multiple of 8,
    // the rows of rsck do not begin at a sector, which costs more than that: 123 us instead of 94
    // for C = 128 and K = 1000.
    JAXCONV_RETURN_IF_ERROR(
        Multiple("K of a filter stored as krsc", problem.k, KBlockElements(problem.lhs_dtype())));
  }
  std::swap(launch->b_columns, launch->b_rows);
  launch->b_row_stride = problem.taps() * problem.c;
  launch->b_tap_stride = problem.c;
  return {};
}

// 3xTF32: the workspace holds both parts of the filter as one tensor with twice the taps.
void SplitFilter(const ConvProblem& problem, LaunchParams* launch) {
  FilterSplit& split = launch->filter_split;
  split.matrices = launch->b_taps;
  split.rows = launch->b_rows;
  split.columns = launch->b_columns;
  split.transposed = TransposesFilter(problem);
  split.row_stride = launch->b_row_stride > 0 ? launch->b_row_stride
                     : split.transposed       ? split.rows
                                              : split.columns;
  split.matrix_stride =
      launch->b_tap_stride > 0 ? launch->b_tap_stride : split.rows * split.columns;
  split.pitch = CeilDiv(split.columns, 16) * 16;
  launch->b_columns = split.pitch;
  launch->b_taps *= 2;
  launch->b_row_stride = launch->b_tap_stride = 0;
}

// One residue class: its pixels, taps and rows of gemm_m. `matrix`: the activations are loaded as a
// matrix, not by im2col.
Status MakeResidueClass(const Instance& instance, const ConvProblem& problem,
                        const ImplicitGemm& gemm, int index, bool matrix, Geometry* geometry) {
  LaunchParams& launch = geometry->launch;
  ResidueClass& made = launch.kernel.residue_class[index];
  const Im2colLimits& limits = kIm2colLimits[problem.rank];
  const bool filter_row = instance.Is(kFilterRow) && problem.op != Op::kWgrad;
  AxisPhase on_axis[3];
  bool empty = false;
  for (int a = 0; a < 3; ++a) {
    on_axis[a] = gemm.PhaseOfAxis(index, a);
    empty = empty || on_axis[a].tap_count == 0;
  }
  int64_t rows = gemm.images, filter_pitch = 1, taps = 1;
  for (int i = 0; i < 3; ++i) {
    const GatherAxis& axis = gemm.axis[2 - i];
    const AxisPhase& on = on_axis[2 - i];
    made.residue[i] = on.phase;
    made.taps[i] = empty ? 1 : on.tap_count;
    const int64_t reach = int64_t{made.taps[i] - 1} * axis.src_per_t;
    const int64_t src0 = empty ? 0 : on.src0;
    const int64_t nearest = src0 + std::min<int64_t>(0, reach);
    // The box of base pixels begins in the padding or at the first pixel, never inside the tensor.
    // If the padding is wider than the filter, the tap offsets carry the difference. This is a
    // precaution: measurements with the corner inside the tensor could not be told apart from
    // errors of XLA:CPU (docs/notes/igemm_wgmma.md).
    const int64_t lower = std::min<int64_t>(0, nearest);
    const int64_t span = src0 + std::max<int64_t>(0, reach) - lower;  // span of the offsets
    int64_t walked = on.dst_count;
    if (i == 0) {
      made.width = on.dst_count;
      if (filter_row) {
        if (axis.src_per_j != 1 || axis.taps == 1 || span > kMaxSpan || matrix) {
          return Status::Unimplemented(
              "filter-row reuse needs a filter of several taps along the last axis, of stride 1, "
              "that reach over at most " +
              std::to_string(kMaxSpan) + " pixels");
        }
        walked = WalkedPixels(walked, span, axis.src_extent, lower);
      }
    }
    made.count[i] = FastDivmod(walked);
    rows *= walked;
    made.offset0[i] = static_cast<int32_t>(src0 - lower);
    made.offset_step[i] = axis.src_per_t;
    made.filter0 += static_cast<int32_t>(on.first_tap * filter_pitch * !empty);
    made.filter_step[i] = static_cast<int32_t>(axis.tap_period * filter_pitch);
    filter_pitch *= axis.taps;
    taps *= made.taps[i];
    made.lower[i] = static_cast<int32_t>(lower);
    const int64_t upper = lower + (walked - 1) * axis.src_per_j + 1 - axis.src_extent;
    launch.a_upper[index][i] = static_cast<int32_t>(upper);
    if (i < problem.rank && !matrix &&
        (lower < limits.lower || upper < limits.lower || upper > limits.upper ||
         span > limits.offset)) {
      return Status::Unimplemented("a window from " + std::to_string(nearest) + " to " +
                                   std::to_string(upper + span) +
                                   " beyond the tensor's end, wider than TMA's fields");
    }
  }
  if (empty && problem.filter_layout == FilterLayout::kKrsc && problem.op == Op::kDgrad &&
      !filter_row && !instance.Is(kCluster) && !instance.Is(kSwapAb)) {
    // Where no tap hits, dgrad's kernel stores zeros directly; fprop's multiplies a k-block of
    // zeros: 52 us instead of 46 for 1x1 with 512 channels. The difference exceeds XLA's transpose
    // of the filter.
    return Status::Unimplemented("a filter stored as krsc only where every residue class has taps");
  }
  if (rows > kMaxIm2colRows) return Status::Unimplemented("more than 2^31 - 2^12 rows");
  made.rows = static_cast<int32_t>(rows);
  const int64_t taps_per_load = filter_row ? made.taps[0] : 1;
  made.k_blocks =
      static_cast<int32_t>(empty ? 1 : taps / taps_per_load * launch.kernel.channel_blocks.divisor);
  if (empty) {
    made.channel0 = static_cast<int32_t>(CeilDiv(std::max(problem.c, problem.k), 64) * 64);
  }
  if (index == 0) geometry->taps_per_load = static_cast<double>(taps_per_load);
  geometry->k_blocks = std::max<int64_t>(geometry->k_blocks, made.k_blocks);
  geometry->average_taps += static_cast<double>(made.k_blocks * taps_per_load);  // summed over
                                                                                 // residue classes
  return {};
}

// wgrad: gemm_m = taps x channel blocks; a k-block is a run of output pixels.
Status MakeWgrad(const ConvProblem& problem, Geometry* geometry) {
  LaunchParams& launch = geometry->launch;
  const int64_t k_block = KBlockElements(problem.lhs_dtype());
  const int64_t pixels = problem.n * problem.out_pixels();
  if (problem.batch > 1 && pixels % k_block != 0) {
    // The last k-block would multiply another batch's pixels by zeros, and 0 * NaN is NaN.
    return Status::Unimplemented("batched filters over " + std::to_string(pixels) +
                                 " pixels, not a multiple of " + std::to_string(k_block));
  }
  launch.kernel.pixels = static_cast<int32_t>(pixels);
  launch.b_rows = pixels;
  launch.b_taps = problem.batch;
  ResidueClass& all = launch.kernel.residue_class[0];
  const int64_t rows = problem.taps() * launch.kernel.channel_blocks.divisor * k_block;
  if (rows > kMaxIm2colRows) return Status::Unimplemented("more than 2^31 - 2^12 rows");
  all.rows = static_cast<int32_t>(rows);
  geometry->k_blocks = CeilDiv(pixels, k_block);
  geometry->average_taps = static_cast<double>(geometry->k_blocks);
  all.k_blocks = static_cast<int32_t>(geometry->k_blocks);
  return {};
}

// wgrad filter-row: each image row is followed by max(pad_lo, pad_hi) columns of zeros, and the
// rows of a tile are several taps of one filter row (wgrad_filter_row_sm90.cuh).
Status MakeWgradFilterRow(const ConvProblem& problem, const GatherAxis& axis, Geometry* geometry) {
  LaunchParams& launch = geometry->launch;
  ResidueClass& all = launch.kernel.residue_class[0];
  const int64_t taps = std::min<int64_t>(axis.taps, kWgradRowTaps);
  const int64_t span = (taps - 1) * axis.src_per_t;
  if (axis.taps == 1 || axis.src_per_j != 1 || span > kMaxSpan) {
    return Status::Unimplemented(
        "filter-row reuse needs a filter of several taps along the last axis, of stride 1, that "
        "reach over at most " +
        std::to_string(kMaxSpan) + " pixels");
  }
  if (problem.batch > 1) {
    return Status::Unimplemented(
        "filter-row reuse would carry one batch's infinities into another's filter");
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
                                 " pixels, wider than TMA's fields");
  }
  const int64_t image = walked * all.count[1].divisor * all.count[2].divisor;
  if ((problem.n + 1) * image > kMaxIm2colRows) {
    return Status::Unimplemented("more than 2^31 - 2^12 pixels");
  }
  all.count[0] = FastDivmod(walked);
  all.offset0[0] = axis.off;
  all.lower[0] = 0;
  launch.a_upper[0][0] = static_cast<int32_t>(walked - axis.src_extent);
  launch.b_upper = static_cast<int32_t>(walked - axis.dst_extent);
  for (int i = 0; i < 3; ++i) launch.b_extent[i] = problem.out[2 - i];
  const int64_t pixels = WgradRowPixels(problem.x_dtype);
  geometry->k_blocks = CeilDiv(problem.n * image, pixels);
  all.k_blocks = static_cast<int32_t>(geometry->k_blocks);
  geometry->taps_per_stage = static_cast<double>(pixels / KBlockElements(problem.x_dtype));
  geometry->average_taps = static_cast<double>(geometry->k_blocks) * geometry->taps_per_stage;
  const int64_t units = CeilDiv(all.taps[0], kWgradRowTaps) * all.taps[1] * all.taps[2] *
                        CeilDiv(launch.kernel.row_channels, 64);
  if (units * kWgradRowTaps * 64 > kMaxIm2colRows) {
    return Status::Unimplemented("more than 2^31 - 2^12 rows");
  }
  all.rows = static_cast<int32_t>(units * kWgradRowTaps * 64);
  return {};
}

// Whether a stationary filter fits in shared memory.
Status CheckWeightStationary(const Instance& instance, const ConvProblem& problem,
                             const ImplicitGemm& gemm, int64_t channel_blocks) {
  const int64_t k_blocks = problem.taps() * channel_blocks;
  // The number of ranges of output channels; a CTA processes one range.
  const int64_t most_ranges = instance.Is(kPointwise) && !instance.Is(kSwapAb) ? kTileCounters : 1;
  if (CeilDiv(gemm.gemm_n, instance.tile_n) <= most_ranges && gemm.batches * gemm.groups == 1 &&
      gemm.phases == 1 && k_blocks <= instance.stationary_k_blocks) {
    return {};
  }
  return Status::Unimplemented("the filter does not fit in shared memory: expected at most " +
                               std::to_string(most_ranges * instance.tile_n) + " columns and " +
                               std::to_string(instance.stationary_k_blocks) + " k-blocks, got " +
                               std::to_string(gemm.gemm_n) + " and " + std::to_string(k_blocks));
}

}  // namespace

bool TransposesFilter(const ConvProblem& problem) {
  return KernelOp(problem) == Op::kFprop && problem.w_dtype == DType::kF32;
}

bool SplitsFilter(const Instance& instance, const ConvProblem& problem) {
  return instance.Is(kThreeTf32) && problem.op != Op::kWgrad;
}

Status PatchesAsPixels(const ConvProblem& problem, ConvProblem* pixels) {
  constexpr int kRows = 1, kColumns = 2;
  const int64_t rows = problem.filter[kRows];
  if (problem.op != Op::kDgrad || problem.groups != 1 || problem.taps() != rows || rows == 1 ||
      problem.in[kColumns] != problem.out[kColumns] || problem.pad_lo[kColumns] != 0 ||
      problem.lhs_dilation[kColumns] != 1 || !FoldRows(problem, pixels)) {
    return Status::Unimplemented(
        "patches: expected the data gradient of windows that do not overlap, of several rows");
  }
  if (problem.output_dtype() != problem.lhs_dtype()) {
    return Status::Unimplemented("patches: stores results of the operands' type, got " +
                                 std::string(Name(problem.output_dtype())));
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireRsck());
  JAXCONV_RETURN_IF_ERROR(problem.RequireInt32());
  JAXCONV_RETURN_IF_ERROR(
      Multiple("C of a patch's row", problem.c, 16 / ByteWidth(problem.lhs_dtype())));
  pixels->c *= rows;
  pixels->in[kRows] = pixels->filter[kRows] = 1;
  return {};
}

void StorePatches(const ConvProblem& problem, LaunchParams* launch) {
  Params& params = launch->kernel;
  // A row of the GEMM begins at its column in the first row of the patch.
  params.dense_rows = 0;
  params.out_extent[1] = static_cast<int32_t>(problem.filter[1]);
  params.out_channels = static_cast<int32_t>(problem.c);
  params.patch_row = FastDivmod(problem.c);
  params.patch_skip = static_cast<int32_t>((problem.in[2] - 1) * problem.c);
}

Status MakeGeometry(const Instance& instance, const ConvProblem& problem, Geometry* geometry) {
  ImplicitGemm gemm;
  JAXCONV_RETURN_IF_ERROR(MakeImplicitGemm(problem, &gemm));
  JAXCONV_RETURN_IF_ERROR(CheckChannels(problem));
  const bool wgrad = problem.op == Op::kWgrad;
  if (gemm.phases > kMaxResidueClasses) {
    return Status::Unimplemented(std::to_string(gemm.phases) +
                                 " stride residue classes, expected at most " +
                                 std::to_string(kMaxResidueClasses));
  }
  if (std::max(gemm.batches * gemm.images * int64_t{gemm.axis[0].src_extent} *
                   gemm.axis[1].src_extent * gemm.axis[2].src_extent,
               gemm.batches * int64_t{gemm.gemm_m}) > kMaxIm2colRows) {
    return Status::Unimplemented("more than 2^31 - 2^12 pixels");
  }
  if (wgrad && !gemm.Dense()) return Status::Unimplemented("wgrad with lhs_dilation");
  if (instance.Is(kPointwise) && (problem.taps() > 1 || gemm.phases > 1)) {
    return Status::Unimplemented("pointwise: " + std::to_string(problem.taps()) + " taps and " +
                                 std::to_string(gemm.phases) +
                                 " stride residue classes, expected one of each");
  }
  if (instance.Is(kC48) && gemm.reduce_channels > kC48Channels) {
    return Status::Unimplemented("expected at most 48 channels in the reduction, got " +
                                 std::to_string(gemm.reduce_channels));
  }
  LaunchParams& launch = geometry->launch;
  Params& params = launch.kernel;
  params.images = gemm.images;
  params.gemm_n = gemm.gemm_n;
  params.residue_classes = gemm.phases;
  const int64_t channel_blocks = CeilDiv(wgrad ? gemm.row_channels : gemm.reduce_channels,
                                         KBlockElements(problem.lhs_dtype()));
  params.channel_blocks = FastDivmod(channel_blocks);
  params.filter_taps = static_cast<int32_t>(problem.taps());
  params.a_group = gemm.a_group;
  params.b_group = gemm.b_group;
  params.out_channels = gemm.out_channels;
  params.out_batch = gemm.out_batch;
  params.out_group = gemm.out_group;
  if (wgrad) params.row_channels = gemm.row_channels;
  params.dense_rows = gemm.phases == 1 && (wgrad || !instance.Is(kFilterRow));
  launch.output_elements = problem.op == Op::kFprop   ? problem.y_elements()
                           : problem.op == Op::kDgrad ? problem.x_elements()
                                                      : problem.w_elements();
  launch.output_is_f32 = problem.output_dtype() == DType::kF32;
  launch.a_channels = gemm.src_channels;
  launch.a_images = gemm.batches * gemm.images;
  JAXCONV_RETURN_IF_ERROR(PlaceFilter(problem, &launch));
  if (SplitsFilter(instance, problem)) SplitFilter(problem, &launch);
  bool matrix = gemm.phases == 1 && problem.taps() == 1;
  for (int i = 0; i < 3; ++i) {
    const GatherAxis& axis = gemm.axis[2 - i];
    params.src_step[i] = axis.src_per_j;
    params.period[i] = axis.period;
    params.out_extent[i] = axis.dst_extent;
    launch.a_extent[i] = axis.src_extent;
    matrix = matrix && axis.src_per_j == 1 && axis.off == 0 && axis.div == 1 &&
             axis.dst_extent == axis.src_extent;
    if (axis.src_per_j > kMaxElementStride) {
      return Status::Unimplemented("a stride of " + std::to_string(axis.src_per_j) +
                                   ", expected at most " + std::to_string(kMaxElementStride));
    }
  }
  params.rank = matrix ? 0 : problem.rank;
  for (int index = 0; index < gemm.phases; ++index) {
    JAXCONV_RETURN_IF_ERROR(MakeResidueClass(instance, problem, gemm, index, matrix, geometry));
  }
  geometry->average_taps /= gemm.phases;
  if (wgrad) JAXCONV_RETURN_IF_ERROR(MakeWgrad(problem, geometry));
  if (wgrad && instance.Is(kFilterRow)) {
    JAXCONV_RETURN_IF_ERROR(MakeWgradFilterRow(problem, gemm.axis[2], geometry));
  }
  if (instance.WeightStationary()) {
    JAXCONV_RETURN_IF_ERROR(CheckWeightStationary(instance, problem, gemm, channel_blocks));
  }
  int64_t rows = 0;
  for (int i = 0; i < gemm.phases; ++i) {
    rows = std::max<int64_t>(rows, params.residue_class[i].rows);
  }
  const int64_t n_tiles = CeilDiv(gemm.gemm_n, instance.tile_n);
  const int64_t m_tiles = CeilDiv(rows, instance.tile_m);
  params.n_tiles = FastDivmod(n_tiles);
  params.m_tiles = FastDivmod(m_tiles);
  params.groups = FastDivmod(gemm.groups);
  params.batches = FastDivmod(gemm.batches);
  geometry->tiles = n_tiles * m_tiles * gemm.groups * gemm.batches * gemm.phases;
  if (geometry->tiles >= (int64_t{1} << 30) / kMaxSlices) {
    return Status::Unimplemented("the grid has " + std::to_string(geometry->tiles) +
                                 " tiles, expected less than 2^21");
  }
  return {};
}

}  // namespace jaxconv::igemm_wgmma
