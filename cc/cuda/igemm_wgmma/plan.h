// igemm_wgmma: implicit GEMM by wgmma and TMA, for sm_90a only. kernels.def lists its instances;
// each form has a kernel file. Plain C++.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_PLAN_H_
#define JAXCONV_CUDA_IGEMM_WGMMA_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::igemm_wgmma {

std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_PLAN_H_
