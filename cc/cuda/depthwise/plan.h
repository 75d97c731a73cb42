// depthwise: one filter for each channel, on the FMA pipe of every GPU since sm_80. See direct.cuh
// and wgrad.cuh for the kernels. Plain C++.
#ifndef JAXCONV_CUDA_DEPTHWISE_PLAN_H_
#define JAXCONV_CUDA_DEPTHWISE_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::depthwise {

// The instances of kernels.def, in its order.
std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_PLAN_H_
