// The transposed convolution, and refusals of geometries that no CPU kernel computes.
#include "cpu/geometry.h"

#include <algorithm>
#include <utility>

namespace jaxconv::cpu {
namespace {

Geometry Transpose(const Geometry& geometry) {
  const ConvProblem& p = geometry.p;
  Geometry transposed = geometry;
  ConvProblem& t = transposed.p;
  t.op = p.op == Op::kFprop ? Op::kDgrad : p.op == Op::kDgrad ? Op::kFprop : Op::kWgrad;
  std::swap(t.c, t.k);
  std::swap(t.in, t.out);
  std::swap(t.x_dtype, t.y_dtype);
  std::swap(t.stride, t.lhs_dilation);
  for (int a = 0; a < 3; ++a) {
    int64_t reach = (p.filter[a] - 1) * p.dilation[a];
    t.pad_lo[a] = reach - p.pad_lo[a];
    t.pad_hi[a] = (t.out[a] - 1) * t.stride[a] + reach + 1 - t.in[a] - t.pad_lo[a];
  }
  transposed.transposed = true;
  return transposed;
}

}  // namespace

std::string OnAxis(const ConvProblem& p, int axis) {
  return " on spatial axis " + std::to_string(axis - (3 - p.rank));
}

Status MakeGeometry(const ConvProblem& problem, Geometry* geometry) {
  JAXCONV_RETURN_IF_ERROR(problem.RequireInt32());
  int64_t largest = std::max({problem.x_elements(), problem.w_elements(), problem.y_elements()});
  if (largest >= int64_t{1} << 31) {
    return Status::Unimplemented("a tensor of " + std::to_string(largest) +
                                 " elements: kernels here are only verified below 2^31");
  }
  geometry->p = problem;
  geometry->axis = 3 - problem.rank;
  const Spatial ones{1, 1, 1};
  if (problem.lhs_dilation != ones) {
    if (problem.stride != ones) {
      return Status::Unimplemented(
          "the input is dilated and the stride is not 1: no oneDNN primitive does both");
    }
    *geometry = Transpose(*geometry);
  }
  ConvProblem& p = geometry->p;
  for (int a = 0; a < 3; ++a) {
    // Negative padding also crops the rest after the last stride. oneDNN's weight gradients read
    // past y if this is a stride or more and every row of windows begins in the padding.
    int64_t end = (p.out[a] - 1) * p.stride[a] + (p.filter[a] - 1) * p.dilation[a] + 1;
    int64_t fitting = end - p.in[a] - p.pad_lo[a];
    if (fitting <= -p.stride[a]) p.pad_hi[a] = fitting;
    // Rows are cropped by moving a pointer, except in a data gradient, which must write zeros to
    // them.
    if (a == geometry->axis && p.op != Op::kDgrad) continue;
    // High padding is also negative if the last stride does not reach the end of the input.
    const char* side = p.pad_lo[a] < 0 ? "low" : p.pad_hi[a] <= -p.stride[a] ? "high" : nullptr;
    if (side == nullptr) continue;
    return Status::Unimplemented(std::string(side) + " padding " +
                                 std::to_string(p.pad_lo[a] < 0 ? p.pad_lo[a] : p.pad_hi[a]) +
                                 OnAxis(p, a) +
                                 (geometry->transposed ? " (of the transposed convolution)" : "") +
                                 " is negative: oneDNN cannot crop");
  }
  return {};
}

}  // namespace jaxconv::cpu
