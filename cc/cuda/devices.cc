#include "cuda/devices.h"

#include "core/conv_problem.h"
#include "cuda/common/predicted_time.h"
#include "cuda/common/query_gpu.h"
#include "cuda/passes.h"
#include "cuda/select.h"

namespace jaxconv {
namespace {

// Enough for the convolutions of several large networks; a plan takes one to two KB.
constexpr size_t kPlans = 4096;

}  // namespace

Status SelectForTarget(std::string_view key, std::string_view algorithm, std::string_view target,
                       Selection* selection) {
  ConvProblem problem;
  JAXCONV_RETURN_IF_ERROR(ConvProblem::Parse(key, &problem));
  Gpu gpu;
  JAXCONV_RETURN_IF_ERROR(GpuOfTarget(target, &gpu));
  return Select(problem, gpu, algorithm, selection);
}

Status PlanPassForTarget(std::string_view key, std::string_view target, PassPlan* plan) {
  Gpu gpu;
  JAXCONV_RETURN_IF_ERROR(GpuOfTarget(target, &gpu));
  return PlanPass(key, gpu, plan);
}

Status FindPlan(const PlanKey& key, std::shared_ptr<const PlannedCall>* call) {
  static PlanCache& plans = *new PlanCache(kPlans, GpuOfDevice);
  return plans.Find(key, call);
}

std::vector<std::pair<std::string, std::string>> BuildInfo() {
  Gpu gpu;
  const Status status = GpuOfDevice(0, &gpu);
  return {{"cuda", JAXCONV_CUDA_VERSION},
          {"architectures", JAXCONV_CUDA_ARCHITECTURES},
          {"device", status.ok() ? gpu.name + " (sm_" + std::to_string(gpu.compute_capability()) +
                                       (gpu.measured ? ", rates measured)" : ", rates assumed)")
                                 : "none: " + status.message()},
          {"calibration", status.ok() ? CalibrationOf(gpu) : "none"}};
}

}  // namespace jaxconv
