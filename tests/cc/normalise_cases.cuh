// Every form of normalise against the definition in its header.
#ifndef JAXCONV_TESTS_CC_NORMALISE_CASES_CUH_
#define JAXCONV_TESTS_CC_NORMALISE_CASES_CUH_

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "activations.cuh"
#include "core/activation_names.h"
#include "cuda/normalisation/normalise.h"
#include "pass_test.cuh"

namespace jaxconv {

struct NormaliseCase {
  DType dtype;
  int64_t segments, rows, channels, ctas;
  Activation activation;
  bool centred, of_segments;  // vectors: a mean too; one for each segment
};

inline void RunNormalise(const NormaliseCase& c, PassTest& test) {
  const int64_t count = c.segments * c.rows * c.channels;
  const int64_t stride = c.of_segments ? c.channels : 0;
  const int64_t numbers = c.of_segments ? c.segments * c.channels : c.channels;
  std::vector<double> y = test.Drawn(count);
  y[count / 2] = std::nan(""), y[count / 3] = std::numeric_limits<double>::infinity();
  const std::vector<double> mean = test.Drawn(numbers), offset = test.Drawn(numbers);
  const std::vector<double> scale = test.Drawn(numbers, 1, 3);
  const DeviceArray of_y(c.dtype, y), of_mean(DType::kF32, mean), of_scale(DType::kF32, scale);
  const DeviceArray of_offset(DType::kF32, offset), z(c.dtype, count);
  Normalise p = {};
  p.segments = c.segments, p.rows = c.rows, p.channels = c.channels, p.ctas = c.ctas;
  p.y = of_y.data(), p.activation = c.activation, p.z = z.data();
  if (c.centred) p.mean = {of_mean.as<float>(), stride};
  p.scale = {of_scale.as<float>(), stride}, p.offset = {of_offset.as<float>(), stride};
  test.Launched(LaunchNormalise(c.dtype, p, nullptr));
  auto defined = [&] {
    std::vector<double> expected;
    for (int64_t at = 0; at < count; ++at) {
      const int64_t of = at / c.channels / c.rows * stride + at % c.channels;
      const double u = (y[at] - (c.centred ? mean[of] : 0)) * scale[of] + offset[of];
      expected.push_back(Rounded(c.dtype, ActivationOf(c.activation, 0, u)));
    }
    return expected;
  };
  // A rounding of the result; the activation's own error is 1.2e-5.
  const double tolerance = std::ldexp(1.0, c.dtype == DType::kBF16 ? -7 : -10);
  test.Result("z", z, defined, 1, 1, tolerance);
}

inline void NormaliseCases(PassTest& test) {
  // Segments, rows, channels, CTAs: fewer rows than a CTA has, CTAs of several blocks, rows that
  // are no multiple of a CTA's steps, two slices of channels, fewer CTAs than slices.
  constexpr int64_t kShapes[][4] = {{1, 3, 8, 4},    {1, 170, 64, 2}, {4, 301, 24, 8},
                                    {2, 73, 264, 4}, {5, 41, 520, 2}, {3, 9, 72, 11}};
  int index = 0;
  for (const auto& [segments, rows, channels, ctas] : kShapes) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      for (const Activation activation :
           {Activation::kGelu, Activation::kGeluTanh, Activation::kSilu, Activation::kSigmoid,
            Activation::kTanh}) {
        const bool centred = index++ % 2 == 0, of_segments = segments > 1 && index % 3 != 0;
        test.Begin(std::string(Name(dtype)) + "_" + std::to_string(segments) + "x" +
                   std::to_string(rows) + "x" + std::to_string(channels) + "_ctas" +
                   std::to_string(ctas) + "_" + kActivationNames[static_cast<int>(activation)] +
                   (centred ? "_centred" : "") + (of_segments ? "_of_segments" : ""));
        RunNormalise({dtype, segments, rows, channels, ctas, activation, centred, of_segments},
                     test);
      }
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_NORMALISE_CASES_CUH_
