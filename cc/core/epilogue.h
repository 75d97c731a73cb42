// The epilogue of a convolution. It is part of the problem, because kernels are chosen and planned
// for it; each launch provides its operands.
#ifndef JAXCONV_CORE_EPILOGUE_H_
#define JAXCONV_CORE_EPILOGUE_H_

#include <cstdint>

#include "core/host_device.h"

namespace jaxconv {

// For a value v: kRelu6 is min(max(v, 0), 6); kLeakyRelu v < 0 ? negative_slope * v : v; kGelu v *
// Phi(v) with the normal distribution's Phi; kGeluTanh its approximation v / 2 * (1 + tanh(sqrt(2 /
// pi) * (v + 0.044715 * v^3))); kSilu v * sigmoid(v); kHardSwish v * (min(max(v + 3, 0), 6) / 6).
// NaN stays NaN; infinity times 0 is NaN.
enum class Activation : int32_t {
  kNone,
  kRelu,
  kRelu6,
  kLeakyRelu,
  kGelu,
  kGeluTanh,
  kSilu,
  kSigmoid,
  kTanh,
  kHardSwish,
};

// v times a function between 0 and 1.
JAXCONV_HOST_DEVICE constexpr bool IsSwish(Activation activation) {
  return activation == Activation::kSilu || activation == Activation::kHardSwish;
}

// kChannel: one factor for each output channel. kImage: one for each image and output channel.
enum class ScaleKind : int32_t { kNone, kChannel, kImage };

// For 8-bit operands, with the int32 sum `acc` of an output element (image n, channel k):
//
//     a = acc + offset[k]
//     t = fma(float(a), scale, bias[k])               scale[k], or scale[n, k]
//     t = fma(residual_scale, float(residual), t)     residual of the output's shape and type
//     t = activation(t)
//
// in float32. An integer output is t rounded to the nearest, ties to even (NaN gives 0), plus
// zero_point, saturated; a float output is t rounded once. Absent terms are omitted. Without a
// scale there are no other terms: integer outputs are the sum's low bits, float outputs the sum.
//
// For floating-point operands, with the float32 sum `acc`, in float32 (a product and the following
// sum may be contracted):
//
//     t = acc * scale[k]
//     t = t + bias[k]
//     t = t + float(residual)      residual of the output's shape, type and layout
//     y = activation(t)            rounded once to the output's type
//
// Absent terms are omitted. `pre`: t, rounded to the output's type, is a second result.
// `statistics`: a third result, float32 (2, K): for every channel of the rounded y, the mean over
// images and pixels, and the sum of squared deviations from it. Its order of summation is fixed.
struct Epilogue {
  ScaleKind scale = ScaleKind::kNone;
  bool offset = false, bias = false, residual = false;
  Activation activation = Activation::kNone;
  int64_t zero_point = 0;    // of an 8-bit output
  float negative_slope = 0;  // for kLeakyRelu, finite
  bool pre = false, statistics = false;

  bool Plain() const {
    return scale == ScaleKind::kNone && !offset && !bias && !residual &&
           activation == Activation::kNone && zero_point == 0 && !pre && !statistics;
  }
  // Whether the results are the sums, rounded, and their statistics.
  bool StatisticsAlone() const {
    Epilogue rest = *this;
    rest.statistics = false;
    return statistics && rest.Plain();
  }
};

}  // namespace jaxconv

#endif  // JAXCONV_CORE_EPILOGUE_H_
