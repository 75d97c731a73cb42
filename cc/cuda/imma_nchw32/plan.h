// imma_nchw32: implicit GEMM of 8-bit operands on the tensor cores of every GPU since sm_80. See
// multistage.cuh for the kernel. Plain C++.
#ifndef JAXCONV_CUDA_IMMA_NCHW32_PLAN_H_
#define JAXCONV_CUDA_IMMA_NCHW32_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::imma_nchw32 {

// The instances of kernels.def, in its order.
std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::imma_nchw32

#endif  // JAXCONV_CUDA_IMMA_NCHW32_PLAN_H_
