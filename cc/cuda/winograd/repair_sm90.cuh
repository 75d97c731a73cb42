// Repeats the transform of operands whose constant scale (ScaleSource::assumed) does not suit them,
// with their own power of two: bfloat16 activations and filters of unusual magnitudes. In most
// calls a warp reads the maxima, 2 KB for each operand, and its CTA ends.
//
// A few CTAs an SM process the blocks of both transforms round-robin, with the transforms' own
// code. V and U then equal those after an amax pass.
#ifndef JAXCONV_CUDA_WINOGRAD_REPAIR_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_REPAIR_SM90_CUH_

#include "cuda/common/ring_sm90.cuh"
#include "cuda/winograd/filter_transform.cuh"
#include "cuda/winograd/input_transform.cuh"

namespace jaxconv::winograd {

struct RepairParams {
  InputTransformParams input;
  FilterTransformParams filter;
  // The CTAs of the transforms; 0 for a prepared filter.
  int32_t input_blocks = 0, filter_blocks = 0;
};

inline constexpr int kRepairCtas = 2;  // of an SM
static_assert(kInputThreads == kFilterThreads);

template <int m, typename T, bool kTransposed>
__global__ void __launch_bounds__(kInputThreads, kRepairCtas)
    RepairKernel(const __grid_constant__ RepairParams params) {
  __shared__ uint32_t staging[kTransposed ? FilterStaging<sizeof(T)>::kWords : 1];
  WaitForInputs();
  const float filter_scale = WarpScale(params.filter.scale);
  if (AppliedScale(params.filter.scale, filter_scale) != params.filter.scale.assumed) {
    for (int32_t block = blockIdx.x; block < params.filter_blocks; block += gridDim.x) {
      TransformFilterBlock<m, false, T, kTransposed>(params.filter, block, staging, nullptr,
                                                     filter_scale);
      __syncthreads();  // the staging is free again
    }
  }
  const float input_scale = WarpScale(params.input.scale);
  if (AppliedScale(params.input.scale, input_scale) != params.input.scale.assumed) {
    for (int32_t block = blockIdx.x; block < params.input_blocks; block += gridDim.x) {
      TransformInput<m, T>(params.input, block, nullptr, input_scale);
    }
  }
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_REPAIR_SM90_CUH_
