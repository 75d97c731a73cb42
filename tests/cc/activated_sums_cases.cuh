// Every form of activated_sums against the definition in its header.
#ifndef JAXCONV_TESTS_CC_ACTIVATED_SUMS_CASES_CUH_
#define JAXCONV_TESTS_CC_ACTIVATED_SUMS_CASES_CUH_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/activation_names.h"
#include "cuda/normalisation/activated_sums.h"
#include "pass_test.cuh"

namespace jaxconv {

struct ActivatedSumsCase {
  DType dtype;
  int64_t segments, rows, channels, parts;
  Activation activation;
  bool centred, of_segments;  // vectors: a mean too; one for each segment
};

// An activation at `u`, in double.
inline double ActivationOf(Activation activation, double slope, double u) {
  switch (activation) {
    case Activation::kNone:
      return u;
    case Activation::kRelu:
      return std::max(u, 0.0);
    case Activation::kRelu6:
      return std::min(std::max(u, 0.0), 6.0);
    case Activation::kLeakyRelu:
      return u < 0 ? slope * u : u;
    case Activation::kGelu:
      return u * std::erfc(-u * std::sqrt(0.5)) / 2;
    case Activation::kGeluTanh:
      return u / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (u + 0.044715 * u * u * u)));
    case Activation::kSilu:
      return u / (1 + std::exp(-u));
    case Activation::kSigmoid:
      return 1 / (1 + std::exp(-u));
    case Activation::kTanh:
      return std::tanh(u);
    case Activation::kHardSwish:
      return u * std::min(std::max(u + 3, 0.0), 6.0) / 6;
  }
  return 0;
}

inline void RunActivatedSums(const ActivatedSumsCase& c, PassTest& test) {
  const int64_t count = c.segments * c.rows * c.channels;
  const int64_t stride = c.of_segments ? c.channels : 0;
  const int64_t numbers = c.of_segments ? c.segments * c.channels : c.channels;
  const std::vector<double> y = test.Drawn(count), mean = test.Drawn(numbers);
  const std::vector<double> scale = test.Drawn(numbers), offset = test.Drawn(numbers);
  const DeviceArray of_y(c.dtype, y), of_mean(DType::kF32, mean), of_scale(DType::kF32, scale);
  const DeviceArray of_offset(DType::kF32, offset);
  const DeviceArray sums(DType::kF32, c.segments * c.parts * c.channels);
  ActivatedSums p = {};
  p.segments = c.segments, p.rows = c.rows, p.channels = c.channels, p.parts = c.parts;
  p.y = of_y.data(), p.activation = c.activation, p.slope = 0.25f;
  if (c.centred) p.mean = {of_mean.as<float>(), stride};
  p.scale = {of_scale.as<float>(), stride}, p.offset = {of_offset.as<float>(), stride};
  p.sums = sums.as<float>();
  test.Launched(LaunchActivatedSums(c.dtype, p, nullptr));
  auto defined = [&] {
    std::vector<double> expected(c.segments * c.channels);
    for (int64_t at = 0; at < count; ++at) {
      const int64_t k = at % c.channels, segment = at / c.channels / c.rows;
      const int64_t of = segment * stride + k;
      const double u = (y[at] - (c.centred ? mean[of] : 0)) * scale[of] + offset[of];
      expected[segment * c.channels + k] += ActivationOf(c.activation, 0.25, u);
    }
    return expected;
  };
  const bool exact = c.activation == Activation::kRelu || c.activation == Activation::kRelu6;
  test.Result("sums", sums, defined, static_cast<int>(c.parts), static_cast<int>(c.segments),
              exact ? 0 : 2e-5);
}

inline void ActivatedSumsCases(PassTest& test) {
  // Segments, rows, channels, parts, as in moments_cases.cuh.
  constexpr int64_t kShapes[][4] = {{1, 3, 8, 1},     {1, 1000, 64, 2}, {4, 199, 24, 3},
                                    {2, 229, 264, 2}, {1, 64, 520, 1},  {5, 7, 264, 1}};
  int index = 0;
  for (const auto& [segments, rows, channels, parts] : kShapes) {
    for (int type = 0; type < 3; ++type) {
      for (const Activation activation :
           {Activation::kRelu, Activation::kRelu6, Activation::kLeakyRelu, Activation::kGelu,
            Activation::kGeluTanh, Activation::kSilu, Activation::kSigmoid, Activation::kTanh,
            Activation::kHardSwish}) {
        const DType dtype = TypeOf(type);
        const bool centred = index++ % 2 == 0, of_segments = segments > 1 && index % 3 == 0;
        test.Begin(std::string(Name(dtype)) + "_" + std::to_string(segments) + "x" +
                   std::to_string(rows) + "x" + std::to_string(channels) + "_parts" +
                   std::to_string(parts) + "_" + kActivationNames[static_cast<int>(activation)] +
                   (centred ? "_centred" : "") + (of_segments ? "_of_segments" : ""));
        RunActivatedSums({dtype, segments, rows, channels, parts, activation, centred, of_segments},
                         test);
      }
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_ACTIVATED_SUMS_CASES_CUH_
