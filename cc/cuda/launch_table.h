// Maps an instance to the function that launches its device code. Separate from the registry, which
// is also linked without device code, for selection and planning only.
#ifndef JAXCONV_CUDA_LAUNCH_TABLE_H_
#define JAXCONV_CUDA_LAUNCH_TABLE_H_

#include <string_view>

#include "cuda/common/kernel.h"

namespace jaxconv {

// Null if no instance has this name.
LaunchFunction FindLaunch(std::string_view name);

// The launch of every padded instance (common/padded_channels.h); it finds the launch of the inner
// instance.
Status LaunchPadded(const Plan& plan, const Operands& operands, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_LAUNCH_TABLE_H_
