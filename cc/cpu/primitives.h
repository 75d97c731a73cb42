// The oneDNN primitives of a convolution, one for each different region of its tasks, and their
// filter layouts. All are single-threaded and use a scratchpad from the caller.
#ifndef JAXCONV_CPU_PRIMITIVES_H_
#define JAXCONV_CPU_PRIMITIVES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cpu/geometry.h"
#include "cpu/onednn.h"
#include "cpu/tasks.h"

namespace jaxconv::cpu {

// A single task packs smaller filters: their reorder takes as long as starting another task.
constexpr int64_t kMinPackBytes = 128 << 10;

struct ConvPrimitive {
  dnnl::primitive primitive;
  dnnl::memory::desc x, w, y, scratch;
  std::string implementation;
  bool clear_scratch = false;
  int packed = -1;                 // fprop, dgrad: the PackedFilter it reads; -1: the plain filter
  Reorder unpack, unpack_and_add;  // wgrad: from its own layout into a plain partial sum
};

// A filter layout and the reorders that produce it, one for each part of the plain filter.
struct PackedFilter {
  dnnl::memory::desc desc;
  int64_t offset = 0;  // in the workspace
  int64_t bytes = 0;   // of the filter of one independent convolution
  std::vector<Reorder> parts;
};

struct Primitives {
  std::vector<ConvPrimitive> convolutions;
  std::vector<PackedFilter> packed;
};

// Whether the oneDNN implementation of this name, such as "brgconv:avx512_core", runs brgemm
// kernels.
bool UsesBrgemm(const std::string& implementation);

// Makes primitives for `operand` and `result` types, and sets Region::primitive in all of `tasks`.
// Without `brgemm`, uses other implementations only. Fails if oneDNN has no implementation that is
// fast and correct.
Status MakePrimitives(const Geometry& geometry, DType operand, DType result, bool brgemm,
                      Tasks* tasks, Primitives* primitives);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_PRIMITIVES_H_
