// igemm on wgmma with 8-bit operands: which problems the instances take, and how.
#ifndef JAXCONV_CUDA_IMMA_WGMMA_PLAN_H_
#define JAXCONV_CUDA_IMMA_WGMMA_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::imma_wgmma {

std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::imma_wgmma

#endif  // JAXCONV_CUDA_IMMA_WGMMA_PLAN_H_
