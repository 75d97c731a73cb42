// winograd_int8: 3x3 convolutions of int8 operands by minimal filtering, V and U in 8 bits. Plain
// C++. Not exact, so chosen on request only.
#ifndef JAXCONV_CUDA_WINOGRAD_INT8_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_INT8_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::winograd_int8 {

std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::winograd_int8

#endif  // JAXCONV_CUDA_WINOGRAD_INT8_PLAN_H_
