// Activations whose derivative masked_sums multiplies by, and activated_sums adds.
#ifndef JAXCONV_CUDA_NORMALISATION_DERIVATIVE_H_
#define JAXCONV_CUDA_NORMALISATION_DERIVATIVE_H_

#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "core/epilogue.h"
#include "core/status.h"

namespace jaxconv {

// kNone: a mask instead of a derivative. At corners the derivatives are those of jax.nn; from
// kMaximum to kClipHardSwish they are the mean of both sides, as in jnp.maximum and jnp.clip.
enum class Derivative : int32_t {
  kNone,
  kLeakyRelu,  // u >= 0 ? 1 : slope
  kElu,        // u > 0 ? 1 : slope * exp(u)
  kHardSigmoid,
  kHardSwish,
  kSigmoid,
  kSilu,
  kTanh,
  kGelu,
  kGeluTanh,
  kSoftplus,
  kMish,
  kMaximum,       // of max(u, 0)
  kClip6,         // of min(max(u, 0), 6)
  kLeakyMaximum,  // of max(u, slope * u)
  kClipHardSigmoid,
  kClipHardSwish,
  kRelu,   // u > 0
  kRelu6,  // 0 < u < 6
};

inline constexpr std::string_view kDerivativeNames[] = {
    "none",    "leaky_relu", "elu",           "hard_sigmoid",      "hard_swish",      "sigmoid",
    "silu",    "tanh",       "gelu",          "gelu_tanh",         "softplus",        "mish",
    "maximum", "clip6",      "leaky_maximum", "clip_hard_sigmoid", "clip_hard_swish", "relu",
    "relu6"};

// The activation with this derivative if a kernel computes both, else kNone.
inline Activation ActivationOf(Derivative derivative) {
  switch (derivative) {
    case Derivative::kRelu:
    case Derivative::kMaximum:
      return Activation::kRelu;
    case Derivative::kRelu6:
    case Derivative::kClip6:
      return Activation::kRelu6;
    case Derivative::kLeakyRelu:
    case Derivative::kLeakyMaximum:
      return Activation::kLeakyRelu;
    case Derivative::kHardSwish:
      return Activation::kHardSwish;
    case Derivative::kSigmoid:
      return Activation::kSigmoid;
    case Derivative::kSilu:
      return Activation::kSilu;
    case Derivative::kTanh:
      return Activation::kTanh;
    case Derivative::kGelu:
      return Activation::kGelu;
    case Derivative::kGeluTanh:
      return Activation::kGeluTanh;
    default:
      return Activation::kNone;
  }
}

inline Status ParseDerivative(std::string_view name, Derivative* derivative) {
  for (size_t i = 0; i < std::size(kDerivativeNames); ++i) {
    if (kDerivativeNames[i] != name) continue;
    *derivative = static_cast<Derivative>(i);
    return {};
  }
  return Status::Unimplemented("no kernel has the derivative of '" + std::string(name) + "'");
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_DERIVATIVE_H_
