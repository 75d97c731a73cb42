// What the pooling kernels take, and how they cut it.
#ifndef JAXCONV_CUDA_POOLING_PLAN_H_
#define JAXCONV_CUDA_POOLING_PLAN_H_

#include <cstdint>
#include <vector>

#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/pass.h"
#include "cuda/pooling/windows.h"

namespace jaxconv {

inline constexpr int kPoolThreads = 128;  // of a CTA
// Columns of a window that are loaded at a time, of 3x3 all; wider windows take several batches.
inline constexpr int kPoolColumns = 3;

// CTAs of max_pool on an SM: of 16-bit types where a thread has 80 registers, fewer where that spills.
template <int kBytes, bool kSm90>
inline constexpr int kPoolCtas = kBytes == 4 ? 3
                                 : kSm90     ? 6
                                             : 4;

// Unimplemented: what the kernels do not take.
Status CheckPoolWindows(const PoolWindows& windows, bool places);

namespace pooling {

const std::vector<PassKernel>& Kernels();

// How many windows a thread of max_pool walks from one to the next, on a GPU of so many SMs. The
// results do not depend on it.
int64_t WalkOf(const PoolWindows& windows, int64_t sm_count);

// The form of max_pool for such a walk: of windows that overlap along it by one row or two these are
// kept, where there is a kernel.
PassForm FormOfPool(const PoolWindows& windows, DType dtype, bool affine, bool places,
                    int64_t walk);

// The form of max_pool_gradient, by the windows that an element lies in.
PassForm FormOfGradient(const PoolWindows& windows, bool two, bool affine);

// Plans max_pool and max_pool_gradient: b examples of c channels, elements i, windows f, o of them
// with strides s and p elements of padding in front along one to three axes, g gradients, and the
// words "affine", "places", "operands".
Status PlanOf(const PassKey& key, const Gpu& gpu, PassPlan* plan);

}  // namespace pooling
}  // namespace jaxconv

#endif  // JAXCONV_CUDA_POOLING_PLAN_H_
