// Every form of activated_sums against the definition in its header.
#ifndef JAXCONV_TESTS_CC_ACTIVATED_SUMS_CASES_CUH_
#define JAXCONV_TESTS_CC_ACTIVATED_SUMS_CASES_CUH_

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "activations.cuh"
#include "core/activation_names.h"
#include "cuda/normalisation/activated_sums.h"
#include "pass_test.cuh"

namespace jaxconv {

struct ActivatedSumsCase {
  DType dtype;
  int64_t segments, rows, channels, parts;
  Activation activation;
  bool centred, of_segments;  // vectors: a mean too; one for each segment
  Derivative derivative;      // kNone: only the first sum
};

inline void RunActivatedSums(const ActivatedSumsCase& c, PassTest& test) {
  const int64_t count = c.segments * c.rows * c.channels;
  const int64_t stride = c.of_segments ? c.channels : 0;
  const int64_t numbers = c.of_segments ? c.segments * c.channels : c.channels;
  const std::vector<double> y = test.Drawn(count), mean = test.Drawn(numbers);
  const std::vector<double> scale = test.Drawn(numbers), offset = test.Drawn(numbers);
  const DeviceArray of_y(c.dtype, y), of_mean(DType::kF32, mean), of_scale(DType::kF32, scale);
  const DeviceArray of_offset(DType::kF32, offset);
  const int64_t kinds = c.derivative == Derivative::kNone ? 1 : 3;
  const DeviceArray sums(DType::kF32, c.segments * c.parts * kinds * c.channels);
  ActivatedSums p = {};
  p.segments = c.segments, p.rows = c.rows, p.channels = c.channels, p.parts = c.parts;
  p.y = of_y.data(), p.activation = c.activation, p.slope = 0.25f;
  p.derivative = c.derivative;
  if (c.centred) p.mean = {of_mean.as<float>(), stride};
  p.scale = {of_scale.as<float>(), stride}, p.offset = {of_offset.as<float>(), stride};
  p.sums = sums.as<float>();
  test.Launched(LaunchActivatedSums(c.dtype, p, nullptr));
  auto defined = [&] {
    std::vector<double> expected(c.segments * kinds * c.channels);
    for (int64_t at = 0; at < count; ++at) {
      const int64_t k = at % c.channels, segment = at / c.channels / c.rows;
      const int64_t of = segment * stride + k;
      const double centred = y[at] - (c.centred ? mean[of] : 0);
      const double u = centred * scale[of] + offset[of];
      double* const sum = expected.data() + segment * kinds * c.channels + k;
      sum[0] += ActivationOf(c.activation, 0.25, u);
      if (kinds == 1) continue;
      const double slope = DerivativeOf(c.derivative, 0.25, u);
      sum[c.channels] += slope;
      sum[2 * c.channels] += slope * centred;
    }
    return expected;
  };
  const bool exact = c.activation == Activation::kRelu || c.activation == Activation::kRelu6;
  // The errors of derivatives are multiplied by y - mean.
  const double tolerance = exact ? 0 : kinds == 1 ? 2e-5 : 2e-4;
  test.Result("sums", sums, defined, static_cast<int>(c.parts), static_cast<int>(c.segments),
              tolerance);
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
        RunActivatedSums({dtype, segments, rows, channels, parts, activation, centred, of_segments,
                          Derivative::kNone},
                         test);
      }
      for (int i = 1; i < static_cast<int>(std::size(kDerivativeNames)); ++i) {
        const auto derivative = static_cast<Derivative>(i);
        const Activation activation = ActivationOf(derivative);
        // Every third type of a shape, so that each derivative sees every type.
        if (activation == Activation::kNone || (i + type + index) % 3 != 0) continue;
        const bool centred = i % 2 == 0, of_segments = segments > 1 && i % 3 == 0;
        test.Begin(std::string(Name(TypeOf(type))) + "_" + std::to_string(segments) + "x" +
                   std::to_string(rows) + "x" + std::to_string(channels) + "_parts" +
                   std::to_string(parts) + "_derivative_" + std::string(kDerivativeNames[i]) +
                   (centred ? "_centred" : "") + (of_segments ? "_of_segments" : ""));
        RunActivatedSums({TypeOf(type), segments, rows, channels, parts, activation, centred,
                          of_segments, derivative},
                         test);
      }
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_ACTIVATED_SUMS_CASES_CUH_
