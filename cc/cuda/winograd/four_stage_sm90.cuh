// Winograd in four stages (four_stage.cuh) whose products run on wgmma (batched_gemm_sm90.cuh).
//
// Refuses: what four_stage.cuh refuses.
#ifndef JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_SM90_CUH_

#include "cuda/common/kernel.h"
#include "cuda/winograd/batched_gemm_sm90.cuh"
#include "cuda/winograd/four_stage.cuh"

namespace jaxconv::winograd {

template <Op kOp, DType kType, int m>
struct FourStageWgmma {
  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return RunFourStage(plan, operands, stream, [&](const Products& products) {
      return LaunchWgmmaGemm<Tag>(plan.kernel->name, products, stream);
    });
  }
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_SM90_CUH_
