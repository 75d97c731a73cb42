// The epilogue of floating-point operands (core/epilogue.h) in double precision.
#ifndef JAXCONV_TESTS_CC_EPILOGUE_REFERENCE_H_
#define JAXCONV_TESTS_CC_EPILOGUE_REFERENCE_H_

#include <cmath>

#include "core/conv_problem.h"
#include "core/epilogue.h"

#ifdef __CUDACC__
#define JAXCONV_ON_DEVICE __host__ __device__
#else
#define JAXCONV_ON_DEVICE
#endif

namespace jaxconv {

JAXCONV_ON_DEVICE inline double ActivateReference(Activation activation, double slope, double v) {
  if (std::isnan(v)) return v;
  switch (activation) {
    case Activation::kNone:
      return v;
    case Activation::kRelu:
      return v < 0 ? 0 : v;
    case Activation::kRelu6:
      return v < 0 ? 0 : v > 6 ? 6 : v;
    case Activation::kLeakyRelu:
      return v < 0 ? v * slope : v;
    case Activation::kGelu:
      return 0.5 * v * std::erfc(-v / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return v / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
    case Activation::kSilu:
      return v / (1 + std::exp(-v));
    case Activation::kSigmoid:
      return 1 / (1 + std::exp(-v));
    case Activation::kTanh:
      return std::tanh(v);
    case Activation::kHardSwish:
      return v < -3 ? v * 0 : v > 3 ? v : v * (v + 3) / 6;
  }
  return v;
}

// Whether the device's result is exact if t and the slope are small multiples of a power of two.
JAXCONV_ON_DEVICE inline bool ExactActivation(Activation activation) {
  return activation <= Activation::kLeakyRelu;
}

// Error bound of a device's activation of `t`: one rounding to `dtype`, some units in the last
// place of the float32 result, and the rounding of t, which the activation passes on.
JAXCONV_ON_DEVICE inline double ActivationTolerance(DType dtype, double t, double result) {
  const double rounding = dtype == DType::kF32 ? 5e-7 : dtype == DType::kF16 ? 4.96e-4 : 3.95e-3;
  return rounding * std::fabs(result) + 3e-7 * std::fabs(t) + (dtype == DType::kF16 ? 6e-8 : 1e-30);
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_EPILOGUE_REFERENCE_H_
