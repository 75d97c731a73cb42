// imma_wgmma: implicit GEMM of 8-bit operands by wgmma; planning of its instances.
#ifndef JAXCONV_CUDA_IMMA_WGMMA_PLAN_H_
#define JAXCONV_CUDA_IMMA_WGMMA_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::imma_wgmma {

std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::imma_wgmma

#endif  // JAXCONV_CUDA_IMMA_WGMMA_PLAN_H_
