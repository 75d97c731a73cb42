// The sum of split-K slices.
#ifndef JAXCONV_CUDA_COMMON_SPLITK_REDUCE_H_
#define JAXCONV_CUDA_COMMON_SPLITK_REDUCE_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/epilogue_params.h"

namespace jaxconv {

// out[i] = partial[0][i] + partial[1][i] + ..., in that order. `partial` is (slices, elements)
// float.
Status LaunchSplitkReduce(const float* partial, int64_t elements, int64_t slices, void* out,
                          DType out_dtype, void* stream);

// The same, then the fused epilogue over `channels` output channels, the fastest axis.
Status LaunchFusedSplitkReduce(const float* partial, int64_t elements, int64_t slices,
                               int64_t channels, const EpilogueParams& epilogue, void* out,
                               DType out_dtype, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_SPLITK_REDUCE_H_
