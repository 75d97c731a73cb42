// The registry: every kernel instance of the CUDA platform, in one explicit list.
#ifndef JAXCONV_CUDA_REGISTRY_H_
#define JAXCONV_CUDA_REGISTRY_H_

#include <string>
#include <string_view>
#include <vector>

#include "cuda/common/kernel.h"

namespace jaxconv {

// In the order in which selection prefers equals.
const std::vector<KernelDesc>& Kernels();

// Every name, and every family's.
std::vector<std::string> KernelNames();
std::vector<std::string> FamilyNames();

// Null where no instance has that name.
const KernelDesc* FindKernel(std::string_view name);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_REGISTRY_H_
