// Every form of masked_sums against the definition in its header.
#ifndef JAXCONV_TESTS_CC_MASKED_SUMS_CASES_CUH_
#define JAXCONV_TESTS_CC_MASKED_SUMS_CASES_CUH_

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cuda/batch_norm/masked_sums.h"
#include "pass_test.cuh"

namespace jaxconv {

enum class MaskTold { kByResult, kAffine, kByBits };

struct MaskedSumsCase {
  DType dtype;
  int64_t rows, channels, parts;
  int gradients, arrays;
  MaskTold told;
  bool stores;
  float below;
};

inline void RunMaskedSums(const MaskedSumsCase& c, PassTest& test) {
  const int64_t count = c.rows * c.channels, kinds = 1 + c.arrays;
  const std::vector<double> gradient = test.Drawn(count), gradient2 = test.Drawn(count),
                            y = test.Drawn(count), y2 = test.Drawn(count);
  std::vector<double> result = test.Drawn(count);
  result[count / 2] = std::nan("");  // which is above nothing
  const std::vector<double> mean = test.Drawn(c.channels, -2, 2),
                            mean2 = test.Drawn(c.channels, -2, 2),
                            scale = test.Drawn(c.channels, -2, 2),
                            offset = test.Drawn(c.channels, -2, 2);
  const DeviceArray gradients[] = {{c.dtype, gradient}, {c.dtype, gradient2}};
  const DeviceArray arrays[] = {{c.dtype, y}, {c.dtype, y2}};
  const DeviceArray means[] = {{DType::kF32, mean}, {DType::kF32, mean2}};
  auto inside = [&](double a) { return a > 0 && !(a >= c.below); };
  std::vector<double> bytes(count / 8);
  for (int64_t at = 0; at < count; ++at) bytes[at / 8] += int{inside(result[at])} << at % 8;
  const DeviceArray of_result(c.dtype, result), bits(DType::kU8, bytes), scales(DType::kF32, scale),
      offsets(DType::kF32, offset), masked(c.dtype, count),
      sums(DType::kF32, c.parts * kinds * c.channels);
  MaskedSums p = {};
  p.rows = c.rows, p.channels = c.channels, p.parts = c.parts;
  p.gradient = gradients[0].data();
  if (c.gradients == 2) p.gradient2 = gradients[1].data();
  for (int a = 0; a < c.arrays; ++a) {
    p.arrays[a] = arrays[a].data(), p.means[a] = means[a].as<float>();
  }
  switch (c.told) {
    case MaskTold::kByResult:
      p.result = of_result.data();
      break;
    case MaskTold::kAffine:
      p.scale = scales.as<float>(), p.offset = offsets.as<float>();
      break;
    case MaskTold::kByBits:
      p.bits = bits.as<uint8_t>();
  }
  p.above = 0, p.below = c.below;
  if (c.stores) p.masked = masked.data();
  p.sums = sums.as<float>();
  test.Launched(LaunchMaskedSums(c.dtype, p, nullptr));
  auto dz = [&](int64_t at) {
    const int64_t k = at % c.channels;
    const bool affine = c.told == MaskTold::kAffine;
    if (!inside(affine ? (y[at] - mean[k]) * scale[k] + offset[k] : result[at])) return 0.0;
    return c.gradients == 2 ? gradient[at] + gradient2[at] : gradient[at];
  };
  if (c.stores) {
    test.Result("dz", masked, [&] {
      std::vector<double> expected;
      for (int64_t at = 0; at < count; ++at) expected.push_back(dz(at));
      return expected;
    });
  }
  test.Result(
      "sums", sums,
      [&] {
        std::vector<double> expected(kinds * c.channels);
        for (int64_t at = 0; at < count; ++at) {
          const int64_t k = at % c.channels;
          expected[k] += dz(at);
          expected[c.channels + k] += dz(at) * (y[at] - mean[k]);
          if (c.arrays == 2) expected[2 * c.channels + k] += dz(at) * (y2[at] - mean2[k]);
        }
        return expected;
      },
      c.parts);
}

inline void MaskedSumsCases(PassTest& test) {
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  // Rows, channels and parts: fewer rows than a CTA has, no multiple of its steps, a last slice of
  // channels that is not full, parts without rows.
  constexpr int64_t kShapes[][3] = {{3, 8, 1},    {70, 64, 2},  {301, 24, 3},
                                    {29, 264, 2}, {41, 520, 5}, {9, 72, 11}};
  struct Form {
    int gradients, arrays;
    MaskTold told;
    bool stores;
  };
  constexpr MaskTold kByResult = MaskTold::kByResult, kAffine = MaskTold::kAffine,
                     kByBits = MaskTold::kByBits;
  constexpr Form kForms[] = {
      {1, 1, kByResult, false}, {1, 2, kByResult, true},  {2, 1, kByResult, true},
      {2, 2, kByResult, true},  {2, 2, kByResult, false}, {1, 1, kAffine, false},
      {1, 1, kAffine, true},    {1, 1, kByBits, false},   {1, 2, kByBits, true},
      {2, 1, kByBits, true},    {2, 2, kByBits, true}};
  constexpr const char* kNames[] = {"_result", "_affine", "_bits"};
  int number = 0;
  for (const auto& [rows, channels, parts] : kShapes) {
    for (const Form& form : kForms) {
      const DType dtype = ++number % 2 != 0 ? DType::kBF16 : DType::kF16;
      const float below = number % 3 != 0 ? kNone : 2.0f;
      test.Begin(std::string(Name(dtype)) + "_" + std::to_string(rows) + "x" +
                 std::to_string(channels) + "_parts" + std::to_string(parts) + "_gradients" +
                 std::to_string(form.gradients) + "_arrays" + std::to_string(form.arrays) +
                 kNames[static_cast<int>(form.told)] + (form.stores ? "_stored" : ""));
      RunMaskedSums({dtype, rows, channels, parts, form.gradients, form.arrays, form.told,
                     form.stores, below},
                    test);
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_MASKED_SUMS_CASES_CUH_
