// Checks and plans of the pooling kernels.
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
// Columns of a window loaded at a time: all for 3x3; wider windows take several batches.
inline constexpr int kPoolColumns = 3;

// CTAs of max_pool on an SM: 80 registers a thread for 16-bit types; fewer CTAs where that spills.
template <int kBytes, bool kSm90>
inline constexpr int kPoolCtas = kBytes == 4 ? 3
                                 : kSm90     ? 6
                                             : 4;

// Unimplemented if the kernels do not accept the windows.
Status CheckPoolWindows(const PoolWindows& windows, bool places);

namespace pooling {

const std::vector<PassKernel>& Kernels();

// The number of consecutive windows of a thread of max_pool on a GPU with sm_count SMs. The results
// do not depend on it.
int64_t WalkOf(const PoolWindows& windows, int64_t sm_count);

// The form of max_pool for this number of windows. If consecutive windows overlap by one or two
// rows and a kernel exists for it, these rows are kept.
PassForm FormOfPool(const PoolWindows& windows, DType dtype, bool affine, bool places,
                    int64_t walk);

// The form of max_pool_gradient, by the number of windows that contain an element.
PassForm FormOfGradient(const PoolWindows& windows, bool two, bool affine);

// Plans max_pool and max_pool_gradient: b examples of c channels, elements i, windows f, o of them
// with strides s and p elements of padding before the first along one to three axes, g gradients,
// and the words "affine", "places", "operands".
Status PlanOf(const PassKey& key, const Gpu& gpu, PassPlan* plan);

}  // namespace pooling
}  // namespace jaxconv

#endif  // JAXCONV_CUDA_POOLING_PLAN_H_
