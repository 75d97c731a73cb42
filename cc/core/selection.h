// What selection returns on every platform, and the one thing kernels ask of their host: to run
// tasks.
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

// The choice for one custom call, fixed when it is lowered. `slices` (split-K slices on a GPU,
// tasks on a CPU) is part of it, so that the order of every sum, and with it every bit of the
// result, is settled before anything runs.
struct Selection {
  std::string instance;  // empty: the problem is left to XLA, and `refusals` says why
  int64_t workspace_bytes = 0;
  int64_t slices = 1;
  // Predicted times, 0 where unknown: of the fastest kernel that takes the problem, chosen or not,
  // and of XLA's own convolution.
  double microseconds = 0;
  double xla_microseconds = 0;
  std::vector<Refusal> refusals;
};

// The plan of a call that convolves nothing (cuda/common/pass.h).
struct PassPlan {
  std::string kernel;  // empty: no kernel takes it, and `reason` says why
  std::string reason;
  int64_t parts = 1;       // of the rows of a segment, for a sum that the program adds up
  int64_t block_rows = 0;  // the rows that a part takes at a time, where its counts matter
  double microseconds = 0;
};

// Calls body(0) .. body(tasks - 1), possibly at the same time, and returns when all have returned.
using ParallelFor = std::function<void(int64_t tasks, const std::function<void(int64_t)>& body)>;

}  // namespace jaxconv

#endif  // JAXCONV_CORE_SELECTION_H_
