// Activations whose derivative masked_sums multiplies by.
#ifndef JAXCONV_CUDA_NORMALISATION_DERIVATIVE_H_
#define JAXCONV_CUDA_NORMALISATION_DERIVATIVE_H_

#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "core/status.h"

namespace jaxconv {

// kNone: a mask instead of a derivative. At corners the derivatives are those of jax.nn; from
// kMaximum on they are the mean of both sides, as in jnp.maximum and jnp.clip.
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
};

inline constexpr std::string_view kDerivativeNames[] = {
    "none",    "leaky_relu", "elu",           "hard_sigmoid",      "hard_swish",     "sigmoid",
    "silu",    "tanh",       "gelu",          "gelu_tanh",         "softplus",       "mish",
    "maximum", "clip6",      "leaky_maximum", "clip_hard_sigmoid", "clip_hard_swish"};

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
