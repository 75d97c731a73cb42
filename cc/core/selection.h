// The results of selection on every platform, and the interface by which CPU kernels run tasks.
#ifndef JAXCONV_CORE_SELECTION_H_
#define JAXCONV_CORE_SELECTION_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace jaxconv {

struct Refusal {
  std::string kernel;  // instance or family name
  std::string reason;
};

// The choice for one custom call, fixed at lowering. It includes `slices` (split-K slices on a GPU,
// tasks on a CPU), so that the order of every sum, and hence every bit of the result, is fixed
// before execution.
struct Selection {
  std::string instance;  // empty: XLA computes the problem; `refusals` says why
  int64_t workspace_bytes = 0;
  int64_t slices = 1;
  // Predicted times, 0 if unknown: of the fastest kernel that accepts the problem, chosen or not,
  // and of XLA's own convolution.
  double microseconds = 0;
  double xla_microseconds = 0;
  std::vector<Refusal> refusals;
};

// The plan of a pass (cuda/common/pass.h).
struct PassPlan {
  std::string kernel;  // empty: no kernel accepts it; `reason` says why
  std::string reason;
  int64_t parts = 1;       // parts of a segment's rows in a sum that the program completes
  int64_t block_rows = 0;  // rows that a part processes at a time, if its counts matter
  double microseconds = 0;
};

// Calls body(0) .. body(tasks - 1), possibly concurrently, and returns when all have returned.
using ParallelFor = std::function<void(int64_t tasks, const std::function<void(int64_t)>& body)>;

}  // namespace jaxconv

#endif  // JAXCONV_CORE_SELECTION_H_
