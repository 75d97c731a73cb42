// Selection and plans for the devices of this process or, by name, for others: `target` is an
// architecture such as "sm_90a", a product such as "h200", or empty for this process's devices.
// Separate from selection itself, which queries no driver.
#ifndef JAXCONV_CUDA_DEVICES_H_
#define JAXCONV_CUDA_DEVICES_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/selection.h"
#include "core/status.h"
#include "cuda/plan_cache.h"

namespace jaxconv {

// Selects the kernel of a problem, given by its key (select.h).
Status SelectForTarget(std::string_view key, std::string_view algorithm, std::string_view target,
                       Selection* selection);
// Plans a pass, given by its key (passes.h).
Status PlanPassForTarget(std::string_view key, std::string_view target, PassPlan* plan);

// Finds or makes the plan of a call on one of this process's devices.
Status FindPlan(const PlanKey& key, std::shared_ptr<const PlannedCall>* call);

// The build options of this library, and the device for which it predicts.
std::vector<std::pair<std::string, std::string>> BuildInfo();

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_DEVICES_H_
