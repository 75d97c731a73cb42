#include "cuda/common/folded_columns.h"

#include <utility>

namespace jaxconv {

bool FoldColumns(const ConvProblem& problem, ConvProblem* folded) {
  constexpr int kColumns = 2;
  const int64_t columns = problem.filter[kColumns];
  const bool patches = columns > 1 && problem.stride[kColumns] == columns &&
                       problem.dilation[kColumns] == 1 && problem.lhs_dilation[kColumns] == 1 &&
                       problem.pad_lo[kColumns] == 0 && problem.pad_hi[kColumns] == 0 &&
                       problem.in[kColumns] == problem.out[kColumns] * columns;
  // A group's channels are not neighbours of the next pixel's; other layouts have an order of their
  // own. An epilogue belongs to y, which stays as it is.
  if (!patches || problem.groups != 1 || !problem.RequireRsckOrKrsc().ok() ||
      !problem.RequireChannelsLast().ok()) {
    return false;
  }
  *folded = problem;
  folded->c *= columns;
  folded->in[kColumns] = problem.out[kColumns];
  folded->filter[kColumns] = folded->stride[kColumns] = 1;
  return true;
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  ConvProblem folded;
  Plan of_folded;
  if (!FoldColumns(problem, &folded) || !kernel.plan(kernel, folded, gpu, 0, &of_folded).ok()) {
    return kernel.plan(kernel, problem, gpu, slices, plan);
  }
  Plan unfolded;
  const Status status = kernel.plan(kernel, problem, gpu, 0, &unfolded);
  const bool fold = !status.ok() || of_folded.microseconds < unfolded.microseconds;
  if (slices > 0) return kernel.plan(kernel, fold ? folded : problem, gpu, slices, plan);
  *plan = std::move(fold ? of_folded : unfolded);
  return {};
}

}  // namespace jaxconv
