// All kernels of passes (common/pass.h), and the plan for a key.
#ifndef JAXCONV_CUDA_PASSES_H_
#define JAXCONV_CUDA_PASSES_H_

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/selection.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/pass.h"

namespace jaxconv {

const std::vector<PassKernel>& PassKernels();

// The name, family and pass of each kernel.
std::vector<std::array<std::string, 3>> PassNames();

// If no kernel accepts the key, the plan's reason says why. InvalidArgument: the key cannot be
// parsed.
Status PlanPass(std::string_view key, const Gpu& gpu, PassPlan* plan);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PASSES_H_
