#include "cuda/registry.h"

#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "cuda/block_diagonal/plan.h"
#include "cuda/common/instances.h"
#include "cuda/common/padded_channels.h"
#include "cuda/depthwise/plan.h"
#include "cuda/depthwise_int8/plan.h"
#include "cuda/few_channels/plan.h"
#include "cuda/igemm_simt/plan.h"
#include "cuda/igemm_wgmma/plan.h"
#include "cuda/igemm_wmma/plan.h"
#include "cuda/imma_few_channels/plan.h"
#include "cuda/imma_nchw32/plan.h"
#include "cuda/imma_wgmma/plan.h"
#include "cuda/winograd/plan.h"
#include "cuda/winograd_int8/plan.h"

namespace jaxconv {
namespace {

std::vector<KernelDesc> FamilyKernels() {
  std::vector<KernelDesc> all;
  for (auto family : {igemm_wgmma::Kernels, igemm_wmma::Kernels, few_channels::Kernels,
                      depthwise::Kernels, block_diagonal::Kernels, igemm_simt::Kernels,
                      imma_wgmma::Kernels, imma_nchw32::Kernels, imma_few_channels::Kernels,
                      depthwise_int8::Kernels, winograd::Kernels, winograd_int8::Kernels}) {
    for (const KernelDesc& kernel : family()) all.push_back(kernel);
  }
  return all;
}

// For each instance of a PADDED line, its name and the name of the padded form.
#define JAXCONV_TWO_NAMES(op, dtype, variant, ending) \
  {JAXCONV_NAME(op, JAXCONV_FAMILY, dtype, variant),  \
   JAXCONV_NAME(op, JAXCONV_FAMILY, dtype, variant) ending},
constexpr std::pair<std::string_view, const char*> kPadded[] = {
#define KERNEL(...)
#define PADDED(ops, types, variant) \
  JAXCONV_FOR_EACH(ops, types, JAXCONV_TWO_NAMES, variant, "_padded")
#define FUSED(...)
#include "cuda/families.def"
};
// For each instance of a FUSED line, its name and the name of the fused form.
constexpr std::pair<std::string_view, const char*> kFused[] = {
#define KERNEL(...)
#define PADDED(...)
#define FUSED(ops, types, variant) \
  JAXCONV_FOR_EACH(ops, types, JAXCONV_TWO_NAMES, variant, "_fused")
#include "cuda/families.def"
};

}  // namespace

const std::vector<KernelDesc>& Kernels() {
  static const std::vector<KernelDesc> kernels = [] {
    static const std::vector<KernelDesc> unpadded = FamilyKernels();
    std::vector<KernelDesc> all = unpadded;
    for (const auto& [name, padded_name] : kPadded) {
      for (const KernelDesc& kernel : unpadded) {
        if (kernel.name == name) all.push_back(PaddedKernel(kernel, padded_name));
      }
    }
    for (const auto& [name, fused_name] : kFused) {
      for (const KernelDesc& kernel : unpadded) {
        if (kernel.name == name) all.push_back(FusedKernel(kernel, fused_name));
      }
    }
    return all;
  }();
  return kernels;
}

std::vector<std::string> KernelNames() {
  std::vector<std::string> names;
  for (const KernelDesc& kernel : Kernels()) names.push_back(kernel.name);
  return names;
}

std::vector<std::string> FamilyNames() {
  std::set<std::string> families;
  for (const KernelDesc& kernel : Kernels()) families.insert(kernel.family);
  return {families.begin(), families.end()};
}

const KernelDesc* FindKernel(std::string_view name) {
  static const std::unordered_map<std::string_view, const KernelDesc*> by_name = [] {
    std::unordered_map<std::string_view, const KernelDesc*> map;
    for (const KernelDesc& kernel : Kernels()) map.emplace(kernel.name, &kernel);
    return map;
  }();
  const auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : found->second;
}

}  // namespace jaxconv
