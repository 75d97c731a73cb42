// few_channels: convolutions whose input has few channels, on the tensor cores of every GPU since
// sm_80. See fprop.cuh, dgrad.cuh and wgrad.cuh for the kernels. Plain C++.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_PLAN_H_
#define JAXCONV_CUDA_FEW_CHANNELS_PLAN_H_

#include <vector>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/kernel.h"

namespace jaxconv::few_channels {

// The instances of kernels.def, in its order.
std::vector<KernelDesc> Kernels();

// The conditions of all instances; for narrow outputs, on the mirrored problem.
Status CheckImages(const KernelDesc& kernel, const ConvProblem& problem);

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_PLAN_H_
