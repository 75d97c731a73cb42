// Compares the transforms in registers with the matrices, in one dimension and in two.
#include "cuda/common/winograd_transform.cuh"

#include <cmath>
#include <cstdio>

namespace {

using namespace jaxconv::winograd;

int failures = 0;

void Expect(bool condition, const char* what, int m) {
  if (condition) return;
  std::printf("F(%d, 3): %s\n", m, what);
  ++failures;
}

// Integers so small that every sum of the input and output transforms is exact.
int Value(int seed) { return (seed * 37 + 11) % 17 - 8; }

bool Near(double a, double b) { return std::fabs(a - b) <= 1e-6 * (std::fabs(a) + 1); }

template <int m>
void TestOneDimension() {
  constexpr int kAlpha = m + 2;
  const auto& t = kTransform<m>;
  float d[kAlpha], v[kAlpha], y[m], g[kTaps], u[kAlpha];
  for (int k = 0; k < kAlpha; ++k) d[k] = static_cast<float>(Value(k));
  for (int k = 0; k < kTaps; ++k) g[k] = static_cast<float>(Value(k + 20));
  TransformInput<m>(d, v);
  TransformFilter<m>(g, u);
  TransformOutput<m>(d, y);
  for (int i = 0; i < kAlpha; ++i) {
    double input = 0, filter = 0;
    for (int k = 0; k < kAlpha; ++k) input += double{t.bt[i][k]} * d[k];
    for (int k = 0; k < kTaps; ++k) filter += double{t.g[i][k]} * g[k];
    Expect(v[i] == input, "input transform", m);
    Expect(Near(filter, u[i]), "filter transform", m);
  }
  for (int i = 0; i < m; ++i) {
    double output = 0;
    for (int k = 0; k < kAlpha; ++k) output += double{t.at[i][k]} * d[k];
    Expect(y[i] == output, "output transform", m);
  }
}

// Computes half of the points at a time, from the inputs that they need.
template <int m, int kHalf>
void TestHalf() {
  float d[m + 2], v[(m + 2) / 2];
  for (int k = 0; k < m + 2; ++k) d[k] = static_cast<float>(Value(k));
  d[kHalf == 0 ? m + 1 : 0] = std::nanf("");
  TransformInputHalf<m, kHalf>(d, v);
  for (int i = 0; i < (m + 2) / 2; ++i) {
    double input = 0;
    for (int k = kHalf; k < m + 1 + kHalf; ++k) {
      input += double{kTransform<m>.bt[kHalf * (m + 2) / 2 + i][k]} * d[k];
    }
    Expect(v[i] == input, "half of the input transform", m);
  }
}

// The convolution of a tile through the transforms equals its direct convolution.
template <int m>
void TestTwoDimensions() {
  constexpr int kAlpha = m + 2;
  float d[kAlpha][kAlpha], v[kAlpha][kAlpha], g[kTaps][kTaps], u[kAlpha][kAlpha], y[m][m];
  for (int i = 0; i < kAlpha; ++i) {
    for (int j = 0; j < kAlpha; ++j) d[i][j] = v[i][j] = static_cast<float>(Value(i * kAlpha + j));
  }
  for (int r = 0; r < kTaps; ++r) {
    for (int s = 0; s < kTaps; ++s) g[r][s] = static_cast<float>(Value(50 + r * kTaps + s));
  }
  TransformInputTile<m>(v);
  TransformFilterTile<m>(g, u);
  for (int i = 0; i < kAlpha; ++i) {
    for (int j = 0; j < kAlpha; ++j) v[i][j] *= u[i][j];
  }
  TransformOutputTile<m>(v, y);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < m; ++j) {
      float expected = 0;
      for (int r = 0; r < kTaps; ++r) {
        for (int s = 0; s < kTaps; ++s) expected += d[i + r][j + s] * g[r][s];
      }
      Expect(std::fabs(expected - y[i][j]) <= 1e-3, "a tile is not convolved", m);
    }
  }
}

template <int m>
void Test() {
  TestOneDimension<m>();
  TestHalf<m, 0>();
  TestHalf<m, 1>();
  TestTwoDimensions<m>();
}

}  // namespace

int main() {
  Test<2>();
  Test<4>();
  Test<6>();
  std::printf("winograd_transform_test: %d failures\n", failures);
  return failures != 0;
}
