#include "cuda/common/splitk_reduce.cuh"

namespace jaxconv {

Status LaunchSplitkReduce(const float* partial, int64_t elements, int64_t slices, void* out,
                          DType out_dtype, void* stream) {
  return LaunchSplitkReduceWith<PlainEpilogue>(partial, elements, slices, 1, EpilogueParams(), out,
                                               out_dtype, stream);
}

}  // namespace jaxconv
