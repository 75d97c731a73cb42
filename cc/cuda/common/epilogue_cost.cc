#include "cuda/common/epilogue_cost.h"

#include "cuda/common/predicted_time.h"

namespace jaxconv {
namespace {

// An activation's instructions relative to silu's, measured on an H200; 0 for a clamp.
double ActivationFactor(Activation activation) {
  switch (activation) {
    case Activation::kNone:
    case Activation::kRelu:
    case Activation::kRelu6:
      return 0;
    case Activation::kLeakyRelu:
    case Activation::kHardSwish:
      return 0.4;
    case Activation::kTanh:
      return 2;
    case Activation::kGelu:
      return 3;
    default:
      return 1;
  }
}

// SM cycles of an output in the second kernel of split-K, which then runs the epilogue. Measured:
// 3x3 on 1280 channels, 8 images, 27.5 -> 31.0 us on 8x8, 88.0 -> 98.4 on 16x16.
constexpr double kReducedCycles = 1.1;

}  // namespace

double EpilogueCycles(const EpilogueCost& cost, const Epilogue& epilogue) {
  const double factor = ActivationFactor(epilogue.activation);
  const double terms = factor == 0 && !epilogue.pre ? cost.clamps : cost.terms;
  return terms + (epilogue.residual ? cost.residual : 0) + factor * cost.activation;
}

void AddEpilogue(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu, Plan* plan) {
  const Epilogue& epilogue = problem.epilogue;
  if (epilogue.statistics) return;  // the plan has counted them
  const double outputs_of_sm_us =
      static_cast<double>(problem.y_elements()) / gpu.sm_count / gpu.cycles_per_us();
  // A cluster's slices need no workspace.
  if (plan->slices > 1 && plan->workspace_bytes > 0) {
    plan->terms.launch += kReducedCycles * outputs_of_sm_us;
  }
  if (!kernel.epilogue_cost.in_plan) {
    plan->terms.stores += EpilogueCycles(kernel.epilogue_cost, epilogue) * outputs_of_sm_us;
  }
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
}

}  // namespace jaxconv
