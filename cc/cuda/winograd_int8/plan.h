// winograd_int8: 3x3 convolutions of int8 operands by minimal filtering, with V and U in 8 bits.
// Not exact, so it runs on request only. Plain C++.
#ifndef JAXCONV_CUDA_WINOGRAD_INT8_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_INT8_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::winograd_int8 {

std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::winograd_int8

#endif  // JAXCONV_CUDA_WINOGRAD_INT8_PLAN_H_
