// igemm_wmma: implicit GEMM on the tensor cores of every GPU since sm_80. See multistage.cuh for
// the kernel. Plain C++.
#ifndef JAXCONV_CUDA_IGEMM_WMMA_PLAN_H_
#define JAXCONV_CUDA_IGEMM_WMMA_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::igemm_wmma {

// The instances of kernels.def, in its order.
std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::igemm_wmma

#endif  // JAXCONV_CUDA_IGEMM_WMMA_PLAN_H_
