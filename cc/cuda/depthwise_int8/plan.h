// depthwise_int8: one filter for each channel, 8-bit operands, on every GPU since sm_80. See
// direct.cuh for the kernel. Plain C++.
#ifndef JAXCONV_CUDA_DEPTHWISE_INT8_PLAN_H_
#define JAXCONV_CUDA_DEPTHWISE_INT8_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::depthwise_int8 {

// The instances of kernels.def, in its order.
std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::depthwise_int8

#endif  // JAXCONV_CUDA_DEPTHWISE_INT8_PLAN_H_
