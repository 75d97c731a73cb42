// igemm_simt: implicit GEMM on the FP32 FMA units. See two_stage.cuh for the kernel. Plain C++.
#ifndef JAXCONV_CUDA_IGEMM_SIMT_PLAN_H_
#define JAXCONV_CUDA_IGEMM_SIMT_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::igemm_simt {

// The instances of kernels.def, in its order.
std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::igemm_simt

#endif  // JAXCONV_CUDA_IGEMM_SIMT_PLAN_H_
