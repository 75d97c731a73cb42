// The execution of a plan, stage by stage; a stage without work is skipped.
//
//   1 convert   16-bit operands that oneDNN has no kernel for become float32 copies
//   2 reverse   the taps of the filter, for a transposed convolution
//   3 pack      the filter goes into the layout that the primitives read, and its sums into the
//               offsets of images whose signs are flipped
//   4 convolve  every task runs its regions, each followed by its epilogue; some 8-bit images are
//               copied first, and offsets subtracted from their sums
//   5 reduce    weight gradients: the tasks' partial sums are added, in the order of the tasks
//   6 finish    a float32 result is rounded to the output's type, reversed taps are turned back,
//               the regions' statistics are merged in their order
//
// No thread is started here: tasks run on the caller's threads, with single-threaded primitives.
// Concurrent calls share these threads instead of starting OpenMP teams, and the order of every
// sum, hence every bit of the result, depends only on the plan.
#ifndef JAXCONV_CPU_EXECUTION_H_
#define JAXCONV_CPU_EXECUTION_H_

#include <cstdint>

#include "core/selection.h"
#include "core/status.h"

namespace jaxconv::cpu {

struct Plan;           // plan.h
struct EpilogueTerms;  // epilogue_terms.h

// `lhs` and `rhs` are the operation's operands, (x, w), (dy, w) or (x, dy). `out` and `workspace`
// are overwritten; the workspace has the selected size, at any alignment. A smaller workspace, as
// in a program exported by another version, is not used: memory is allocated instead. `terms` are
// those of the problem's epilogue. Thread-safe.
Status Execute(const Plan& plan, const void* lhs, const void* rhs, const EpilogueTerms& terms,
               void* out, void* workspace, int64_t workspace_bytes,
               const ParallelFor& parallel_for);
// For a plain epilogue.
Status Execute(const Plan& plan, const void* lhs, const void* rhs, void* out, void* workspace,
               int64_t workspace_bytes, const ParallelFor& parallel_for);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_EXECUTION_H_
