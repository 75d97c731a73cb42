// Every kernel of a pass (common/pass.h), and the plan of one for a key.
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

// Of each its name, family and pass.
std::vector<std::array<std::string, 3>> PassNames();

// The plan's reason says why no kernel takes it. InvalidArgument: a key that cannot be read.
Status PlanPass(std::string_view key, const Gpu& gpu, PassPlan* plan);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PASSES_H_
