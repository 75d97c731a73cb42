// block_diagonal: groups of 2 to 32 channels on the tensor cores of every GPU since sm_80, 16-bit
// and float32 operands. See gather.cuh and wgrad.cuh for the kernels. Plain C++.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_PLAN_H_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::block_diagonal {

// The instances of kernels.def, in its order.
std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_PLAN_H_
