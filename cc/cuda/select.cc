#include "cuda/select.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cuda/common/folded_columns.h"
#include "cuda/common/xla_cost.h"
#include "cuda/registry.h"

namespace jaxconv {
namespace {

// XLA's autotuner picks kernels of different speed from one process to the next (29.0 and 22.2 us
// for the wgrad of one layer). XLA therefore gets a layer only if its predicted time is below this
// share of the kernel's.
constexpr double kXlaShare = 0.97;

Status UnknownAlgorithm(std::string_view algorithm) {
  std::vector<std::string> names;
  for (const KernelDesc& kernel : Kernels()) {
    for (const std::string name : {kernel.family, kernel.alias}) {
      if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end()) {
        names.push_back(name);
      }
    }
  }
  std::string message = "algorithm: expected auto, native, an instance name or a family (";
  for (size_t i = 0; i < names.size(); ++i) message += (i > 0 ? ", " : "") + names[i];
  return Status::InvalidArgument(message + "), got '" + std::string(algorithm) + "'");
}

// An activation's time relative to silu's in 16-bit kernels, measured on an H200; 0 for a clamp.
double ActivationFactor(Activation activation) {
  switch (activation) {
    case Activation::kNone:
    case Activation::kRelu:
    case Activation::kRelu6:
      return 0;
    case Activation::kLeakyRelu:
    case Activation::kHardSwish:
      return 0.4;
    case Activation::kGeluTanh:
      return 1.35;
    case Activation::kTanh:
      return 1.45;
    case Activation::kGelu:
      return 2.1;
    default:
      return 1;
  }
}

// The additional time of a fused split-K instance, relative to the plain instance: 3x3 on 1280
// channels, 8 images, H200: 27.5 -> 31.0 us on 8x8, 88.0 -> 98.4 on 16x16.
constexpr double kFusedSplitShare = 0.12;

double EpilogueMicroseconds(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                            const Plan& plan) {
  const Epilogue& epilogue = problem.epilogue;
  if (epilogue.statistics) return 0;  // the plan has counted them
  const EpilogueCost& cost = kernel.epilogue_cost;
  const double factor = ActivationFactor(epilogue.activation);
  double nanoseconds = factor == 0 && !epilogue.pre ? cost.clamps : cost.terms;
  if (epilogue.residual) nanoseconds += cost.residual;
  nanoseconds += factor * cost.activation;
  const bool swish =
      epilogue.activation == Activation::kSilu || epilogue.activation == Activation::kHardSwish;
  if (swish && !epilogue.pre && !epilogue.residual && cost.swish > 0) nanoseconds = cost.swish;
  const double of_outputs = static_cast<double>(problem.y_elements()) / gpu.sm_count * nanoseconds;
  // A cluster's slices need no workspace.
  const bool split = plan.slices > 1 && plan.workspace_bytes > 0;
  return of_outputs / 1000 + (split ? kFusedSplitShare * plan.microseconds : 0);
}

// Whether the kernel runs on the GPU and accepts the problem.
Status Try(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu, Plan* plan) {
  if (gpu.compute_capability() < kernel.min_cc || gpu.compute_capability() > kernel.max_cc) {
    return Status::Unimplemented("needs compute capability " + std::to_string(kernel.min_cc) +
                                 (kernel.max_cc == kernel.min_cc ? " exactly" : "") +
                                 ", the device has " + std::to_string(gpu.compute_capability()));
  }
  return MakePlan(kernel, problem, gpu, 0, plan);
}

std::string Microseconds(double microseconds) {
  const auto tenths = std::llround(microseconds * 10);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " us";
}

}  // namespace

Status Select(const ConvProblem& problem, const Gpu& gpu, std::string_view algorithm,
              Selection* selection) {
  *selection = Selection();
  const bool any = algorithm == "auto" || algorithm == "native";
  bool known = any;
  // 8-bit instances select the epilogue's terms at run time.
  const bool fused = !problem.epilogue.Plain() && problem.w_dtype != DType::kS8;
  for (const KernelDesc& kernel : Kernels()) {
    const bool named = kernel.name == algorithm;
    const bool several =
        kernel.family == algorithm || (!algorithm.empty() && kernel.alias == algorithm);
    if (any ? kernel.on_request : !named && !several) continue;
    known = true;
    if (kernel.three_tf32 && problem.precision == Precision::kDefault && !named) continue;
    // A kernel of another operation or type, or one whose epilogue does not match, is listed among
    // the refusals only if the caller named it.
    const bool other =
        kernel.op != problem.op || kernel.dtype != problem.lhs_dtype() || kernel.fused != fused;
    if (other && !named) continue;
    Plan plan;
    if (Status status = Try(kernel, problem, gpu, &plan); !status.ok()) {
      selection->refusals.push_back({kernel.name, status.message()});
      continue;
    }
    if (fused) plan.microseconds += EpilogueMicroseconds(kernel, problem, gpu, plan);
    // Strictly faster: among equal instances the first wins, on every platform's standard library.
    if (selection->instance.empty() || plan.microseconds < selection->microseconds) {
      selection->instance = kernel.name;
      selection->slices = plan.slices;
      selection->workspace_bytes = plan.workspace_bytes;
      selection->microseconds = plan.microseconds;
    }
  }
  if (!known) return UnknownAlgorithm(algorithm);
  if (selection->instance.empty() && selection->refusals.empty()) {
    selection->refusals.push_back({any ? "cuda" : std::string(algorithm),
                                   std::string("has no kernel for ") + Name(problem.op) + " of " +
                                       Name(problem.lhs_dtype()) +
                                       (fused ? " with an epilogue" : "")});
  }
  if (selection->instance.empty()) return {};
  selection->xla_microseconds = PredictXlaMicroseconds(problem, gpu);
  if (algorithm == "auto" && selection->xla_microseconds > 0 &&
      selection->xla_microseconds < kXlaShare * selection->microseconds) {
    selection->refusals = {{"xla", "predicted " + Microseconds(selection->xla_microseconds) + ", " +
                                       selection->instance + " " +
                                       Microseconds(selection->microseconds) +
                                       "; algorithm=\"native\" takes the kernel"}};
    selection->instance.clear();
    selection->slices = 1;
    selection->workspace_bytes = 0;
  }
  return {};
}

}  // namespace jaxconv
