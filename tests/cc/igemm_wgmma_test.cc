// Executes plans of igemm_wgmma on the CPU by the rules of TMA, and compares every box, tap and
// output row with the definition of the convolution. Uses the plan's parameter block, without CUDA.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/igemm_wgmma_plans.h"
#include "cc/naive_conv.h"

namespace jaxconv::igemm_wgmma {
namespace {

// Rules for the im2col box of each axis: base pixels lie inside the box, the box has as many as the
// residue class, and offsets are not negative.
void CheckBox(const ConvProblem& problem, const LaunchParams& launch, int index) {
  const Params& p = launch.kernel;
  const ResidueClass& of = p.residue_class[index];
  for (int i = 0; i < p.rank; ++i) {
    const int64_t end = launch.a_extent[i] + launch.a_upper[index][i];
    const int64_t last = of.lower[i] + int64_t{of.count[i].divisor - 1} * p.src_step[i];
    if (last >= end) Fail(problem, "a base pixel outside the box");
    if ((end - of.lower[i] + p.src_step[i] - 1) / p.src_step[i] != int64_t{of.count[i].divisor}) {
      Fail(problem, "the box holds another number of pixels than the residue class");
    }
    if (of.lower[i] > 0) Fail(problem, "the box begins inside the tensor");
    if (of.offset0[i] + std::min(0, (of.taps[i] - 1) * of.offset_step[i]) < 0) {
      Fail(problem, "a negative offset");
    }
  }
}

// Executes a plan of fprop or dgrad: the kernel's sums, one output element at a time.
std::vector<double> CarryOut(const ConvProblem& problem, const Plan& plan, bool filter_row,
                             const std::vector<double>& lhs, const std::vector<double>& rhs) {
  const auto& launch = plan.As<LaunchParams>();
  const Params& p = launch.kernel;
  const bool dgrad = problem.op == Op::kDgrad;
  const int64_t channels = dgrad ? problem.k_per_group() : problem.c_per_group();
  const bool strided = launch.b_row_stride > 0;
  const int64_t row_stride = strided ? launch.b_row_stride : launch.b_columns;
  const int64_t tap_stride = strided ? launch.b_tap_stride : launch.b_rows * launch.b_columns;
  std::vector<double> out(launch.output_elements, NAN);
  for (int q = 0; q < p.residue_classes; ++q) CheckBox(problem, launch, q);
  for (int64_t batch = 0; batch < problem.batch; ++batch) {
    for (int q = 0; q < p.residue_classes; ++q) {
      const ResidueClass& of = p.residue_class[q];
      const int32_t loads = (filter_row ? 1 : of.taps[0]) * of.taps[1] * of.taps[2] *
                            static_cast<int32_t>(p.channel_blocks.divisor);
      if (of.k_blocks != loads && of.channel0 == 0) Fail(problem, "wrong number of k-blocks");
      for (int32_t row = 0; row < of.rows; ++row) {
        int32_t image = row, j[3];
        for (int i = 0; i < 3; ++i) of.count[i].Divmod(image, &image, &j[i]);
        int64_t dst = row;
        if (!p.dense_rows && j[0] >= of.width) continue;  // the padding of a row has no output
        if (!p.dense_rows) {
          dst = image;
          for (int i = 2; i >= 0; --i) {
            dst = dst * p.out_extent[i] + of.residue[i] + int64_t{j[i]} * p.period[i];
          }
        }
        for (int64_t group = 0; group < problem.groups; ++group) {
          for (int64_t n = 0; n < p.gemm_n; ++n) {
            double sum = 0;
            for (int32_t t2 = 0; t2 < of.taps[2]; ++t2) {
              for (int32_t t1 = 0; t1 < of.taps[1]; ++t1) {
                for (int32_t t0 = 0; t0 < of.taps[0]; ++t0) {
                  const int32_t t[3] = {t0, t1, t2};
                  int64_t src[3], tap = of.filter0;
                  // Filter-row: the next tap is a later pixel of the same im2col walk, perhaps in
                  // the next row.
                  int32_t walked = row, at[3];
                  if (filter_row) walked += of.offset0[0] + t0 * of.offset_step[0];
                  if (walked > row + kMaxSpan) Fail(problem, "a tap reaches out of the load");
                  for (int i = 0; i < 3; ++i) of.count[i].Divmod(walked, &walked, &at[i]);
                  const int64_t from = batch * p.images + walked;
                  bool inside = of.channel0 == 0 && from < launch.a_images;
                  for (int i = 0; i < 3; ++i) {
                    const int64_t offset = of.offset0[i] + int64_t{t[i]} * of.offset_step[i];
                    src[i] = of.lower[i] + int64_t{at[i]} * p.src_step[i] +
                             (p.rank == 0 || (filter_row && i == 0) ? 0 : offset);
                    tap += int64_t{t[i]} * of.filter_step[i];
                    inside = inside && src[i] >= 0 && src[i] < launch.a_extent[i];
                  }
                  if (!inside) continue;
                  const int64_t pixel =
                      ((from * launch.a_extent[2] + src[2]) * launch.a_extent[1] + src[1]) *
                          launch.a_extent[0] +
                      src[0];
                  for (int64_t c = 0; c < channels; ++c) {
                    // The filter's innermost index is gemm_n in fprop, except in float32, and the
                    // reduction in float32 and in dgrad.
                    const bool fprop = plan.kernel->op == Op::kFprop;
                    const int64_t of_n = n + (fprop ? group * p.b_group : 0);
                    const int64_t of_c = c + (fprop ? 0 : group * p.b_group);
                    const bool n_innermost = fprop && problem.w_dtype != DType::kF32;
                    const int64_t row_b = n_innermost ? of_c : of_n;
                    const int64_t column = n_innermost ? of_n : of_c;
                    if (row_b >= launch.b_rows || column >= launch.b_columns) {
                      Fail(problem, "a place outside the filter");
                      continue;
                    }
                    sum += lhs[pixel * launch.a_channels + group * p.a_group + c] *
                           rhs[(batch * p.filter_taps + tap) * tap_stride + row_b * row_stride +
                               column];
                  }
                }
              }
            }
            out[batch * p.out_batch + dst * p.out_channels + group * p.out_group + n] = sum;
          }
        }
      }
    }
  }
  return out;
}

// Executes a plan of wgrad: GEMM rows are taps times blocks of 64 channels (32 in float32), and a
// k-block has as many pixels.
std::vector<double> CarryOutWgrad(const ConvProblem& problem, const Plan& plan,
                                  const std::vector<double>& x, const std::vector<double>& dy) {
  const auto& launch = plan.As<LaunchParams>();
  const Params& p = launch.kernel;
  const ResidueClass& of = p.residue_class[0];
  std::vector<double> out(launch.output_elements, NAN);
  const auto block = static_cast<int32_t>(KBlockElements(problem.x_dtype));
  if (of.k_blocks * block < p.pixels) Fail(problem, "the k-blocks do not cover the pixels");
  CheckBox(problem, launch, 0);
  for (int64_t batch = 0; batch < problem.batch; ++batch) {
    for (int32_t row = 0; row < of.rows; ++row) {
      int32_t tap, channel_block, t[3];
      p.channel_blocks.Divmod(row / block, &tap, &channel_block);
      const int32_t channel = channel_block * block + row % block;
      if (channel >= p.row_channels) continue;
      t[0] = tap % of.taps[0];
      t[1] = tap / of.taps[0] % of.taps[1];
      t[2] = tap / of.taps[0] / of.taps[1];
      for (int64_t group = 0; group < problem.groups; ++group) {
        for (int64_t n = 0; n < p.gemm_n; ++n) {
          double sum = 0;
          for (int32_t pixel = 0; pixel < p.pixels; ++pixel) {
            int32_t rest = pixel, j[3];
            int64_t src[3];
            bool inside = true;
            for (int i = 0; i < 3; ++i) {
              of.count[i].Divmod(rest, &rest, &j[i]);
              src[i] = of.lower[i] + int64_t{j[i]} * p.src_step[i] + of.offset0[i] +
                       int64_t{t[i]} * of.offset_step[i];
              inside = inside && src[i] >= 0 && src[i] < launch.a_extent[i];
            }
            if (!inside) continue;
            const int64_t from =
                (((batch * p.images + rest) * launch.a_extent[2] + src[2]) * launch.a_extent[1] +
                 src[1]) *
                    launch.a_extent[0] +
                src[0];
            sum += x[from * launch.a_channels + group * p.a_group + channel] *
                   dy[(batch * launch.b_rows + pixel) * launch.b_columns + group * p.b_group + n];
          }
          out[batch * p.out_batch + (int64_t{tap} * p.row_channels + channel) * p.out_channels +
              group * p.out_group + n] = sum;
        }
      }
    }
  }
  return out;
}

// Executes a filter-row plan of wgrad. x and dy are padded to rows of equal length, and every tap
// of a filter row reads the same walk of x at a different offset.
std::vector<double> CarryOutWgradFilterRow(const ConvProblem& problem, const Plan& plan,
                                           const std::vector<double>& x,
                                           const std::vector<double>& dy) {
  const auto& launch = plan.As<LaunchParams>();
  const Params& p = launch.kernel;
  const ResidueClass& of = p.residue_class[0];
  std::vector<double> out(launch.output_elements, 0.0);
  const auto width = static_cast<int32_t>(of.count[0].divisor);
  const auto image_pixels = static_cast<int32_t>(width * of.count[1].divisor * of.count[2].divisor);
  if (launch.a_extent[0] + launch.a_upper[0][0] - of.lower[0] != width ||
      launch.b_extent[0] + launch.b_upper != width) {
    Fail(problem, "the boxes hold other numbers of pixels than the walk");
  }
  for (int i = 0; i < p.rank; ++i) {
    if (of.lower[i] > 0) Fail(problem, "the box begins inside the tensor");
  }
  const auto pixels = static_cast<int32_t>(of.k_blocks * WgradRowPixels(problem.x_dtype));
  if (pixels < p.images * image_pixels) {
    Fail(problem, "the k-blocks miss pixels");
  }
  // The image and the coordinates of the pixel at `index`. The kernel adds one image to every index
  // so that none is negative.
  auto place_of = [&](int32_t index, int64_t (&j)[3]) {
    int32_t rest = index + image_pixels, coordinate;
    if (rest < 0) Fail(problem, "a negative place of the walk");
    for (int i = 0; i < 3; ++i) {
      of.count[i].Divmod(rest, &rest, &coordinate);
      j[i] = coordinate;
    }
    return int64_t{rest} - 1;
  };
  auto x_at = [&](int32_t index, int32_t t1, int32_t t2, int64_t channel) {
    int64_t j[3];
    const int64_t image = place_of(index, j);
    const int64_t w = of.lower[0] + j[0];
    const int64_t h = of.lower[1] + j[1] * p.src_step[1] + of.offset0[1] + t1 * of.offset_step[1];
    const int64_t d = of.lower[2] + j[2] * p.src_step[2] + of.offset0[2] + t2 * of.offset_step[2];
    if (image < 0 || image >= p.images || w >= launch.a_extent[0] || h < 0 ||
        h >= launch.a_extent[1] || d < 0 || d >= launch.a_extent[2]) {
      return 0.0;
    }
    return x[(((image * launch.a_extent[2] + d) * launch.a_extent[1] + h) * launch.a_extent[0] +
              w) *
                 launch.a_channels +
             channel];
  };
  auto dy_at = [&](int32_t index, int64_t k) {
    int64_t j[3];
    const int64_t image = place_of(index, j);
    if (image >= p.images || j[0] >= launch.b_extent[0]) return 0.0;
    return dy[(((image * launch.b_extent[2] + j[2]) * launch.b_extent[1] + j[1]) *
                   launch.b_extent[0] +
               j[0]) *
                  launch.b_columns +
              k];
  };
  for (int32_t index = 0; index < pixels; ++index) {
    for (int64_t group = 0; group < problem.groups; ++group) {
      for (int64_t k = 0; k < p.gemm_n; ++k) {
        const double factor = dy_at(index, group * p.b_group + k);
        if (factor == 0) continue;
        for (int32_t tap = 0; tap < p.filter_taps; ++tap) {
          const int32_t t0 = tap % of.taps[0], t1 = tap / of.taps[0] % of.taps[1];
          const int32_t t2 = tap / of.taps[0] / of.taps[1];
          for (int64_t c = 0; c < p.row_channels; ++c) {
            out[(int64_t{tap} * p.row_channels + c) * p.out_channels + group * p.out_group + k] +=
                factor *
                x_at(index + of.offset0[0] + t0 * of.offset_step[0], t1, t2, group * p.a_group + c);
          }
        }
      }
    }
  }
  return out;
}

// Tiles, slices and CTAs: they cover the output, and no slice is empty.
void CheckGrid(const KernelDesc& kernel, const ConvProblem& problem, const Plan& plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  const auto& launch = plan.As<LaunchParams>();
  const Params& p = launch.kernel;
  const int64_t n_tiles = p.n_tiles.divisor, m_tiles = p.m_tiles.divisor;
  int64_t rows = 0, k_blocks = 0;
  for (int q = 0; q < p.residue_classes; ++q) {
    rows = std::max<int64_t>(rows, p.residue_class[q].rows);
    k_blocks = std::max<int64_t>(k_blocks, p.residue_class[q].k_blocks);
  }
  if (n_tiles != CeilDiv(p.gemm_n, instance.tile_n) || m_tiles != CeilDiv(rows, instance.tile_m) ||
      p.tiles != n_tiles * m_tiles * p.slices.divisor * problem.groups * problem.batch *
                     p.residue_classes) {
    Fail(problem, std::string(kernel.name) + ": the tiles do not cover the output");
  }
  const bool cluster = instance.Is(kCluster), wgrad = problem.op == Op::kWgrad;
  if (cluster ? launch.ctas != p.tiles * plan.slices
              : launch.ctas < 1 || launch.ctas > std::max<int64_t>(H200().sm_count, n_tiles)) {
    Fail(problem, std::string(kernel.name) + ": " + std::to_string(launch.ctas) + " CTAs");
  }
  if (instance.WeightStationary() && launch.ctas % n_tiles != 0) {
    Fail(problem, std::string(kernel.name) + ": a CTA meets other columns");
  }
  const int64_t slices = p.slices.divisor;
  const bool full = wgrad && instance.Is(kFilterRow)
                        ? slices <= k_blocks
                        : p.k_blocks_per_slice * slices >= k_blocks &&
                              p.k_blocks_per_slice * (slices - 1) < k_blocks;
  if (!full) Fail(problem, std::string(kernel.name) + ": an empty slice, or k-blocks left out");
  const int64_t partial = slices > 1 ? slices * launch.output_elements * 4 : 0;
  const int64_t transposed = launch.transposes_filter           ? problem.w_elements() * 4
                             : launch.filter_split.matrices > 0 ? launch.filter_split.bytes()
                                                                : 0;
  if (p.slice_elements != (slices > 1 ? launch.output_elements : 0) ||
      launch.partial_offset != transposed || (slices > 1 && p.out_is_f32 != 1) ||
      plan.workspace_bytes != transposed + partial + (launch.resets_counters ? 64 : 0)) {
    Fail(problem, std::string(kernel.name) + ": the workspace is not what its parts take");
  }
}

// The large parts of a split operand, in which small integers have no small parts. The order of 16
// columns is the kernels'.
std::vector<double> Split(const FilterSplit& split, const std::vector<double>& b) {
  std::vector<double> big(split.matrices * split.rows * split.pitch);
  for (int64_t i = 0; i < split.matrices; ++i) {
    for (int64_t row = 0; row < split.rows; ++row) {
      for (int64_t column = 0; column < split.columns; ++column) {
        big[(i * split.rows + row) * split.pitch + column] =
            b[i * split.matrix_stride + (split.transposed ? column * split.row_stride + row
                                                          : row * split.row_stride + column)];
      }
    }
  }
  return big;
}

// Checks all instances of the operation and type. Their sums depend on the geometry only, so each
// geometry is executed once. `accepted` and `in_filter_row` count the geometries.
void Check(const ConvProblem& problem, int* accepted, int* in_filter_row) {
  const bool wgrad = problem.op == Op::kWgrad, dgrad = problem.op == Op::kDgrad;
  std::vector<double> lhs, rhs, expected;
  std::vector<LaunchParams> carried_out;
  for (const KernelDesc& kernel : AllKernels()) {
    if (kernel.op != problem.op || kernel.dtype != problem.lhs_dtype()) continue;
    Plan plan;
    if (Status status = PlanOf(kernel, problem, &plan); !status.ok()) {
      if (status.message().empty()) Fail(problem, "refused without a reason");
      continue;
    }
    CheckGrid(kernel, problem, plan);
    Plan chosen;
    if (!PlanOf(kernel, problem, &chosen, 0).ok() || !(chosen.microseconds > 0) ||
        chosen.microseconds > plan.microseconds) {
      Fail(problem, std::string(kernel.name) + ": slices that are not the best");
    } else {
      CheckGrid(kernel, problem, chosen);
    }
    const bool filter_row = static_cast<const Instance*>(kernel.instance)->Is(kFilterRow);
    const auto& launch = plan.As<LaunchParams>();
    const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
    const bool split = launch.filter_split.matrices > 0;
    const bool across = problem.op == Op::kFprop && kernel.dtype == DType::kF32 && !krsc;
    if (split ? launch.transposes_filter || launch.filter_split.transposed != across
              : launch.transposes_filter != across) {
      Fail(problem, "TF32 takes the filter of fprop, and no other, transposed");
    }
    if (krsc && (problem.batch > 1 || plan.kernel->op == problem.op)) {
      Fail(problem, "a filter stored as krsc takes the other operation's kernel, without batches");
    }
    // Clear the fields that depend on the tile only.
    LaunchParams geometry = launch;
    geometry.kernel.n_tiles = geometry.kernel.m_tiles = FastDivmod();
    geometry.kernel.tiles = geometry.ctas = 0;
    if (std::any_of(carried_out.begin(), carried_out.end(), [&](const LaunchParams& other) {
          return std::memcmp(&other, &geometry, sizeof(geometry)) == 0;
        })) {
      continue;
    }
    carried_out.push_back(geometry);
    ++*(filter_row ? in_filter_row : accepted);
    if (expected.empty()) {
      std::mt19937 random(7);
      auto draw = [&](int64_t count) {
        std::vector<double> values(count);
        for (double& v : values) v = static_cast<int>(random() % 7) - 3;
        return values;
      };
      lhs = draw(dgrad ? problem.y_elements() : problem.x_elements());
      rhs = draw(wgrad ? problem.y_elements() : problem.w_elements());
      expected = NaiveConv(problem, lhs, rhs);
    }
    std::vector<double> b = rhs;
    if (launch.transposes_filter) {
      const int64_t rows = launch.b_columns, columns = launch.b_rows;
      for (int64_t i = 0; i < launch.b_taps; ++i) {
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < columns; ++c) {
            b[(i * columns + c) * rows + r] = rhs[(i * rows + r) * columns + c];
          }
        }
      }
    }
    if (split) b = Split(launch.filter_split, rhs);
    const std::vector<double> out = !wgrad       ? CarryOut(problem, plan, filter_row, lhs, b)
                                    : filter_row ? CarryOutWgradFilterRow(problem, plan, lhs, b)
                                                 : CarryOutWgrad(problem, plan, lhs, b);
    if (out != expected) Fail(problem, std::string(kernel.name) + " differs from the definition");
  }
}

// The CTAs of a cluster split the k-blocks of every residue class without gaps and without a
// workspace.
void CheckCluster(const ConvProblem& problem) {
  const KernelDesc& kernel = KernelNamed(problem.op, "bf16_64x64x64_cluster");
  for (int64_t ranks = 1; ranks <= kMaxClusterCtas; ++ranks) {
    Plan plan;
    if (!PlanOf(kernel, problem, &plan, ranks).ok()) break;  // more CTAs than k-blocks, or refused
    const Params& p = plan.As<LaunchParams>().kernel;
    if (p.cluster.divisor != ranks || p.slices.divisor != 1 || p.slice_elements != 0 ||
        plan.workspace_bytes != 0) {
      Fail(problem, "the cluster is not the one that was asked for");
    }
    for (int q = 0; q < p.residue_classes; ++q) {
      const int32_t k_blocks = p.residue_class[q].k_blocks;
      int32_t end = 0, longest = 0;
      for (int32_t rank = 0; rank < ranks; ++rank) {
        const int32_t next = p.cluster.Div((rank + 1) * k_blocks);
        longest = std::max(longest, next - end);
        end = next;
      }
      if (end != k_blocks || longest != (k_blocks + ranks - 1) / ranks) {
        Fail(problem, "the parts of a reduction are uneven");
      }
    }
  }
}

// Padding before the image that is wider than the filter: the padding of dgrad is negative, so its
// window begins inside dy.
void CheckWidePadding() {
  for (const char* line :
       {"dgrad bf16:bf16:bf16 default b1 n3 g2 c384 k128 i148 f3 o150 s1 l1 d1 p4_0",
        "dgrad bf16:bf16:bf16 default b1 n1 g1 c72 k128 i92 f3 o94 s1 l1 d1 p3_1"}) {
    ConvProblem problem;
    if (!ConvProblem::Parse(line, &problem).ok()) Fail(problem, "does not parse");
    int accepted = 0, in_filter_row = 0;
    Check(problem, &accepted, &in_filter_row);
    if (accepted == 0 || in_filter_row == 0) Fail(problem, "refused");
  }
}

}  // namespace
}  // namespace jaxconv::igemm_wgmma

int main() {
  using namespace jaxconv;
  std::mt19937 random(20261120);
  auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % (high - low + 1));
  };
  int accepted = 0, in_filter_row = 0, as_krsc = 0, wide = 0, checked = 0;
  while (checked < 1800) {
    ConvProblem problem;
    problem.op = checked % 3 == 0 ? Op::kFprop : checked % 3 == 1 ? Op::kDgrad : Op::kWgrad;
    const bool f32 = checked / 3 % 2 == 1;
    problem.x_dtype = problem.w_dtype = problem.y_dtype = f32 ? DType::kF32 : DType::kBF16;
    problem.rank = draw(1, 3);
    problem.batch = draw(1, 2);
    problem.n = draw(1, 2);
    problem.c = f32 ? 4 * draw(1, 10) : 8 * draw(1, 2);
    problem.k = f32 && problem.op == Op::kWgrad ? 32 : f32 ? 4 * draw(1, 4) : 8 * draw(1, 2);
    if (draw(0, 15) == 0) problem.c = problem.k = 128, problem.groups = 2;
    const int largest = problem.rank == 3 || problem.groups > 1 ? 4 : 9;
    // A third of the problems have padding on either or both sides that is wider than the filter or
    // negative.
    const bool is_wide = checked / 6 % 3 == 0;
    for (int a = 3 - problem.rank; a < 3; ++a) {
      problem.in[a] = draw(1, largest);
      problem.filter[a] = draw(1, 3);
      problem.stride[a] = is_wide && draw(0, 1) == 0 ? 1 : draw(1, 3);
      problem.lhs_dilation[a] = draw(0, 3) == 0 ? 2 : 1;
      problem.dilation[a] = draw(1, 3);
      auto padding = [&]() -> int64_t {
        if (!is_wide) return draw(-2, 4);
        const auto reach = static_cast<int>((problem.filter[a] - 1) * problem.dilation[a]);
        return draw(0, 2) == 0 ? -draw(0, 3) : reach + draw(0, 5);
      };
      problem.pad_lo[a] = padding();
      problem.pad_hi[a] = padding();
      problem.out[a] =
          OutputExtent(problem.in[a], problem.filter[a], problem.stride[a], problem.lhs_dilation[a],
                       problem.dilation[a], problem.pad_lo[a], problem.pad_hi[a]);
    }
    if (!problem.Validate().ok()) continue;  // the output is empty
    ++checked;
    const int before = accepted + in_filter_row;
    igemm_wgmma::Check(problem, &accepted, &in_filter_row);
    if (is_wide) wide += accepted + in_filter_row - before;
    if (problem.op == Op::kWgrad) continue;
    if (!f32) igemm_wgmma::CheckCluster(problem);
    if (problem.groups > 1 || problem.rank == 3) continue;
    problem.filter_layout = FilterLayout::kKrsc;
    problem.c = 32 * draw(1, 2);
    problem.k = problem.op == Op::kDgrad && draw(0, 1) == 0 ? 64 : 8 * draw(1, 3);
    igemm_wgmma::Check(problem, &as_krsc, &as_krsc);
  }
  igemm_wgmma::CheckWidePadding();
  std::printf(
      "igemm_wgmma_test: %d problems, %d accepted, %d in filter-row, %d as krsc, %d with "
      "wide padding, %d failures\n",
      checked, accepted, in_filter_row, as_krsc, wide, igemm_wgmma::failures);
  return igemm_wgmma::failures != 0 || accepted < 900 || in_filter_row < 200 || as_krsc < 200 ||
         wide < 200;
}
