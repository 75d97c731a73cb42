// The matrices of F(m, 3): exact identities in rationals, and the balance that keeps float16 from
// overflowing.
#include "core/winograd.h"

#include <cmath>
#include <cstdio>

namespace {

using jaxconv::winograd::kTaps;
using jaxconv::winograd::kTransform;
using jaxconv::winograd::Matrices;
using jaxconv::winograd::Rational;

int failures = 0;

void Expect(bool condition, const char* what, int m) {
  if (condition) return;
  std::printf("F(%d, 3): %s\n", m, what);
  ++failures;
}

// y[k] = sum of d[k + r] g[r] is linear in d and g: the identity holds if it does for unit vectors.
template <int m>
void TestIdentity() {
  constexpr Matrices<m> t{};
  for (int input = 0; input < m + 2; ++input) {
    for (int tap = 0; tap < kTaps; ++tap) {
      for (int k = 0; k < m; ++k) {
        Rational y;
        for (int i = 0; i < m + 2; ++i) y = y + t.at[k][i] * t.g[i][tap] * t.bt[i][input];
        Expect(y == Rational(input == k + tap ? 1 : 0), "does not convolve", m);
      }
    }
  }
}

template <int m>
void TestBalance() {
  constexpr Matrices<m> t{};
  for (int i = 0; i < m + 2; ++i) {
    Rational inputs, taps;
    for (int k = 0; k < m + 2; ++k) inputs = inputs + t.bt[i][k].Magnitude();
    for (int k = 0; k < kTaps; ++k) taps = taps + t.g[i][k].Magnitude();
    Expect(Rational(1, 2) < inputs && !(Rational(1) < inputs), "a row of B^T is not balanced", m);
    Expect(Rational(1, 2) < taps && !(Rational(1) < taps), "a row of G is not balanced", m);
  }
}

// Whether a value has at most 11 significant bits, as float16 has.
bool FitsHalf(float value) {
  int exponent = 0;
  const float mantissa = std::frexp(value, &exponent) * 2048;
  return mantissa == std::trunc(mantissa) && exponent > -13 && exponent <= 16;
}

template <int m>
void TestConstants() {
  constexpr Matrices<m> exact{};
  for (int i = 0; i < m + 2; ++i) {
    for (int k = 0; k < m + 2; ++k) {
      const double value =
          static_cast<double>(exact.bt[i][k].numerator) / exact.bt[i][k].denominator;
      Expect(kTransform<m>.bt[i][k] == value && FitsHalf(kTransform<m>.bt[i][k]),
             "an element of B^T is not exact in float16", m);
    }
    for (int k = 0; k < m; ++k) {
      const double value =
          static_cast<double>(exact.at[k][i].numerator) / exact.at[k][i].denominator;
      Expect(kTransform<m>.at[k][i] == value, "an element of A^T is not exact", m);
    }
  }
}

template <int m>
void Test() {
  TestIdentity<m>();
  TestBalance<m>();
  TestConstants<m>();
}

}  // namespace

int main() {
  Test<2>();
  Test<4>();
  Test<6>();
  return failures == 0 ? 0 : 1;
}
