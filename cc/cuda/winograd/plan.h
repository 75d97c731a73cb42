// winograd: 3x3 convolutions of stride 1 by minimal filtering on tensor cores. Plain C++.
//
// Instances of F(2x2, 3x3) have the alias winograd_f2x2, and so on; instances of the
// one-dimensional F(4, 3) along W have winograd_f4x3. All run on request only.
#ifndef JAXCONV_CUDA_WINOGRAD_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_PLAN_H_

#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv::winograd {

// The instances of kernels.def, in its order.
std::vector<KernelDesc> Kernels();

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_PLAN_H_
