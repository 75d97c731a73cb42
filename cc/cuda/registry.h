// The registry: every kernel instance of the CUDA platform, in one explicit list.
#ifndef JAXCONV_CUDA_REGISTRY_H_
#define JAXCONV_CUDA_REGISTRY_H_

#include <string>
#include <string_view>
#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv {

// Selection prefers earlier instances among those of equal cost.
const std::vector<KernelDesc>& Kernels();

// The names of all instances and families.
std::vector<std::string> KernelNames();
std::vector<std::string> FamilyNames();

// Null if no instance has this name.
const KernelDesc* FindKernel(std::string_view name);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_REGISTRY_H_
