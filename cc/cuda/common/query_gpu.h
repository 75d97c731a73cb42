// The model of a GPU that is present.
#ifndef JAXCONV_CUDA_COMMON_QUERY_GPU_H_
#define JAXCONV_CUDA_COMMON_QUERY_GPU_H_

#include <string_view>

#include "core/status.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

// `ordinal` counts as the CUDA runtime does, CUDA_VISIBLE_DEVICES applied. Without a driver or a
// GPU: an error, nothing else.
Status QueryGpu(int ordinal, Gpu* gpu);

// The same, asked of the driver once.
Status GpuOfDevice(int ordinal, Gpu* gpu);

// That of a product or an architecture ("h200", "sm_90a"); empty: of this process's first device
// (JAX wants all of one kind), or, without one, of the oldest that the portable kernels run on.
Status GpuOfTarget(std::string_view target, Gpu* gpu);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_QUERY_GPU_H_
