// The model of a present GPU.
#ifndef JAXCONV_CUDA_COMMON_QUERY_GPU_H_
#define JAXCONV_CUDA_COMMON_QUERY_GPU_H_

#include <string_view>

#include "core/status.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

// `ordinal`: the CUDA runtime's number, after CUDA_VISIBLE_DEVICES. Without a driver or a GPU it
// only returns an error.
Status QueryGpu(int ordinal, Gpu* gpu);

// The same; queries the driver once.
Status GpuOfDevice(int ordinal, Gpu* gpu);

// The model of a product or an architecture ("h200", "sm_90a"). Empty: this process's first device
// (JAX requires all devices to be of one kind) or, without a device, the oldest GPU that runs the
// portable kernels.
Status GpuOfTarget(std::string_view target, Gpu* gpu);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_QUERY_GPU_H_
