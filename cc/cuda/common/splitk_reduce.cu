#include "cuda/common/splitk_reduce.cuh"

namespace jaxconv {

Status LaunchSplitkReduce(const float* partial, int64_t elements, int64_t slices, void* out,
                          DType out_dtype, void* stream) {
  return LaunchSplitkReduceWith<PlainEpilogue>(partial, elements, slices, 1, EpilogueParams(), out,
                                               out_dtype, stream);
}

Status LaunchFusedSplitkReduce(const float* partial, int64_t elements, int64_t slices,
                               int64_t channels, const EpilogueParams& epilogue, void* out,
                               DType out_dtype, void* stream) {
  return LaunchSplitkReduceWith<FusedEpilogue>(partial, elements, slices, channels, epilogue, out,
                                               out_dtype, stream);
}

}  // namespace jaxconv
