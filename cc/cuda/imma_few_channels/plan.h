// imma_few_channels: 8-bit convolution of 4 input channels, a network's first layer, on every GPU
// since sm_80. See halo.cuh for the kernel. Plain C++.
#ifndef JAXCONV_CUDA_IMMA_FEW_CHANNELS_PLAN_H_
#define JAXCONV_CUDA_IMMA_FEW_CHANNELS_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::imma_few_channels {

// The instances of kernels.def, in its order.
std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::imma_few_channels

#endif  // JAXCONV_CUDA_IMMA_FEW_CHANNELS_PLAN_H_
