#include "cuda/passes.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "cuda/elementwise/plan.h"
#include "cuda/normalisation/plan.h"
#include "cuda/pooling/plan.h"

namespace jaxconv {
namespace {

struct PassFamily {
  const std::vector<PassKernel>& (*kernels)();
  Status (*plan)(const PassKey& key, const Gpu& gpu, PassPlan* plan);
};
constexpr PassFamily kFamilies[] = {{normalisation::Kernels, normalisation::PlanOf},
                                    {pooling::Kernels, pooling::PlanOf},
                                    {elementwise::Kernels, elementwise::PlanOf}};

}  // namespace

const std::vector<PassKernel>& PassKernels() {
  static const std::vector<PassKernel> kernels = [] {
    std::vector<PassKernel> all;
    for (const PassFamily& family : kFamilies) {
      all.insert(all.end(), family.kernels().begin(), family.kernels().end());
    }
    return all;
  }();
  return kernels;
}

std::vector<std::array<std::string, 3>> PassNames() {
  std::vector<std::array<std::string, 3>> names;
  for (const PassKernel& each : PassKernels()) {
    names.push_back({each.name, each.family, each.pass});
  }
  return names;
}

Status PlanPass(std::string_view key, const Gpu& gpu, PassPlan* plan) {
  PassKey parsed;
  Status status = PassKey::Parse(key, &parsed);
  if (status.ok()) {
    const auto takes = [&](const PassFamily& family) {
      const std::vector<PassKernel>& kernels = family.kernels();
      return std::any_of(kernels.begin(), kernels.end(),
                         [&](const PassKernel& each) { return parsed.pass() == each.pass; });
    };
    const auto* family = std::find_if(std::begin(kFamilies), std::end(kFamilies), takes);
    status = family == std::end(kFamilies)
                 ? Status::InvalidArgument("'" + parsed.pass() + "' is no pass")
                 : family->plan(parsed, gpu, plan);
  }
  if (status.code() != StatusCode::kUnimplemented) return status;
  *plan = {};
  plan->reason = status.message();
  return {};
}

}  // namespace jaxconv
