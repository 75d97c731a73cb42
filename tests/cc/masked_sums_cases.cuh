// Every form of masked_sums against the definition in its header.
#ifndef JAXCONV_TESTS_CC_MASKED_SUMS_CASES_CUH_
#define JAXCONV_TESTS_CC_MASKED_SUMS_CASES_CUH_

#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "activations.cuh"
#include "cuda/normalisation/masked_sums.h"
#include "pass_test.cuh"

namespace jaxconv {

enum class MaskTold { kByResult, kAffine, kByBits, kNone };

struct MaskedSumsCase {
  DType dtype;
  int64_t segments, rows, channels, parts;
  int gradients, arrays;
  MaskTold told;
  bool stores;
  float below;
  Derivative derivative;
  bool values = false;  // with the sum of the activation's values
};

inline void RunMaskedSums(const MaskedSumsCase& c, PassTest& test) {
  const int64_t count = c.segments * c.rows * c.channels, kinds = 1 + c.arrays + c.values;
  const int64_t numbers = c.segments * c.channels;
  const std::vector<double> gradient = test.Drawn(count), gradient2 = test.Drawn(count),
                            y = test.Drawn(count), y2 = test.Drawn(count);
  std::vector<double> result = test.Drawn(count);
  result[count / 2] = std::nan("");  // compares above no bound
  // The first mean and the offset are shared by all segments.
  const std::vector<double> mean = test.Drawn(c.channels, -2, 2),
                            mean2 = test.Drawn(numbers, -2, 2), scale = test.Drawn(numbers, -2, 2),
                            offset = test.Drawn(c.channels, -2, 2);
  const DeviceArray gradients[] = {{c.dtype, gradient}, {c.dtype, gradient2}};
  const DeviceArray arrays[] = {{c.dtype, y}, {c.dtype, y2}};
  const DeviceArray means[] = {{DType::kF32, mean}, {DType::kF32, mean2}};
  auto inside = [&](double a) { return a > 0 && !(a >= c.below); };
  std::vector<double> bytes(count / 8);
  for (int64_t at = 0; at < count; ++at) bytes[at / 8] += int{inside(result[at])} << at % 8;
  const DeviceArray of_result(c.dtype, result), bits(DType::kU8, bytes), scales(DType::kF32, scale),
      offsets(DType::kF32, offset), masked(c.dtype, count),
      sums(DType::kF32, c.segments * c.parts * kinds * c.channels);
  MaskedSums p = {};
  p.segments = c.segments, p.rows = c.rows, p.channels = c.channels, p.parts = c.parts;
  p.gradient = gradients[0].data();
  if (c.gradients == 2) p.gradient2 = gradients[1].data();
  for (int a = 0; a < c.arrays; ++a) {
    p.arrays[a] = arrays[a].data();
    p.means[a] = {means[a].as<float>(), a == 0 ? 0 : c.channels};
  }
  switch (c.told) {
    case MaskTold::kByResult:
      p.result = of_result.data();
      break;
    case MaskTold::kAffine:
      p.scale = {scales.as<float>(), c.channels}, p.offset = {offsets.as<float>(), 0};
      break;
    case MaskTold::kByBits:
      p.bits = bits.as<uint8_t>();
      break;
    case MaskTold::kNone:
      break;
  }
  p.above = 0, p.below = c.below;
  p.derivative = c.derivative, p.slope = 0.25f;
  if (c.values) p.activation = ActivationOf(c.derivative);
  if (c.stores) p.masked = masked.data();
  p.sums = sums.as<float>();
  test.Launched(LaunchMaskedSums(c.dtype, p, nullptr));
  // A derivative may round to the neighbour of the definition's number.
  double tolerance = 0;
  if (c.derivative != Derivative::kNone) {
    tolerance = c.dtype == DType::kF32 ? 1e-5 : c.dtype == DType::kF16 ? 2e-3 : 1e-2;
  }
  auto u_at = [&](int64_t at) {
    const int64_t k = at % c.channels, segment = at / (c.rows * c.channels);
    return (y[at] - mean[k]) * scale[segment * c.channels + k] + offset[k];
  };
  auto dz = [&](int64_t at) {
    const double g = c.gradients == 2 ? gradient[at] + gradient2[at] : gradient[at];
    if (c.told == MaskTold::kNone) return g;
    if (c.told != MaskTold::kAffine) return inside(result[at]) ? g : 0.0;
    if (c.derivative == Derivative::kNone) return inside(u_at(at)) ? g : 0.0;
    const double product = g * DerivativeOf(c.derivative, p.slope, u_at(at));
    return c.values ? product : Rounded(c.dtype, product);
  };
  if (c.stores) {
    test.Result(
        "dz", masked,
        [&] {
          std::vector<double> expected;
          for (int64_t at = 0; at < count; ++at) expected.push_back(dz(at));
          return expected;
        },
        1, 1, tolerance);
  }
  test.Result(
      "sums", sums,
      [&] {
        std::vector<double> expected(c.segments * kinds * c.channels);
        for (int64_t at = 0; at < count; ++at) {
          const int64_t k = at % c.channels, segment = at / (c.rows * c.channels);
          double* const sum = expected.data() + segment * kinds * c.channels + k;
          sum[0] += dz(at);
          if (c.arrays >= 1) sum[c.channels] += dz(at) * (y[at] - mean[k]);
          if (c.arrays == 2) {
            sum[2 * c.channels] += dz(at) * (y2[at] - mean2[segment * c.channels + k]);
          }
          if (c.values) {
            sum[2 * c.channels] += gradient[at] * ActivationOf(p.activation, p.slope, u_at(at));
          }
        }
        return expected;
      },
      c.parts, c.segments, 16 * tolerance);
}

inline void MaskedSumsCases(PassTest& test) {
  constexpr float kNoBound = std::numeric_limits<float>::quiet_NaN();
  // Segments, rows, channels, parts: fewer rows than a CTA has, rows that are no multiple of a
  // CTA's steps, a partial last slice of channels, parts without rows.
  constexpr int64_t kShapes[][4] = {{1, 3, 8, 1},    {1, 70, 64, 2},  {1, 301, 24, 3},
                                    {1, 29, 264, 2}, {1, 41, 520, 5}, {1, 9, 72, 11},
                                    {3, 37, 64, 2},  {5, 7, 264, 1},  {2, 150, 16, 3}};
  struct Form {
    int gradients, arrays;
    MaskTold told;
    bool stores;
  };
  constexpr MaskTold kByResult = MaskTold::kByResult, kAffine = MaskTold::kAffine,
                     kByBits = MaskTold::kByBits, kNone = MaskTold::kNone;
  constexpr Form kForms[] = {
      {1, 1, kByResult, false}, {1, 2, kByResult, true}, {2, 1, kByResult, true},
      {2, 2, kByResult, true},  {1, 1, kAffine, false},  {1, 2, kAffine, true},
      {2, 1, kAffine, false},   {2, 2, kAffine, true},   {1, 1, kByBits, false},
      {1, 2, kByBits, true},    {2, 1, kByBits, true},   {2, 2, kByBits, true},
      {1, 0, kNone, false},     {1, 1, kNone, false},    {1, 2, kNone, false},
      {2, 0, kNone, true},      {2, 1, kNone, true},     {2, 2, kNone, false}};
  constexpr const char* kNames[] = {"_result", "_affine", "_bits", ""};
  auto run = [&](const MaskedSumsCase& c) {
    test.Begin(std::string(Name(c.dtype)) + "_" + std::to_string(c.segments) + "x" +
               std::to_string(c.rows) + "x" + std::to_string(c.channels) + "_parts" +
               std::to_string(c.parts) + "_gradients" + std::to_string(c.gradients) + "_arrays" +
               std::to_string(c.arrays) +
               (c.derivative == Derivative::kNone
                    ? kNames[static_cast<int>(c.told)]
                    : "_" + std::string(kDerivativeNames[static_cast<int>(c.derivative)])) +
               (c.values ? "_values" : "") + (c.stores ? "_stored" : ""));
    RunMaskedSums(c, test);
  };
  int number = 0, row = 0;
  for (const auto& [segments, rows, channels, parts] : kShapes) {
    // Each form runs every shape; over the shapes, its type alternates.
    ++row;
    for (const Form& form : kForms) {
      const float below = ++number % 3 != 0 ? kNoBound : 2.0f;
      run({TypeOf(number + row), segments, rows, channels, parts, form.gradients, form.arrays,
           form.told, form.stores, below, Derivative::kNone});
    }
  }
  for (int i = 1; i < static_cast<int>(std::size(kDerivativeNames)); ++i) {
    for (int gradients = 1; gradients <= 2; ++gradients) {
      const auto& [segments, rows, channels, parts] = kShapes[(2 * i + gradients) % 9];
      for (int type = 0; type < 3; ++type) {
        run({TypeOf(type), segments, rows, channels, parts, gradients, 1, MaskTold::kAffine,
             type % 2 == 0, kNoBound, static_cast<Derivative>(i)});
      }
    }
    if (ActivationOf(static_cast<Derivative>(i)) == Activation::kNone) continue;
    for (int type = 0; type < 3; ++type) {
      const auto& [segments, rows, channels, parts] = kShapes[(i + 3 * type) % 9];
      run({TypeOf(type), segments, rows, channels, parts, 1, 1, MaskTold::kAffine, false, kNoBound,
           static_cast<Derivative>(i), true});
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_MASKED_SUMS_CASES_CUH_
