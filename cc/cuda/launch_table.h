// Instance -> the function that launches its device code. Apart from the registry, which is linked
// without device code where kernels are only selected and planned.
#ifndef JAXCONV_CUDA_LAUNCH_TABLE_H_
#define JAXCONV_CUDA_LAUNCH_TABLE_H_

#include <string_view>

#include "cuda/common/kernel.h"

namespace jaxconv {

// Null where no instance has that name.
LaunchFunction FindLaunch(std::string_view name);

// The entry of every padded instance (common/padded_channels.h), which finds that of the instance
// inside.
Status LaunchPadded(const Plan& plan, const Operands& operands, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_LAUNCH_TABLE_H_
