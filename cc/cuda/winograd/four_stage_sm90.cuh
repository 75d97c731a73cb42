// Winograd in four stages (four_stage.cuh) with products by wgmma in persistent clusters
// (batched_gemm_pingpong_sm90.cuh); kHalfProducts: M is float16.
//
// Refuses: what four_stage.cuh refuses, and output channels of a group that are not multiples of 16.
#ifndef JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_SM90_CUH_

#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/common/kernel.h"
#include "cuda/winograd/batched_gemm_pingpong_sm90.cuh"
#include "cuda/winograd/four_stage.cuh"

namespace jaxconv::winograd {

template <Op kOp, DType kType, int m, bool kHalfProducts = false, int kTileCols = 128>
struct FourStagePingpong {
  using Product = std::conditional_t<kHalfProducts, __half, float>;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const int32_t ctas = plan.As<LaunchParams>().ctas;
    return RunFourStage</*kOverlaps=*/true>(plan, operands, stream, [&](const Products& products) {
      return LaunchPingpongGemm<Tag, Product, kTileCols>(plan.kernel->name, products, ctas, stream);
    });
  }
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_SM90_CUH_
