// Compares the index algebra of implicit GEMM with the definition of ConvProblem, on the CPU.
//
// For each problem, the algebra must reach exactly the triples (output element, source pixel,
// filter tap) with i * lhs_dilation = p * stride + r * dilation - pad_lo, each once, and every
// output row exactly once.
#include "core/implicit_gemm.h"

#include <cstdio>
#include <random>
#include <set>
#include <tuple>

#include "cc/huge_windows.h"

namespace jaxconv {
namespace {

int failures = 0;

void Fail(const ConvProblem& problem, const char* what) {
  ++failures;
  std::printf("FAIL %s: %s\n", problem.ToString().c_str(), what);
}

using Term = std::tuple<int64_t, int64_t, int64_t>;  // destination pixel, source pixel, filter tap

std::set<Term> Definition(const ConvProblem& problem) {
  std::set<Term> terms;
  const bool dgrad = problem.op == Op::kDgrad;
  for (int64_t n = 0; n < problem.n; ++n) {
    for (int64_t p = 0; p < problem.out_pixels(); ++p) {
      for (int64_t r = 0; r < problem.taps(); ++r) {
        const int64_t ps[3] = {p / (problem.out[1] * problem.out[2]),
                               p / problem.out[2] % problem.out[1], p % problem.out[2]};
        const int64_t rs[3] = {r / (problem.filter[1] * problem.filter[2]),
                               r / problem.filter[2] % problem.filter[1], r % problem.filter[2]};
        int64_t i = 0;
        bool valid = true;
        for (int a = 0; a < 3; ++a) {
          const int64_t dilated =
              ps[a] * problem.stride[a] + rs[a] * problem.dilation[a] - problem.pad_lo[a];
          valid = valid && dilated >= 0 && dilated % problem.lhs_dilation[a] == 0 &&
                  dilated / problem.lhs_dilation[a] < problem.in[a];
          i = i * problem.in[a] + dilated / problem.lhs_dilation[a];
        }
        if (!valid) continue;
        const int64_t x = n * problem.in_pixels() + i, y = n * problem.out_pixels() + p;
        terms.insert(dgrad ? Term{x, y, r} : Term{y, x, r});
      }
    }
  }
  return terms;
}

void CheckGather(const ConvProblem& problem, const ImplicitGemm& gemm) {
  std::set<Term> terms;
  std::set<int64_t> rows_seen;
  int32_t most_taps = -1;
  for (int32_t index = 0; index < gemm.phases; ++index) {
    AxisPhase phase[3];
    for (int a = 0; a < 3; ++a) phase[a] = gemm.PhaseOfAxis(index, a);
    const int32_t rows = ImplicitGemm::Rows(gemm.images, phase);
    const int32_t taps = ImplicitGemm::TapCount(phase);
    if (rows > gemm.gemm_m) Fail(problem, "a phase has more rows than gemm_m");
    if (index == 0) most_taps = taps;
    if (taps > most_taps) Fail(problem, "the first phase is not a heaviest one");
    for (int32_t m = 0; m < rows; ++m) {
      int32_t image, j[3];
      gemm.DecodeRow(phase, m, &image, j);
      int64_t dst = image;
      for (int a = 0; a < 3; ++a) {
        dst = dst * gemm.axis[a].dst_extent + phase[a].phase + j[a] * gemm.axis[a].period;
      }
      if (!rows_seen.insert(dst).second) Fail(problem, "an output pixel twice");
      for (int32_t tap = 0; tap < taps; ++tap) {
        int32_t t[3], filter_tap[3], src[3];
        gemm.DecodeTap(phase, tap, t);
        for (int a = 0; a < 3; ++a) {
          filter_tap[a] = phase[a].first_tap + t[a] * gemm.axis[a].tap_period;
          src[a] = phase[a].src0 + j[a] * gemm.axis[a].src_per_j + t[a] * gemm.axis[a].src_per_t;
          if (filter_tap[a] >= gemm.axis[a].taps) Fail(problem, "a tap beyond the filter");
        }
        if (!gemm.InSource(src[0], src[1], src[2])) continue;
        const int64_t source =
            image * gemm.SourceImage() + gemm.SourcePixel(src[0], src[1], src[2]);
        if (!terms.insert({dst, source, gemm.TapIndex(filter_tap[0], filter_tap[1], filter_tap[2])})
                 .second) {
          Fail(problem, "a term twice");
        }
      }
    }
  }
  int64_t pixels = gemm.images;
  for (const GatherAxis& axis : gemm.axis) pixels *= axis.dst_extent;
  if (static_cast<int64_t>(rows_seen.size()) != pixels) Fail(problem, "not every output pixel");
  if (terms != Definition(problem)) Fail(problem, "the terms are not those of the definition");
}

// The index of every filter element in the algebra.
void CheckFilter(ConvProblem problem) {
  for (FilterLayout layout : {FilterLayout::kRsck, FilterLayout::kKrsc}) {
    problem.filter_layout = layout;
    ImplicitGemm gemm;
    if (!MakeImplicitGemm(problem, &gemm).ok()) Fail(problem, "refused");
    const bool dgrad = problem.op == Op::kDgrad, krsc = layout == FilterLayout::kKrsc;
    const int64_t cg = problem.c_per_group(), kg = problem.k_per_group();
    for (int64_t tap = 0; tap < problem.taps(); ++tap) {
      for (int64_t c = 0; c < cg; ++c) {
        for (int64_t k = 0; k < problem.k; ++k) {
          const int64_t found = k / kg * gemm.b_group + tap * gemm.b_tap +
                                (dgrad ? k % kg : c) * gemm.b_reduce +
                                (dgrad ? c : k % kg) * gemm.b_column;
          const int64_t expected =
              krsc ? (k * problem.taps() + tap) * cg + c : (tap * cg + c) * problem.k + k;
          if (found != expected) Fail(problem, "another element of the filter");
        }
      }
    }
  }
}

void CheckWgrad(const ConvProblem& problem, const ImplicitGemm& gemm) {
  std::set<Term> terms;
  for (int32_t m = 0; m < gemm.gemm_m; ++m) {
    int32_t tap[3], channel;
    gemm.DecodeFilterRow(m, tap, &channel);
    if (gemm.TapIndex(tap[0], tap[1], tap[2]) * gemm.row_channels + channel != m) {
      Fail(problem, "a filter row decodes to another");
    }
    if (channel != 0) continue;
    for (int32_t pixel = 0; pixel < gemm.reduce_pixels; ++pixel) {
      int32_t image, dst[3], src[3];
      gemm.DecodePixel(pixel, &image, dst);
      bool valid = true;
      for (int a = 0; a < 3; ++a) {
        const GatherAxis& axis = gemm.axis[a];
        const int32_t dilated = dst[a] * axis.mul + tap[a] * axis.step + axis.off;
        int32_t rest = 0;
        src[a] = 0;
        if (dilated >= 0) axis.div_divmod.Divmod(dilated, &src[a], &rest);
        valid = valid && dilated >= 0 && rest == 0;
      }
      if (!valid || !gemm.InSource(src[0], src[1], src[2])) continue;
      terms.insert({pixel, image * gemm.SourceImage() + gemm.SourcePixel(src[0], src[1], src[2]),
                    gemm.TapIndex(tap[0], tap[1], tap[2])});
    }
  }
  if (terms != Definition(problem)) Fail(problem, "the terms are not those of the definition");
}

void Check(ConvProblem problem) {
  for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
    problem.op = op;
    ImplicitGemm gemm;
    if (Status status = MakeImplicitGemm(problem, &gemm); !status.ok()) {
      Fail(problem, status.message().c_str());
    } else if (op == Op::kWgrad) {
      CheckWgrad(problem, gemm);
    } else {
      CheckGather(problem, gemm);
      CheckFilter(problem);
    }
  }
}

void CheckRefusals() {
  ConvProblem problem;
  problem.in[2] = problem.out[2] = int64_t{1} << 30;
  ImplicitGemm gemm;
  if (MakeImplicitGemm(problem, &gemm).ok()) Fail(problem, "coordinates of 2^30 were accepted");
  problem.in[2] = problem.out[2] = 1 << 20;
  problem.n = 1 << 12;
  if (MakeImplicitGemm(problem, &gemm).ok()) Fail(problem, "2^32 pixels were accepted");
}

}  // namespace
}  // namespace jaxconv

int main() {
  using jaxconv::ConvProblem;
  std::mt19937 random(20240611);
  auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % (high - low + 1));
  };
  int checked = 0;
  while (checked < 600) {
    ConvProblem problem;
    problem.rank = draw(1, 3);
    problem.n = draw(1, 2);
    problem.groups = draw(1, 2);
    problem.c = problem.groups * draw(1, 3);
    problem.k = problem.groups * draw(1, 3);
    for (int a = 3 - problem.rank; a < 3; ++a) {
      problem.in[a] = draw(1, problem.rank == 3 ? 4 : 9);
      problem.filter[a] = draw(1, 4);
      problem.stride[a] = draw(1, 5);
      problem.lhs_dilation[a] = draw(1, 4);
      problem.dilation[a] = draw(1, 4);
      problem.pad_lo[a] = draw(-3, 5);
      problem.pad_hi[a] = draw(-3, 5);
      problem.out[a] = jaxconv::OutputExtent(problem.in[a], problem.filter[a], problem.stride[a],
                                             problem.lhs_dilation[a], problem.dilation[a],
                                             problem.pad_lo[a], problem.pad_hi[a]);
    }
    if (!problem.Validate().ok()) continue;  // the output is empty
    jaxconv::Check(problem);
    ++checked;
  }
  jaxconv::CheckRefusals();
  int huge = 0;
  std::mt19937_64 huge_random(20251121);
  while (huge < 600) {
    ConvProblem problem;
    problem.rank = draw(1, 3);
    problem.n = draw(1, 2);
    problem.c = draw(1, 2);
    jaxconv::DrawHugeWindows(draw(8, 40), &huge_random, &problem);
    if (!problem.Validate().ok() || !problem.RequireInt32().ok()) continue;
    jaxconv::Check(problem);
    ++huge;
  }
  std::printf("implicit_gemm_test: %d + %d problems, %d failures\n", checked, huge,
              jaxconv::failures);
  return jaxconv::failures != 0;
}
