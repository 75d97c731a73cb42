// The names of activations.
#ifndef JAXCONV_CORE_ACTIVATION_NAMES_H_
#define JAXCONV_CORE_ACTIVATION_NAMES_H_

#include <cstddef>
#include <iterator>
#include <string_view>

#include "core/epilogue.h"

namespace jaxconv {

// By Activation, as in keys of problems and attributes of calls.
inline constexpr const char* kActivationNames[] = {"",     "relu",      "relu6", "leaky_relu",
                                                   "gelu", "gelu_tanh", "silu",  "sigmoid",
                                                   "tanh", "hard_swish"};

// Returns false if no activation has this name.
inline bool ParseActivation(std::string_view name, Activation* activation) {
  for (size_t i = 0; i < std::size(kActivationNames); ++i) {
    if (name != kActivationNames[i]) continue;
    *activation = static_cast<Activation>(i);
    return true;
  }
  return false;
}

}  // namespace jaxconv

#endif  // JAXCONV_CORE_ACTIVATION_NAMES_H_
