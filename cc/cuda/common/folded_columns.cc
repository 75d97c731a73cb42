#include "cuda/common/folded_columns.h"

#include <utility>

#include "cuda/common/epilogue_cost.h"

namespace jaxconv {
namespace {

// Whether the windows along an axis follow each other without padding, gaps or a remainder.
bool Patches(const ConvProblem& problem, int axis) {
  return problem.stride[axis] == problem.filter[axis] && problem.dilation[axis] == 1 &&
         problem.lhs_dilation[axis] == 1 && problem.pad_lo[axis] == 0 &&
         problem.pad_hi[axis] == 0 && problem.in[axis] == problem.out[axis] * problem.filter[axis];
}

Status PlanOf(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu, int64_t slices,
              Plan* plan) {
  JAXCONV_RETURN_IF_ERROR(kernel.plan(kernel, problem, gpu, slices, plan));
  if (kernel.fused) AddEpilogue(kernel, problem, gpu, plan);
  return {};
}

}  // namespace

bool FoldColumns(const ConvProblem& problem, ConvProblem* folded) {
  constexpr int kColumns = 2;
  const int64_t columns = problem.filter[kColumns];
  // With groups, a group's channels are not adjacent to the next pixel's; other layouts have
  // another order. An epilogue applies to y, which folding does not change.
  if (columns == 1 || !Patches(problem, kColumns) || problem.groups != 1 ||
      !problem.RequireRsckOrKrsc().ok() || !problem.RequireChannelsLast().ok()) {
    return false;
  }
  *folded = problem;
  folded->c *= columns;
  folded->in[kColumns] = problem.out[kColumns];
  folded->filter[kColumns] = folded->stride[kColumns] = 1;
  return true;
}

bool FoldRows(const ConvProblem& problem, ConvProblem* folded) {
  int axis = 0;
  while (axis < 2 && problem.filter[axis] == 1 && Patches(problem, axis)) ++axis;
  // Scales that depend on the image apply to more than the rows of one window.
  if (axis == 2 || problem.out[axis] == 1 || !Patches(problem, axis) ||
      !problem.RequireRsckOrKrsc().ok() || !problem.RequireChannelsLast().ok() ||
      problem.epilogue.scale == ScaleKind::kImage) {
    return false;
  }
  *folded = problem;
  for (int a = 0; a <= axis; ++a) {
    folded->n *= problem.out[a];
    folded->in[a] = folded->filter[a];
    folded->out[a] = folded->stride[a] = 1;
  }
  return true;
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  ConvProblem forms[3] = {problem};
  int count = 1;
  if (FoldColumns(problem, &forms[1])) count = FoldRows(forms[1], &forms[2]) ? 3 : 2;
  int best = 0;
  Plan of_best;
  for (int i = count - 1; i >= 0; --i) {
    Plan of_form;
    // If only this problem remains, or all others are refused, the refusal names the caller's
    // problem.
    if (i == 0 && of_best.kernel == nullptr) return PlanOf(kernel, problem, gpu, slices, plan);
    if (!PlanOf(kernel, forms[i], gpu, 0, &of_form).ok()) continue;
    if (of_best.kernel != nullptr && of_form.microseconds > of_best.microseconds) continue;
    of_best = std::move(of_form);
    best = i;
  }
  if (slices > 0) return PlanOf(kernel, forms[best], gpu, slices, plan);
  *plan = std::move(of_best);
  return {};
}

}  // namespace jaxconv
