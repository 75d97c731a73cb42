// Winograd's minimal filtering F(m, 3), made from interpolation points at compile time.
//
//     y = A^T ((G g) * (B^T d))        d: m + 2 inputs, g: 3 taps, y: m outputs
//
// `*` multiplies element by element. In two dimensions both sides of every matrix are transformed:
// V = B^T d B, U = G g G^T, Y = A^T (U * V) A. With alpha = m + 2 points, the last of them
// infinity, and p the others,
//
//     B^T row i    coefficients of the product of (x - p_l) over all l other than i;
//                  of infinity: over all l
//     G   row i    1, p_i, p_i^2, divided by the product of (p_i - p_l); of infinity: 0, 0, 1
//     A^T column i 1, p_i, ..., p_i^(m - 1); of infinity: 0, ..., 0, 1
//
// (Toom and Cook; Lavin and Gray 2015 for convolutions.) Row i of B^T and of G may be scaled by any
// factors whose inverses go to column i of A^T. They are scaled here by powers of two, so that the
// magnitudes of a row add up to more than 1/2 and at most 1: no element of V exceeds the largest
// input, none of U the largest tap, in one or two dimensions, so float16 never overflows; and a
// power of two costs no accuracy.
//
// The points are those of the smallest rounding errors among small dyadic sets: with dyadic points
// B^T and A^T are exact in float16.
#ifndef JAXCONV_CORE_WINOGRAD_H_
#define JAXCONV_CORE_WINOGRAD_H_

#include <array>
#include <cstdint>

namespace jaxconv::winograd {

// A rational number in lowest terms, of a positive denominator.
struct Rational {
  int64_t numerator = 0, denominator = 1;

  constexpr Rational() = default;
  constexpr Rational(int64_t n, int64_t d = 1)
      : numerator(d < 0 ? -n : n), denominator(d < 0 ? -d : d) {
    int64_t a = numerator < 0 ? -numerator : numerator, b = denominator;
    while (b != 0) {
      const int64_t rest = a % b;
      a = b;
      b = rest;
    }
    numerator /= a;
    denominator /= a;
  }
  constexpr Rational operator-() const { return {-numerator, denominator}; }
  constexpr Rational operator+(Rational o) const {
    return {numerator * o.denominator + o.numerator * denominator, denominator * o.denominator};
  }
  constexpr Rational operator-(Rational o) const { return *this + -o; }
  constexpr Rational operator*(Rational o) const {
    return {numerator * o.numerator, denominator * o.denominator};
  }
  constexpr Rational operator/(Rational o) const {
    return {numerator * o.denominator, denominator * o.numerator};
  }
  constexpr bool operator==(Rational o) const {
    return numerator == o.numerator && denominator == o.denominator;
  }
  constexpr bool operator<(Rational o) const {
    return numerator * o.denominator < o.numerator * denominator;
  }
  constexpr Rational Magnitude() const { return numerator < 0 ? -*this : *this; }
  // Rounded once.
  constexpr float ToFloat() const {
    return static_cast<float>(static_cast<double>(numerator) / static_cast<double>(denominator));
  }
};

// Taps of a filter along an axis.
inline constexpr int kTaps = 3;

// The finite points of F(m, 3).
template <int m>
struct Points;
template <>
struct Points<2> {
  static constexpr std::array<Rational, 3> kFinite = {0, 1, -1};
};
template <>
struct Points<4> {
  static constexpr std::array<Rational, 5> kFinite = {0, 1, -1, Rational(1, 2), -2};
};
template <>
struct Points<6> {
  static constexpr std::array<Rational, 7> kFinite = {
      0, 1, -1, 2, -2, Rational(1, 2), Rational(-1, 2)};
};

// The matrices of F(m, 3), m = 2, 4 or 6, as rationals.
template <int m>
struct Matrices {
  static constexpr int kAlpha = m + 2;
  Rational bt[kAlpha][kAlpha], g[kAlpha][kTaps], at[m][kAlpha];

  constexpr Matrices() {
    constexpr int kFinite = kAlpha - 1;
    const auto& p = Points<m>::kFinite;
    for (int i = 0; i < kAlpha; ++i) {
      // Coefficients of the product, multiplied up one factor at a time.
      bt[i][0] = 1;
      int degree = 0;
      Rational distance = 1;
      for (int l = 0; l < kFinite; ++l) {
        if (l == i) continue;
        for (int k = ++degree; k >= 0; --k) {
          bt[i][k] = (k > 0 ? bt[i][k - 1] : Rational()) - p[l] * bt[i][k];
        }
        if (i < kFinite) distance = distance * (p[i] - p[l]);
      }
      Rational power = 1;
      for (int k = 0; k < kTaps || k < m; ++k) {
        const Rational at_infinity = k == kTaps - 1 ? 1 : 0;
        if (k < kTaps) g[i][k] = i < kFinite ? power / distance : at_infinity;
        if (k < m) at[k][i] = i < kFinite ? power : Rational(k == m - 1 ? 1 : 0);
        if (i < kFinite) power = power * p[i];
      }
      Balance(bt[i], i);
      Balance(g[i], i);
    }
  }

 private:
  template <int n>
  constexpr void Balance(Rational (&row)[n], int point) {
    Rational norm;
    for (int k = 0; k < n; ++k) norm = norm + row[k].Magnitude();
    Rational scale = 1;
    while (Rational(1) < norm * scale) scale = scale / 2;
    while (!(Rational(1, 2) < norm * scale)) scale = scale * 2;
    for (int k = 0; k < n; ++k) row[k] = row[k] * scale;
    for (int k = 0; k < m; ++k) at[k][point] = at[k][point] / scale;
  }
};

// The same as float32 constants, G's rounded once where a point's distances have factors other
// than 2.
template <int m>
struct Transform {
  static constexpr int kAlpha = m + 2;
  static constexpr Matrices<m> kExact{};
  float bt[kAlpha][kAlpha] = {}, g[kAlpha][kTaps] = {}, at[m][kAlpha] = {};

  constexpr Transform() {
    for (int i = 0; i < kAlpha; ++i) {
      for (int k = 0; k < kAlpha; ++k) bt[i][k] = kExact.bt[i][k].ToFloat();
      for (int k = 0; k < kTaps; ++k) g[i][k] = kExact.g[i][k].ToFloat();
      for (int k = 0; k < m; ++k) at[k][i] = kExact.at[k][i].ToFloat();
    }
  }
};

template <int m>
inline constexpr Transform<m> kTransform{};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CORE_WINOGRAD_H_
