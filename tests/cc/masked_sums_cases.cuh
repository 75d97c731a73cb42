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

struct MaskedSumsCase {
  DType dtype;
  int64_t rows, channels, parts;
  int gradients, arrays;
  bool by_result, stores;
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
  const DeviceArray of_result(c.dtype, result), scales(DType::kF32, scale),
      offsets(DType::kF32, offset), masked(c.dtype, count),
      sums(DType::kF32, c.parts * kinds * c.channels);
  MaskedSums p = {};
  p.rows = c.rows, p.channels = c.channels, p.parts = c.parts;
  p.gradient = gradients[0].data();
  if (c.gradients == 2) p.gradient2 = gradients[1].data();
  for (int a = 0; a < c.arrays; ++a) {
    p.arrays[a] = arrays[a].data(), p.means[a] = means[a].as<float>();
  }
  if (c.by_result) {
    p.result = of_result.data();
  } else {
    p.scale = scales.as<float>(), p.offset = offsets.as<float>();
  }
  p.above = 0, p.below = c.below;
  if (c.stores) p.masked = masked.data();
  p.sums = sums.as<float>();
  test.Launched(LaunchMaskedSums(c.dtype, p, nullptr));
  auto dz = [&](int64_t at) {
    const int64_t k = at % c.channels;
    const double a = c.by_result ? result[at] : (y[at] - mean[k]) * scale[k] + offset[k];
    if (!(a > 0) || a >= c.below) return 0.0;
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
    bool by_result, stores;
  };
  constexpr Form kForms[] = {{1, 1, true, false}, {1, 2, true, true},  {2, 1, true, true},
                             {2, 2, true, true},  {2, 2, true, false}, {1, 1, false, false},
                             {1, 1, false, true}};
  int number = 0;
  for (const auto& [rows, channels, parts] : kShapes) {
    for (const Form& form : kForms) {
      const DType dtype = ++number % 2 != 0 ? DType::kBF16 : DType::kF16;
      const float below = number % 3 != 0 ? kNone : 2.0f;
      test.Begin(std::string(Name(dtype)) + "_" + std::to_string(rows) + "x" +
                 std::to_string(channels) + "_parts" + std::to_string(parts) + "_gradients" +
                 std::to_string(form.gradients) + "_arrays" + std::to_string(form.arrays) +
                 (form.by_result ? "_result" : "_affine") + (form.stores ? "_stored" : ""));
      RunMaskedSums({dtype, rows, channels, parts, form.gradients, form.arrays, form.by_result,
                     form.stores, below},
                    test);
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_MASKED_SUMS_CASES_CUH_
