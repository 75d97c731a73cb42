// Convolutions on the CPU: oneDNN's primitives behind the interface of every platform, plus the
// weight gradients that oneDNN computes slowly (depthwise_wgrad.h) and those that are one matrix
// product.
//
// No thread is ever started here. A call is cut into `slices` tasks when it is selected, the caller
// runs them wherever it likes, and each one drives single-threaded primitives: several calls at
// once share the caller's threads instead of oversubscribing the machine with OpenMP teams, and the
// order of every sum, so every bit of the result, depends on the selection alone.
#ifndef JAXCONV_CPU_ONEDNN_CONV_H_
#define JAXCONV_CPU_ONEDNN_CONV_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/conv_problem.h"
#include "core/selection.h"
#include "core/status.h"

namespace jaxconv::cpu {

// Chooses an instance for `problem` and cuts it into at most `threads` tasks. `algorithm` is
// "auto", a family ("onednn", "gemm", "depthwise") or an instance name; anything else is an
// InvalidArgument. Where nothing takes the problem the instance is empty and the refusals say why.
Status Select(const ConvProblem& problem, std::string_view algorithm, int64_t threads,
              Selection* selection);

// Runs a selection. `lhs` and `rhs` are the operation's operands, (x, w), (dy, w) or (x, dy). `out`
// and the first `workspace_bytes` of `workspace` are overwritten. Safe to call from several
// threads.
Status Execute(const ConvProblem& problem, std::string_view instance, int64_t slices,
               const void* lhs, const void* rhs, void* out, void* workspace,
               int64_t workspace_bytes, const ParallelFor& parallel_for);

std::vector<std::string> KernelNames();
std::vector<std::string> FamilyNames();

// oneDNN's version and the instruction set it uses here: "3.2.0 (avx512_core_bf16)".
std::string LibraryVersion();

// Plans (compiled primitives with their task lists) are kept for the most recently used problems.
void SetPlanCapacity(size_t capacity);
size_t PlanCount();

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_ONEDNN_CONV_H_
