// Selection of a kernel on the CPU, and the plans of selections. The kernels are oneDNN's
// primitives, plus kernels for problems that oneDNN computes slowly: weight gradients that are
// depthwise (depthwise_wgrad.h) or matrix products (gemm_wgrad.h), and forward convolutions with
// few output channels (few_outputs.h), few output pixels (few_pixels.h) or small groups
// (small_groups.h, also data gradients).
#ifndef JAXCONV_CPU_SELECT_H_
#define JAXCONV_CPU_SELECT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/conv_problem.h"
#include "core/selection.h"
#include "core/status.h"

namespace jaxconv::cpu {

struct Plan;  // plan.h

// Chooses an instance for a valid problem and divides it into at most `threads` tasks (slices).
// `algorithm` is "auto", "native" (the same, but never XLA), a family (FamilyNames lists them) or
// an instance name; anything else is an InvalidArgument. If no kernel accepts the problem, the
// instance is empty and the refusals say why.
Status Select(const ConvProblem& problem, std::string_view algorithm, int64_t threads,
              Selection* selection);

// The same for a problem key, with a task for every core. The target is always this CPU.
Status SelectForKey(std::string_view key, std::string_view algorithm, std::string_view target,
                    Selection* selection);

// The plan of a call with these attributes; `key` is the problem's. Plans of the most recently used
// calls are kept.
Status FindPlan(std::string_view key, std::string_view instance, int64_t slices,
                std::shared_ptr<const Plan>* plan);
const ConvProblem& ProblemOf(const Plan& plan);

void SetPlanCapacity(size_t capacity);

// Sets the number of problems after which new ones are computed without oneDNN's brgemm kernels,
// which it never frees; restarts the count.
void SetMaxBrgemmProblems(size_t count);
size_t PlanCount();

std::vector<std::string> KernelNames();
std::vector<std::string> FamilyNames();

// oneDNN's version and the instruction set it uses here: "3.2.0 (avx512_core_bf16)".
std::string LibraryVersion();

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_SELECT_H_
