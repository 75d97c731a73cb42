#include "cuda/common/epilogue_cost.h"

#include "cuda/common/predicted_time.h"

namespace jaxconv {

double ActivationFactor(Activation activation) {
  switch (activation) {
    case Activation::kNone:
    case Activation::kRelu:
    case Activation::kRelu6:
      return 0;
    case Activation::kGelu:
      return 2;
    default:
      return 1;
  }
}

double EpilogueCycles(const EpilogueCost& cost, const Epilogue& epilogue) {
  if (IsSwish(epilogue.activation) && !epilogue.pre && !epilogue.residual && cost.swish > 0)
    return cost.swish;
  const double factor = ActivationFactor(epilogue.activation);
  const double terms = factor == 0 && !epilogue.pre ? cost.clamps : cost.terms;
  return terms + (epilogue.residual ? cost.residual : 0) + factor * cost.activation;
}

void AddEpilogue(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu, Plan* plan) {
  const Epilogue& epilogue = problem.epilogue;
  if (epilogue.statistics) return;  // the plan has counted them
  const double outputs_of_sm_us =
      static_cast<double>(problem.y_elements()) / gpu.sm_count / gpu.cycles_per_us();
  const EpilogueCost& cost = kernel.epilogue_cost;
  if (!cost.in_plan) {
    TimeTerms& terms = plan->terms;
    double& products = terms.tensor_cores > terms.loads ? terms.tensor_cores : terms.loads;
    (cost.of_products ? products : terms.stores) +=
        EpilogueCycles(cost, epilogue) * outputs_of_sm_us;
  }
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
}

}  // namespace jaxconv
