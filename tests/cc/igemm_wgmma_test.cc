// What igemm_wgmma hands to its kernel, carried out on the CPU by the rules of the copy engine:
// every box of pixels, tap and row of the output against the definition of the convolution. This
// file supplies the launches.
#include "cuda/kernels/igemm_wgmma.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/naive_conv.h"
#include "cuda/kernels/filter_transpose.h"
#include "cuda/kernels/igemm_simt.h"

namespace jaxconv {

IgemmWgmmaParams launched;
WgmmaOperands operands;
Op launched_op;

template <Op kOp, DType kType, WgmmaTileId kTile>
Status LaunchIgemmWgmma(const IgemmWgmmaParams& params, const WgmmaOperands& of, void*) {
  launched = params;
  launched_op = kOp;
  operands = of;
  return {};
}
#define JAXCONV_STUB(op, type, tile)                                        \
  template Status LaunchIgemmWgmma<Op::op, DType::type, WgmmaTileId::tile>( \
      const IgemmWgmmaParams&, const WgmmaOperands&, void*);
#define JAXCONV_STUB_TYPES(tile)    \
  JAXCONV_STUB(kFprop, kBF16, tile) \
  JAXCONV_STUB(kFprop, kF16, tile)  \
  JAXCONV_STUB(kFprop, kF32, tile)  \
  JAXCONV_STUB(kDgrad, kBF16, tile) \
  JAXCONV_STUB(kDgrad, kF16, tile)  \
  JAXCONV_STUB(kDgrad, kF32, tile)
#define JAXCONV_STUB_WGRAD(tile) JAXCONV_STUB(kWgrad, kBF16, tile) JAXCONV_STUB(kWgrad, kF16, tile)
JAXCONV_STUB_TYPES(k128x256)
JAXCONV_STUB_TYPES(k256x128)
JAXCONV_STUB_TYPES(k128x320)
JAXCONV_STUB_TYPES(k128x192)
JAXCONV_STUB_TYPES(k192x128)
JAXCONV_STUB_TYPES(k128x128)
JAXCONV_STUB_TYPES(k128x128Pingpong)
JAXCONV_STUB_TYPES(k192x128Pingpong)
JAXCONV_STUB_TYPES(k128x64Pingpong)
JAXCONV_STUB_TYPES(k128x128PingpongRows)
JAXCONV_STUB_TYPES(k256x64Columns)
JAXCONV_STUB_TYPES(k256x64ColumnsRows)
JAXCONV_STUB_TYPES(k224x64ColumnsRows)
JAXCONV_STUB_TYPES(k192x64ColumnsResident)
JAXCONV_STUB_TYPES(k128x64ColumnsResident)
JAXCONV_STUB_TYPES(k64x256PingpongOneTap)
JAXCONV_STUB_TYPES(k64x256PingpongOneTapC128)
JAXCONV_STUB_TYPES(k128x128PingpongOneTap)
JAXCONV_STUB_TYPES(k256x64ColumnsOneTap)
JAXCONV_STUB_TYPES(k128x64PingpongResidentF32)
JAXCONV_STUB_WGRAD(k128x256)
JAXCONV_STUB_WGRAD(k256x128)
JAXCONV_STUB_WGRAD(k128x320)
JAXCONV_STUB_WGRAD(k128x192)
JAXCONV_STUB_WGRAD(k192x128)
JAXCONV_STUB_WGRAD(k128x128)
JAXCONV_STUB_WGRAD(k128x128Pingpong)
JAXCONV_STUB_WGRAD(k128x64Pingpong)
JAXCONV_STUB(kWgrad, kF32, k128x256Mma)
JAXCONV_STUB(kWgrad, kF32, k256x128Mma)
JAXCONV_STUB(kWgrad, kF32, k128x64Mma)
#undef JAXCONV_STUB_TYPES
#undef JAXCONV_STUB_WGRAD
#undef JAXCONV_STUB
template <DType kType>
Status LaunchWgmmaWgradRows(const IgemmWgmmaParams& params, const WgmmaOperands& of, void*) {
  launched = params;
  operands = of;
  return {};
}
template Status LaunchWgmmaWgradRows<DType::kBF16>(const IgemmWgmmaParams&, const WgmmaOperands&,
                                                   void*);
template Status LaunchWgmmaWgradRows<DType::kF16>(const IgemmWgmmaParams&, const WgmmaOperands&,
                                                  void*);

template <Op kOp, DType kType, WgmmaTileId kTile>
Status LaunchIgemmWgmmaCluster(const IgemmWgmmaParams& params, const WgmmaOperands& of, void*) {
  launched = params;
  operands = of;
  return {};
}
#define JAXCONV_STUB(op, type)                                                              \
  template Status LaunchIgemmWgmmaCluster<Op::op, DType::type, WgmmaTileId::k64x64Cluster>( \
      const IgemmWgmmaParams&, const WgmmaOperands&, void*);
JAXCONV_STUB(kFprop, kBF16)
JAXCONV_STUB(kFprop, kF16)
JAXCONV_STUB(kDgrad, kBF16)
JAXCONV_STUB(kDgrad, kF16)
#undef JAXCONV_STUB

template <Op kOp, DType kType>
Status LaunchIgemmSimt(SimtTileId, const IgemmParams&, int64_t, void*) {
  return {};
}
#define JAXCONV_STUB(op)                                                                    \
  template Status LaunchIgemmSimt<op, DType::kF32>(SimtTileId, const IgemmParams&, int64_t, \
                                                   void*);                                  \
  template Status LaunchIgemmSimt<op, DType::kF16>(SimtTileId, const IgemmParams&, int64_t, \
                                                   void*);                                  \
  template Status LaunchIgemmSimt<op, DType::kBF16>(SimtTileId, const IgemmParams&, int64_t, void*)
JAXCONV_STUB(Op::kFprop);
JAXCONV_STUB(Op::kDgrad);
JAXCONV_STUB(Op::kWgrad);
#undef JAXCONV_STUB
Status LaunchSplitkReduce(const float*, int64_t, int64_t, void*, DType, void*) { return {}; }

// The matrices that the last launch had transposed; none: 0.
int64_t transposed, transposed_rows, transposed_columns;
Status LaunchFilterTranspose(const void*, int64_t matrices, int64_t rows, int64_t columns, void*,
                             void*) {
  transposed = matrices;
  transposed_rows = rows;
  transposed_columns = columns;
  return {};
}

// The counters that the last launch had cleared; none: null.
int32_t* cleared;
Status LaunchWgmmaDrawReset(int32_t* drawn, void*) {
  cleared = drawn;
  return {};
}

namespace {

int failures = 0;

void Fail(const ConvProblem& problem, const std::string& what) {
  if (++failures < 20) std::printf("FAIL %s: %s\n", problem.ToString().c_str(), what.c_str());
}

// The kernel's sums, one output element at a time.
std::vector<double> CarryOut(const ConvProblem& problem, bool rows, const std::vector<double>& lhs,
                             const std::vector<double>& rhs) {
  const IgemmWgmmaParams& p = launched;
  const bool dgrad = problem.op == Op::kDgrad;
  const int64_t channels = dgrad ? problem.k_per_group() : problem.c_per_group();
  const int64_t results = dgrad ? problem.x_elements() : problem.y_elements();
  const bool strided = operands.b_row_stride > 0;
  const int64_t row_stride = strided ? operands.b_row_stride : operands.b_columns;
  const int64_t tap_stride = strided ? operands.b_tap_stride : operands.b_rows * operands.b_columns;
  std::vector<double> out(results, NAN);
  for (int64_t batch = 0; batch < problem.batch; ++batch) {
    for (int q = 0; q < p.phases; ++q) {
      const WgmmaPhase& phase = p.phase[q];
      for (int32_t row = 0; row < phase.rows; ++row) {
        int32_t image = row, j[3];
        for (int i = 0; i < 3; ++i) phase.count[i].Divmod(image, &image, &j[i]);
        for (int i = 0; i < 3; ++i) {
          const int64_t base = phase.lower[i] + int64_t{j[i]} * p.src_step[i];
          // The copy engine faults on a base outside the box, and drops what lies beyond it.
          if (p.rank > i &&
              (base < phase.lower[i] || base >= operands.a_extent[i] + operands.a_upper[q][i])) {
            Fail(problem, "a base pixel outside the box");
          }
          if (p.rank > i) {
            const int64_t box = operands.a_extent[i] + operands.a_upper[q][i] - phase.lower[i];
            if ((box + p.src_step[i] - 1) / p.src_step[i] !=
                static_cast<int64_t>(phase.count[i].divisor)) {
              Fail(problem, "the box holds another number of pixels than the phase");
            }
          }
        }
        int64_t dst = row;
        if (!p.dense_rows && j[0] >= phase.width) continue;  // padding of a row, not an output
        if (!p.dense_rows) {
          dst = image;
          for (int i = 2; i >= 0; --i) {
            dst = dst * p.out_extent[i] + phase.phase[i] + int64_t{j[i]} * p.period[i];
          }
        }
        for (int64_t group = 0; group < problem.groups; ++group) {
          for (int64_t n = 0; n < p.gemm_n; ++n) {
            double sum = 0;
            int steps = 0;
            for (int32_t t2 = 0; t2 < phase.taps[2]; ++t2) {
              for (int32_t t1 = 0; t1 < phase.taps[1]; ++t1) {
                for (int32_t t0 = 0; t0 < phase.taps[0]; ++t0) {
                  if (!rows || t0 == 0) steps += p.slabs.divisor;
                  const int32_t t[3] = {t0, t1, t2};
                  int64_t src[3], tap = phase.filter0;
                  // In rows a tap is a pixel of the walk further on, maybe of the next row.
                  int32_t walked = row, at[3];
                  if (rows) walked += phase.offset0[0] + t0 * phase.offset_step[0];
                  if (walked > row + kMaxWgmmaSpan) Fail(problem, "a tap reaches out of the load");
                  for (int i = 0; i < 3; ++i) phase.count[i].Divmod(walked, &walked, &at[i]);
                  const int64_t from = batch * p.images + walked;
                  bool inside = phase.channel0 == 0 && from < operands.a_images;
                  for (int i = 0; i < 3; ++i) {
                    const int64_t offset = phase.offset0[i] + int64_t{t[i]} * phase.offset_step[i];
                    if (p.rank > 0 && offset < 0) Fail(problem, "a negative offset");
                    src[i] = phase.lower[i] + int64_t{at[i]} * p.src_step[i] +
                             (p.rank == 0 || (rows && i == 0) ? 0 : offset);
                    tap += int64_t{t[i]} * phase.filter_step[i];
                    inside = inside && src[i] >= 0 && src[i] < operands.a_extent[i];
                  }
                  if (!inside) continue;
                  const int64_t pixel =
                      ((from * operands.a_extent[2] + src[2]) * operands.a_extent[1] + src[1]) *
                          operands.a_extent[0] +
                      src[0];
                  for (int64_t c = 0; c < channels; ++c) {
                    // The kernel's lines run along the columns in fprop, else along the reduction.
                    const bool fprop = launched_op == Op::kFprop;
                    const int64_t of_n = n + (fprop ? group * p.b_group : 0);
                    const int64_t of_c = c + (fprop ? 0 : group * p.b_group);
                    const bool column_lines = fprop && problem.w_dtype != DType::kF32;
                    const int64_t row_b = column_lines ? of_c : of_n;
                    const int64_t column = column_lines ? of_n : of_c;
                    if (row_b >= operands.b_rows || column >= operands.b_columns) {
                      Fail(problem, "a place outside the filter");
                      continue;
                    }
                    sum += lhs[pixel * operands.a_channels + group * p.a_group + c] *
                           rhs[(batch * p.filter_taps + tap) * tap_stride + row_b * row_stride +
                               column];
                  }
                }
              }
            }
            if (steps != phase.steps && phase.channel0 == 0) Fail(problem, "wrong step count");
            out[batch * p.out_batch + dst * p.out_channels + group * p.out_group + n] = sum;
          }
        }
      }
    }
  }
  return out;
}

// wgrad: rows are taps times slabs of 64 channels (32 in float32), steps are as many pixels.
std::vector<double> CarryOutWgrad(const ConvProblem& problem, const std::vector<double>& x,
                                  const std::vector<double>& dy) {
  const IgemmWgmmaParams& p = launched;
  const WgmmaPhase& phase = p.phase[0];
  std::vector<double> out(problem.w_elements(), NAN);
  const int32_t line = problem.x_dtype == DType::kF32 ? 32 : 64;
  if (p.steps_per_slice * line < p.pixels) Fail(problem, "the steps do not cover the pixels");
  for (int64_t batch = 0; batch < problem.batch; ++batch) {
    for (int32_t row = 0; row < phase.rows; ++row) {
      int32_t tap, slab, t[3];
      p.slabs.Divmod(row / line, &tap, &slab);
      const int32_t channel = slab * line + row % line;
      if (channel >= p.row_channels) continue;
      t[0] = tap % phase.taps[0];
      t[1] = tap / phase.taps[0] % phase.taps[1];
      t[2] = tap / phase.taps[0] / phase.taps[1];
      for (int64_t group = 0; group < problem.groups; ++group) {
        for (int64_t n = 0; n < p.gemm_n; ++n) {
          double sum = 0;
          for (int32_t pixel = 0; pixel < p.pixels; ++pixel) {
            int32_t rest = pixel, j[3];
            int64_t src[3];
            bool inside = true;
            for (int i = 0; i < 3; ++i) {
              phase.count[i].Divmod(rest, &rest, &j[i]);
              src[i] = phase.lower[i] + int64_t{j[i]} * p.src_step[i] + phase.offset0[i] +
                       int64_t{t[i]} * phase.offset_step[i];
              inside = inside && src[i] >= 0 && src[i] < operands.a_extent[i];
            }
            if (!inside) continue;
            const int64_t from = (((batch * p.images + rest) * operands.a_extent[2] + src[2]) *
                                      operands.a_extent[1] +
                                  src[1]) *
                                     operands.a_extent[0] +
                                 src[0];
            sum +=
                x[from * operands.a_channels + group * p.a_group + channel] *
                dy[(batch * operands.b_rows + pixel) * operands.b_columns + group * p.b_group + n];
          }
          out[batch * p.out_batch + (int64_t{tap} * p.row_channels + channel) * p.out_channels +
              group * p.out_group + n] = sum;
        }
      }
    }
  }
  return out;
}

// Wgrad in rows, x and dy are walked alike over rows longer than the
// image's, and of x the taps of a filter row are the same walk, so many pixels further on.
std::vector<double> CarryOutWgradRows(const ConvProblem& problem, const std::vector<double>& x,
                                      const std::vector<double>& dy) {
  const IgemmWgmmaParams& p = launched;
  const WgmmaPhase& phase = p.phase[0];
  std::vector<double> out(problem.w_elements(), 0.0);
  const int32_t width = phase.count[0].divisor;
  const int32_t image_pixels = width * phase.count[1].divisor * phase.count[2].divisor;
  if (operands.a_extent[0] + operands.a_upper[0][0] - phase.lower[0] != width ||
      operands.b_extent[0] + operands.b_upper != width) {
    Fail(problem, "the boxes hold other numbers of pixels than the walk");
  }
  if (phase.steps * kWgradRowsPixels < p.images * image_pixels)
    Fail(problem, "the steps miss pixels");
  // Value of a channel at a place of the walk of x under (t1, t2), or of dy.
  auto place_of = [&](int32_t index, int64_t (&j)[3]) {
    int32_t rest = index + image_pixels, coordinate;
    for (int i = 0; i < 3; ++i) {
      phase.count[i].Divmod(rest, &rest, &coordinate);
      j[i] = coordinate;
    }
    return int64_t{rest} - 1;
  };
  auto x_at = [&](int32_t index, int32_t t1, int32_t t2, int64_t channel) {
    int64_t j[3];
    const int64_t image = place_of(index, j);
    const int64_t w = phase.lower[0] + j[0];
    const int64_t h =
        phase.lower[1] + j[1] * p.src_step[1] + phase.offset0[1] + t1 * phase.offset_step[1];
    const int64_t d =
        phase.lower[2] + j[2] * p.src_step[2] + phase.offset0[2] + t2 * phase.offset_step[2];
    if (image < 0 || image >= p.images || w >= operands.a_extent[0] || h < 0 ||
        h >= operands.a_extent[1] || d < 0 || d >= operands.a_extent[2]) {
      return 0.0;
    }
    return x[(((image * operands.a_extent[2] + d) * operands.a_extent[1] + h) *
                  operands.a_extent[0] +
              w) *
                 operands.a_channels +
             channel];
  };
  auto dy_at = [&](int32_t index, int64_t k) {
    int64_t j[3];
    const int64_t image = place_of(index, j);
    if (image >= p.images || j[0] >= operands.b_extent[0]) return 0.0;
    return dy[(((image * operands.b_extent[2] + j[2]) * operands.b_extent[1] + j[1]) *
                   operands.b_extent[0] +
               j[0]) *
                  operands.b_columns +
              k];
  };
  for (int32_t index = 0; index < phase.steps * kWgradRowsPixels; ++index) {
    for (int64_t group = 0; group < problem.groups; ++group) {
      for (int64_t k = 0; k < p.gemm_n; ++k) {
        const double factor = dy_at(index, group * p.b_group + k);
        if (factor == 0) continue;
        for (int32_t tap = 0; tap < p.filter_taps; ++tap) {
          const int32_t t0 = tap % phase.taps[0], t1 = tap / phase.taps[0] % phase.taps[1];
          const int32_t t2 = tap / phase.taps[0] / phase.taps[1];
          for (int64_t c = 0; c < p.row_channels; ++c) {
            out[(int64_t{tap} * p.row_channels + c) * p.out_channels + group * p.out_group + k] +=
                factor * x_at(index + phase.offset0[0] + t0 * phase.offset_step[0], t1, t2,
                              group * p.a_group + c);
          }
        }
      }
    }
  }
  return out;
}

const KernelRow& RowOf(Op op, const std::string& part) {
  static const std::vector<KernelRow> rows = IgemmWgmmaRows();
  for (const KernelRow& row : rows) {
    if (row.op == op && row.name.find(part) != std::string::npos) return row;
  }
  return rows[0];
}

void Check(const ConvProblem& problem, bool rows, int* accepted) {
  const bool wgrad = problem.op == Op::kWgrad;
  const bool f32 = problem.x_dtype == DType::kF32;
  if (rows && wgrad && f32) return;  // which has no such rows
  const KernelRow& row = RowOf(problem.op, !f32    ? !rows   ? "bf16_128x128x64"
                                                     : wgrad ? "bf16_192x64x128_rows"
                                                             : "bf16_128x128x64_pingpong_rows"
                                           : wgrad ? "f32_128x256x32"
                                           : rows  ? "f32_128x128x32_pingpong_rows"
                                                   : "f32_128x128x32");
  if (Status status = row.can_implement(problem); !status.ok()) {
    if (status.message().empty()) Fail(problem, "refused without a reason");
    return;
  }
  ++*accepted;
  std::mt19937 random(7);
  auto draw = [&](int64_t count) {
    std::vector<double> values(count);
    for (double& v : values) v = static_cast<int>(random() % 7) - 3;
    return values;
  };
  const bool dgrad = problem.op == Op::kDgrad;
  const std::vector<double> lhs = draw(dgrad ? problem.y_elements() : problem.x_elements());
  const std::vector<double> rhs = draw(wgrad ? problem.y_elements() : problem.w_elements());
  alignas(16) static char buffer[16];
  KernelArgs args;
  args.lhs = args.rhs = args.out = args.workspace = buffer;
  args.workspace_bytes = row.workspace_bytes(problem, 1);
  transposed = 0;
  if (Status status = row.launch(problem, args); !status.ok()) {
    Fail(problem, status.message());
    return;
  }
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  if ((transposed > 0) != (problem.op == Op::kFprop && f32 && !krsc)) {
    Fail(problem, "TF32 takes the filter of fprop, and no other, transposed");
  }
  if (problem.batch > 1 && krsc) Fail(problem, "batched filters accepted as krsc");
  const std::vector<double> expected = NaiveConv(problem, lhs, rhs);
  std::vector<double> b = rhs;
  for (int64_t i = 0; i < transposed; ++i) {
    for (int64_t r = 0; r < transposed_rows; ++r) {
      for (int64_t c = 0; c < transposed_columns; ++c) {
        const int64_t first = i * transposed_rows * transposed_columns;
        b[first + c * transposed_rows + r] = rhs[first + r * transposed_columns + c];
      }
    }
  }
  // With steps of 64 channels, a group of fewer is one step of them and zeros.
  const std::vector<double> out = !wgrad ? CarryOut(problem, rows, lhs, b)
                                  : rows ? CarryOutWgradRows(problem, lhs, b)
                                         : CarryOutWgrad(problem, lhs, b);
  if (out != expected) {
    Fail(problem, "differs from the definition");
  }
}

void CheckRefusals() {
  ConvProblem problem;
  problem.x_dtype = problem.w_dtype = problem.y_dtype = DType::kBF16;
  problem.c = 64;
  problem.k = 64;
  problem.in = problem.out = {1, 56, 56};
  const KernelRow& row = RowOf(Op::kFprop, "bf16_128x128");
  if (!row.can_implement(problem).ok()) Fail(problem, "refused");
  if (row.min_cc != 90 || row.max_cc != 90) Fail(problem, "not of sm_90 alone");
  auto refused = [&](ConvProblem changed, const char* why) {
    const Status status = row.can_implement(changed);
    if (status.ok() || status.message().find(why) == std::string::npos) {
      Fail(changed,
           std::string("expected a refusal with '") + why + "', got '" + status.message() + "'");
    }
  };
  ConvProblem odd = problem;
  odd.c = 60;
  refused(odd, "C/groups 60 is not a multiple of 8");
  ConvProblem thin = problem;
  thin.groups = 2;
  refused(thin, "C/groups 32 is not a multiple of 64");
  ConvProblem strided = problem;
  strided.stride[2] = 9;
  strided.out[2] = 7;
  refused(strided, "a stride of 9");
  ConvProblem wide = problem;
  wide.filter[2] = 3;
  wide.dilation[2] = 200;
  wide.pad_lo[2] = wide.pad_hi[2] = 200;
  refused(wide, "wider than the copy engine's fields");
  ConvProblem f32 = problem;
  f32.x_dtype = DType::kF32;
  refused(f32, "expected operands of type bf16");
  // What x holds at a row's ends meets zeros of dy there, which infinities survive.
  ConvProblem batched = problem;
  batched.op = Op::kWgrad;
  batched.filter[2] = 3;
  batched.pad_lo[2] = batched.pad_hi[2] = 1;
  const KernelRow& wgrad_rows = RowOf(Op::kWgrad, "bf16_192x64x128_rows");
  if (!wgrad_rows.can_implement(batched).ok()) Fail(batched, "refused in rows");
  batched.batch = 2;
  if (wgrad_rows.can_implement(batched).ok()) Fail(batched, "batched filters accepted in rows");
  const KernelRow& tf32 = RowOf(Op::kFprop, "f32_128x128");
  f32.w_dtype = f32.y_dtype = DType::kF32;
  if (!tf32.can_implement(f32).ok()) Fail(f32, "refused");
  for (Precision precision : {Precision::kHigh, Precision::kHighest}) {
    f32.precision = precision;
    if (tf32.can_implement(f32).ok()) Fail(f32, "accepted, though TF32 is too coarse");
  }
  ConvProblem krsc = problem;
  krsc.filter_layout = FilterLayout::kKrsc;
  for (Op op : {Op::kFprop, Op::kDgrad}) {
    krsc.op = op;
    for (const KernelRow& any : IgemmWgmmaRows()) {
      if (any.op != op || any.name.find("bf16") == std::string::npos) continue;
      // What takes the problem takes it with either layout.
      ConvProblem rsck = krsc;
      rsck.filter_layout = FilterLayout::kRsck;
      if (any.can_implement(krsc).ok() != any.can_implement(rsck).ok()) Fail(krsc, any.name);
    }
  }
  krsc.op = Op::kFprop;
  krsc.batch = 2;
  refused(krsc, "krsc of one group and one batch only");
  krsc.batch = 1;
  krsc.c = 48;
  refused(krsc, "C/groups 48 of a filter stored as krsc is not a multiple of 32");
  krsc.c = 64;
  krsc.op = Op::kDgrad;
  krsc.filter[2] = 3;
  krsc.pad_lo[2] = krsc.pad_hi[2] = 1;
  for (auto [k, taken] : {std::pair{64, true}, {40, true}, {32, false}}) {
    krsc.k = k;
    const Status status = RowOf(Op::kDgrad, "bf16_128x128").can_implement(krsc);
    if (status.ok() != taken) Fail(krsc, "K where the last step's rows are few");
  }
  const KernelRow& resident = RowOf(Op::kFprop, "_resident");
  ConvProblem large = problem;
  large.k = 128;
  if (resident.can_implement(large).ok()) Fail(large, "a filter too large to reside was accepted");
}

// Tiles are drawn, with counters that are cleared before, where memory is the limit and there are
// many.
void CheckDrawn() {
  alignas(16) static char buffer[16];
  for (const char* part : {"bf16_64x256x64_pingpong_one_tap_c128", "bf16_256x64x64_columns_one_tap",
                           "bf16_128x128x64_pingpong_one_tap"}) {
    for (const bool many : {false, true}) {
      for (const int64_t channels : {64, 128, 1024}) {
        ConvProblem problem;
        problem.x_dtype = problem.w_dtype = problem.y_dtype = DType::kBF16;
        problem.n = many ? 256 : 64;
        problem.c = problem.k = channels;
        problem.in = problem.out = {1, 56, 56};
        const KernelRow& row = RowOf(Op::kFprop, part);
        if (!row.can_implement(problem).ok()) continue;
        KernelArgs args;
        args.lhs = args.rhs = args.out = args.workspace = buffer;
        args.workspace_bytes = row.workspace_bytes(problem, 1);
        cleared = nullptr;
        if (!row.launch(problem, args).ok()) Fail(problem, std::string(part) + " is refused");
        // Many bytes, and few operations a byte.
        const bool drawn = 2 * problem.x_elements() * 2 >= 200'000'000 && channels < 200;
        if (drawn != (args.workspace_bytes > 0) || drawn != (launched.drawn != nullptr)) {
          Fail(problem,
               std::string(part) + ": drawn where it should not be, or not where it should");
        }
        if (launched.drawn != cleared) Fail(problem, "counters that nobody clears");
      }
    }
  }
}

// A cluster's CTAs split every phase's steps without gaps, in no workspace.
void CheckCluster(const ConvProblem& problem) {
  const KernelRow& row = RowOf(problem.op, "bf16_64x64x64_cluster");
  if (problem.op == Op::kWgrad || !row.can_implement(problem).ok()) return;
  alignas(16) static char buffer[16];
  for (int64_t ranks = 1; ranks <= kMaxWgmmaCluster; ++ranks) {
    KernelArgs args;
    args.lhs = args.rhs = args.out = buffer;
    args.slices = ranks;
    if (row.workspace_bytes(problem, ranks) != 0) Fail(problem, "a cluster with a workspace");
    if (!row.launch(problem, args).ok()) {
      if (ranks == 1) Fail(problem, "a cluster of one CTA is refused");
      break;  // more CTAs than steps
    }
    const IgemmWgmmaParams& p = launched;
    if (p.cluster.divisor != ranks || p.slices.divisor != 1 || p.slice_elements != 0) {
      Fail(problem, "the cluster is not what was asked for");
    }
    for (int q = 0; q < p.phases; ++q) {
      const int32_t steps = p.phase[q].steps;
      int32_t end = 0, longest = 0;
      for (int32_t rank = 0; rank < ranks; ++rank) {
        const int32_t next = p.cluster.Div((rank + 1) * steps);
        longest = std::max(longest, next - end);
        end = next;
      }
      if (end != steps || longest != (steps + ranks - 1) / ranks) {
        Fail(problem, "the parts of a reduction are uneven");
      }
    }
  }
}

}  // namespace
}  // namespace jaxconv

int main() {
  using jaxconv::ConvProblem;
  std::mt19937 random(20261120);
  auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % (high - low + 1));
  };
  int accepted = 0, accepted_in_rows = 0, accepted_as_krsc = 0, checked = 0;
  while (checked < 1200) {
    ConvProblem problem;
    problem.op = checked % 3 == 0   ? jaxconv::Op::kFprop
                 : checked % 3 == 1 ? jaxconv::Op::kDgrad
                                    : jaxconv::Op::kWgrad;
    const bool f32 = checked / 3 % 2 == 1;
    problem.x_dtype = problem.w_dtype = problem.y_dtype =
        f32 ? jaxconv::DType::kF32 : jaxconv::DType::kBF16;
    problem.rank = draw(1, 3);
    problem.batch = draw(1, 2);
    problem.n = draw(1, 2);
    problem.c = f32 ? 4 * draw(1, 10) : 8 * draw(1, 2);
    problem.k = f32 && problem.op == jaxconv::Op::kWgrad ? 32
                : f32                                    ? 4 * draw(1, 4)
                                                         : 8 * draw(1, 2);
    if (draw(0, 15) == 0) problem.c = problem.k = 128, problem.groups = 2;
    const int largest = problem.rank == 3 || problem.groups > 1 ? 4 : 9;
    for (int a = 3 - problem.rank; a < 3; ++a) {
      problem.in[a] = draw(1, largest);
      problem.filter[a] = draw(1, 3);
      problem.stride[a] = draw(1, 3);
      problem.lhs_dilation[a] = draw(0, 3) == 0 ? 2 : 1;
      problem.dilation[a] = draw(1, 3);
      problem.pad_lo[a] = draw(-2, 4);
      problem.pad_hi[a] = draw(-2, 4);
      problem.out[a] = jaxconv::OutputExtent(problem.in[a], problem.filter[a], problem.stride[a],
                                             problem.lhs_dilation[a], problem.dilation[a],
                                             problem.pad_lo[a], problem.pad_hi[a]);
    }
    if (!problem.Validate().ok()) continue;  // an empty output
    jaxconv::Check(problem, false, &accepted);
    jaxconv::Check(problem, true, &accepted_in_rows);
    jaxconv::CheckCluster(problem);
    ++checked;
    if (problem.op == jaxconv::Op::kWgrad || problem.groups > 1 || problem.rank == 3) continue;
    problem.filter_layout = jaxconv::FilterLayout::kKrsc;
    problem.c = 32 * draw(1, 2);
    problem.k = problem.op == jaxconv::Op::kDgrad && draw(0, 1) == 0 ? 64 : 8 * draw(1, 3);
    jaxconv::Check(problem, false, &accepted_as_krsc);
    jaxconv::Check(problem, true, &accepted_as_krsc);
  }
  jaxconv::CheckRefusals();
  jaxconv::CheckDrawn();
  std::printf("igemm_wgmma_test: %d problems, %d accepted, %d in rows, %d as krsc, %d failures\n",
              checked, accepted, accepted_in_rows, accepted_as_krsc, jaxconv::failures);
  return jaxconv::failures != 0 || accepted < 600 || accepted_in_rows < 200 ||
         accepted_as_krsc < 200;
}
