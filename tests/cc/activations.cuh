// The definitions of activations and their derivatives.
#ifndef JAXCONV_TESTS_CC_ACTIVATIONS_CUH_
#define JAXCONV_TESTS_CC_ACTIVATIONS_CUH_

#include <algorithm>
#include <cmath>

#include "core/epilogue.h"
#include "cuda/normalisation/derivative.h"

namespace jaxconv {

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

// The derivative of an activation at `u`, in double.
inline double DerivativeOf(Derivative derivative, double slope, double u) {
  const double s = 1 / (1 + std::exp(-u)), density = std::exp(-u * u / 2) / std::sqrt(2 * M_PI);
  const double k = std::sqrt(8 / M_PI), t = std::tanh(std::log1p(std::exp(u)));
  const double g = 1 / (1 + std::exp(-k * (u + 0.044715 * u * u * u)));
  switch (derivative) {
    case Derivative::kNone:
      break;
    case Derivative::kLeakyRelu:
      return u >= 0 ? 1 : slope;
    case Derivative::kElu:
      return u > 0 ? 1 : slope * std::exp(u);
    case Derivative::kHardSigmoid:
      return u > -3 && u < 3 ? 1 / 6.0 : 0;
    case Derivative::kHardSwish:
      return u <= -3 ? 0 : u >= 3 ? 1 : u / 3 + 0.5;
    case Derivative::kSigmoid:
      return s * (1 - s);
    case Derivative::kSilu:
      return s + u * s * (1 - s);
    case Derivative::kTanh:
      return 1 - std::tanh(u) * std::tanh(u);
    case Derivative::kGelu:
      return std::erfc(-u * std::sqrt(0.5)) / 2 + u * density;
    case Derivative::kGeluTanh:
      return g + u * g * (1 - g) * k * (1 + 3 * 0.044715 * u * u);
    case Derivative::kSoftplus:
      return s;
    case Derivative::kMish:
      return t + u * (1 - t * t) * s;
    case Derivative::kMaximum:
      return u > 0 ? 1 : u == 0 ? 0.5 : 0;
    case Derivative::kClip6:
      return u > 0 && u < 6 ? 1 : u == 0 || u == 6 ? 0.5 : 0;
    case Derivative::kLeakyMaximum:
      return u > 0 ? 1 : u == 0 ? (1 + slope) / 2 : slope;
    case Derivative::kClipHardSigmoid:
      return std::abs(u) < 3 ? 1 / 6.0 : std::abs(u) == 3 ? 1 / 12.0 : 0;
    case Derivative::kClipHardSwish:
      return u < -3 ? 0 : u == -3 ? -0.25 : u < 3 ? u / 3 + 0.5 : u == 3 ? 1.25 : 1;
    case Derivative::kRelu:
      return u > 0;
    case Derivative::kRelu6:
      return u > 0 && u < 6;
  }
  return 0;
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_ACTIVATIONS_CUH_
