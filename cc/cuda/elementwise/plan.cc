#include "cuda/elementwise/plan.h"

#include <algorithm>
#include <string>

#include "cuda/elementwise/elementwise.h"

namespace jaxconv {
namespace elementwise {

const std::vector<PassKernel>& Kernels() {
  static const std::vector<PassKernel> kernels = {
#define JAXCONV_PASS_FAMILY "elementwise"
#define PASS(pass, types, variant, form) JAXCONV_PASS_KERNELS(pass, types, variant, false, form)
#include "cuda/elementwise/kernels.def"
#undef PASS
  };
  return kernels;
}

Status PlanOf(const PassKey& key, const Gpu& gpu, PassPlan* plan) {
  const int64_t results = key.Number('n', 0), bytes = key.Number('b', 0);
  if (results < 1 || results > kElementwiseResults) {
    return Status::Unimplemented("expected 1 to " + std::to_string(kElementwiseResults) +
                                 " results, got " + std::to_string(results));
  }
  PassCost cost;
  cost.bytes = static_cast<double>(bytes);
  cost.ctas = std::max(results, bytes / (2 * int64_t{sizeof(float)} * kElementsOfCta));
  cost.ctas_of_sm = 8;
  plan->kernel = Kernels()[0].name;
  plan->microseconds = PassMicroseconds(cost, gpu);
  return {};
}

}  // namespace elementwise
}  // namespace jaxconv
