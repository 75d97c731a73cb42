// Every form of normalise_add against the definition in its header.
#ifndef JAXCONV_TESTS_CC_NORMALISE_ADD_CASES_CUH_
#define JAXCONV_TESTS_CC_NORMALISE_ADD_CASES_CUH_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cuda/normalisation/normalise_add.h"
#include "pass_test.cuh"

namespace jaxconv {

struct NormaliseAddCase {
  DType dtype;
  int64_t rows, channels, ctas;
  int arrays;
  float below;
};

inline void RunNormaliseAdd(const NormaliseAddCase& c, PassTest& test) {
  const int64_t count = c.rows * c.channels;
  std::vector<double> arrays[2], means[2], scales[2], offsets[2];
  for (int a = 0; a < 2; ++a) {
    arrays[a] = test.Drawn(count);
    means[a] = test.Drawn(c.channels, -2, 2);
    // So large that the normalised numbers and their sum are rounded.
    scales[a] = test.Drawn(c.channels, -500, 500);
    offsets[a] = test.Drawn(c.channels, -300, 300);
  }
  arrays[0][count / 2] = std::nan("");
  // Adds the type's smallest number to 0; it must not be flushed to zero.
  scales[0][0] = offsets[0][0] = 0;
  arrays[1][0] = std::ldexp(1.0, c.dtype == DType::kF32    ? -149
                                 : c.dtype == DType::kBF16 ? -133
                                                           : -24);
  const DeviceArray y[] = {{c.dtype, arrays[0]}, {c.dtype, arrays[1]}};
  const DeviceArray mean[] = {{DType::kF32, means[0]}, {DType::kF32, means[1]}};
  const DeviceArray scale[] = {{DType::kF32, scales[0]}, {DType::kF32, scales[1]}};
  const DeviceArray offset[] = {{DType::kF32, offsets[0]}, {DType::kF32, offsets[1]}};
  const DeviceArray result(c.dtype, count), bits(DType::kU8, count / 8);
  NormaliseAdd p = {};
  p.rows = c.rows, p.channels = c.channels, p.ctas = c.ctas;
  for (int a = 0; a < c.arrays; ++a) {
    p.arrays[a] = y[a].data(), p.means[a] = mean[a].as<float>();
    p.scales[a] = scale[a].as<float>(), p.offsets[a] = offset[a].as<float>();
  }
  if (c.arrays == 1) p.shortcut = y[1].data();
  p.below = c.below;
  p.result = result.data(), p.bits = bits.as<uint8_t>();
  test.Launched(LaunchNormaliseAdd(c.dtype, p, nullptr));
  auto normalised = [&](int a, int64_t at) {
    const int64_t k = at % c.channels;
    return Rounded(c.dtype, (arrays[a][at] - means[a][k]) * scales[a][k] + offsets[a][k]);
  };
  auto defined = [&](int64_t at) {
    const double other = c.arrays == 2 ? normalised(1, at) : arrays[1][at];
    const double sum = Rounded(c.dtype, normalised(0, at) + other);
    return sum != sum            ? sum
           : std::isnan(c.below) ? std::max(sum, 0.0)
                                 : std::clamp(sum, 0.0, double{c.below});
  };
  test.Result("result", result, [&] {
    std::vector<double> expected;
    for (int64_t at = 0; at < count; ++at) expected.push_back(defined(at));
    return expected;
  });
  test.Result("bits", bits, [&] {
    std::vector<double> expected(count / 8);
    for (int64_t at = 0; at < count; ++at) {
      const double a = defined(at);
      if (a > 0 && !(a >= c.below)) expected[at / 8] += 1 << at % 8;
    }
    return expected;
  });
}

inline void NormaliseAddCases(PassTest& test) {
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  // Rows, channels, CTAs: fewer rows than a CTA has, CTAs of several blocks, rows that are no
  // multiple of a CTA's steps, a partial last slice of channels, fewer CTAs than slices.
  constexpr int64_t kShapes[][3] = {{3, 8, 4},    {170, 64, 2}, {301, 24, 1},
                                    {73, 264, 4}, {41, 520, 2}, {9, 72, 11}};
  int number = 0;
  for (const auto& [rows, channels, ctas] : kShapes) {
    for (const int arrays : {1, 2}) {
      // Some sums round up to the larger bound.
      for (const float below : {kNone, 6.0f, 1024.0f}) {
        const DType dtype = TypeOf(number / 6 + number);
        ++number;
        test.Begin(std::string(Name(dtype)) + "_" + std::to_string(rows) + "x" +
                   std::to_string(channels) + "_ctas" + std::to_string(ctas) + "_arrays" +
                   std::to_string(arrays) +
                   (std::isnan(below) ? "" : "_below" + std::to_string(static_cast<int>(below))));
        RunNormaliseAdd({dtype, rows, channels, ctas, arrays, below}, test);
      }
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_NORMALISE_ADD_CASES_CUH_
