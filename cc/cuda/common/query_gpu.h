// The model of a GPU that is present.
#ifndef JAXCONV_CUDA_COMMON_QUERY_GPU_H_
#define JAXCONV_CUDA_COMMON_QUERY_GPU_H_

#include "core/status.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

// `ordinal` counts as the CUDA runtime does, CUDA_VISIBLE_DEVICES applied. Without a driver or a
// GPU: an error, nothing else.
Status QueryGpu(int ordinal, Gpu* gpu);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_QUERY_GPU_H_
