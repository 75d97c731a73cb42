// (tap, C, K) -> (tap, K, C): the K-major filter for TF32 wgmma, which cannot transpose B.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_FILTER_TRANSPOSE_H_
#define JAXCONV_CUDA_IGEMM_WGMMA_FILTER_TRANSPOSE_H_

#include <cstdint>

#include "core/status.h"

namespace jaxconv::igemm_wgmma {

// `matrices` matrices of `rows` by `columns` float32 elements, each transposed into `out`. Both are
// multiples of 4.
Status LaunchFilterTranspose(const void* filter, int64_t matrices, int64_t rows, int64_t columns,
                             void* out, void* stream);

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_FILTER_TRANSPOSE_H_
