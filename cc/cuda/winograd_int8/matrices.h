// The matrices of F(m, 3) for integer operands: every element of B^T and of G is dyadic, so that V
// and U are exact in float32 before they are rounded to 8 bits.
//
// G of core/winograd.h divides by distances between points, which have factors 3 and 5 for m = 4.
// These factors move from G's rows to A^T's columns, which are float32 constants, and the rows are
// rebalanced: the magnitudes of a row add up to at most 1, so no element of U exceeds the largest
// tap. Row i of B^T or G times an integer vector is a multiple of the row's unit, the largest power
// of two that divides all its coefficients.
#ifndef JAXCONV_CUDA_WINOGRAD_INT8_MATRICES_H_
#define JAXCONV_CUDA_WINOGRAD_INT8_MATRICES_H_

#include <cstdint>

#include "core/winograd.h"

namespace jaxconv::winograd_int8 {

using winograd::kTaps;
using winograd::Rational;

template <int m>
struct Matrices {
  static constexpr int kAlpha = m + 2;
  float bt[kAlpha][kAlpha] = {}, g[kAlpha][kTaps] = {}, at[m][kAlpha] = {};
  float input_unit[kAlpha] = {}, filter_unit[kAlpha] = {};

  constexpr Matrices() {
    const winograd::Matrices<m> exact;
    for (int i = 0; i < kAlpha; ++i) {
      Rational factor = 1, norm;
      for (const Rational& tap : exact.g[i]) {
        while (!IsDyadic(tap * factor)) factor = factor * OddPart((tap * factor).denominator);
      }
      for (const Rational& tap : exact.g[i]) norm = norm + (tap * factor).Magnitude();
      while (Rational(1) < norm) factor = factor / 2, norm = norm / 2;
      while (!(Rational(1, 2) < norm)) factor = factor * 2, norm = norm * 2;
      Rational filter_unit_of_row = 1, input_unit_of_row = 1;
      for (int k = 0; k < kTaps; ++k) {
        const Rational tap = exact.g[i][k] * factor;
        g[i][k] = tap.ToFloat();
        filter_unit_of_row = SmallerUnit(filter_unit_of_row, tap);
      }
      for (int k = 0; k < kAlpha; ++k) {
        bt[i][k] = exact.bt[i][k].ToFloat();
        input_unit_of_row = SmallerUnit(input_unit_of_row, exact.bt[i][k]);
      }
      for (int k = 0; k < m; ++k) at[k][i] = (exact.at[k][i] / factor).ToFloat();
      filter_unit[i] = filter_unit_of_row.ToFloat();
      input_unit[i] = input_unit_of_row.ToFloat();
    }
  }

 private:
  static constexpr int64_t OddPart(int64_t number) {
    while (number % 2 == 0) number /= 2;
    return number;
  }
  static constexpr bool IsDyadic(Rational r) { return OddPart(r.denominator) == 1; }
  // The largest power of two, at most `unit`, that divides a dyadic number.
  static constexpr Rational SmallerUnit(Rational unit, Rational r) {
    if (r == Rational()) return unit;
    while (OddPart((r / unit).denominator) != 1 || (r / unit).denominator != 1) unit = unit / 2;
    return unit;
  }
};

template <int m>
inline constexpr Matrices<m> kMatrices{};

// Rows for the Dot of common/winograd_transform.cuh.
template <int m, int i>
struct FilterRow {
  static constexpr float At(int k) { return kMatrices<m>.g[i][k]; }
};
template <int m, int i>
struct OutputRow {
  static constexpr float At(int k) { return kMatrices<m>.at[i][k]; }
};

}  // namespace jaxconv::winograd_int8

#endif  // JAXCONV_CUDA_WINOGRAD_INT8_MATRICES_H_
