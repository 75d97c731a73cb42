// Every form of moments against the definition in its header.
#ifndef JAXCONV_TESTS_CC_MOMENTS_CASES_CUH_
#define JAXCONV_TESTS_CC_MOMENTS_CASES_CUH_

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/normalisation/moments.h"
#include "cuda/normalisation/plan.h"
#include "pass_test.cuh"

namespace jaxconv {

struct MomentsCase {
  DType dtype;
  int64_t segments, rows, channels, parts;
};

inline void RunMoments(const MomentsCase& c, PassTest& test) {
  const int64_t count = c.segments * c.rows * c.channels;
  std::vector<double> y = test.Drawn(count);
  // Means are large beside the deviations, but small enough for the type to tell values apart.
  for (int64_t at = 0; at < count; ++at) {
    y[at] =
        Rounded(c.dtype, y[at] + (at % c.channels % 3 - 1) * (c.dtype == DType::kF32 ? 1e4 : 99));
  }
  const DeviceArray of_y(c.dtype, y), moments(DType::kF32, c.segments * c.parts * 3 * c.channels);
  test.Launched(LaunchMoments(
      c.dtype, {c.segments, c.rows, c.channels, c.parts, of_y.data(), moments.as<float>()},
      nullptr));
  const int64_t block =
      normalisation::RowsOfThread("moments", c.dtype) * ChannelThreads(c.channels).steps;
  const int64_t blocks = (c.rows + block - 1) / block;
  auto defined = [&] {
    std::vector<double> expected(c.segments * c.parts * 3 * c.channels);
    for (int64_t out = 0; out < c.segments * c.parts * c.channels; ++out) {
      const int64_t k = out % c.channels, part = out / c.channels % c.parts;
      const int64_t segment = out / c.channels / c.parts;
      std::vector<double> values;
      for (int64_t row = 0; row < c.rows; ++row) {
        if ((blocks - 1 - row / block) % c.parts != part) continue;
        values.push_back(y[(segment * c.rows + row) * c.channels + k]);
      }
      const int64_t pivot_row = (blocks - 1 - part) * block;
      const double pivot = y[(segment * c.rows + pivot_row) * c.channels + k];
      double mean = 0, deviations = 0;
      for (const double value : values) mean += value / static_cast<double>(values.size());
      for (const double value : values) deviations += (value - mean) * (value - mean);
      double* const moment = expected.data() + (segment * c.parts + part) * 3 * c.channels + k;
      moment[0] = pivot, moment[c.channels] = mean - pivot;
      moment[2 * c.channels] = deviations;
    }
    return expected;
  };
  test.Result("moments", moments, defined, 1, 1, 2e-6);
}

inline void MomentsCases(PassTest& test) {
  // Segments, rows, channels, parts: fewer rows than a CTA has, parts of several blocks with a
  // partial last one, a partial last slice of channels.
  constexpr int64_t kShapes[][4] = {{1, 3, 8, 1},     {1, 1000, 64, 2}, {1, 1999, 24, 3},
                                    {1, 229, 264, 2}, {1, 64, 520, 1},  {3, 700, 64, 2},
                                    {5, 7, 264, 1}};
  for (const auto& [segments, rows, channels, parts] : kShapes) {
    for (int type = 0; type < 3; ++type) {
      const DType dtype = TypeOf(type);
      test.Begin(std::string(Name(dtype)) + "_" + std::to_string(segments) + "x" +
                 std::to_string(rows) + "x" + std::to_string(channels) + "_parts" +
                 std::to_string(parts));
      RunMoments({dtype, segments, rows, channels, parts}, test);
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_MOMENTS_CASES_CUH_
