// The fused epilogue (scale, bias, residual, activation) in every form of igemm_wgmma and in the
// split-K reduction behind them. Compiled for sm_90a, runs on Hopper alone.
#include <cstdio>

#include "cc/fused_epilogue.cuh"
#include "cuda/common/query_gpu.h"
#include "cuda/igemm_wgmma/cluster_sm90.cuh"
#include "cuda/igemm_wgmma/cooperative_sm90.cuh"
#include "cuda/igemm_wgmma/filter_row_sm90.cuh"
#include "cuda/igemm_wgmma/pingpong_sm90.cuh"
#include "cuda/igemm_wgmma/plan.h"
#include "cuda/igemm_wgmma/pointwise_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_filter_row_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_mma_sync_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_sm90.cuh"

namespace jaxconv {

#define KERNEL(ops, types, variant, header, form, arguments, ...) \
  JAXCONV_FOR_EACH(ops, types, JAXCONV_FUSED_TAG, variant, igemm_wgmma, form, arguments)
#define PADDED(...)
#define FUSED(...)
#include "cuda/igemm_wgmma/kernels.def"

namespace {

constexpr Op kFprop = Op::kFprop, kDgrad = Op::kDgrad, kWgrad = Op::kWgrad;
constexpr DType kF32 = DType::kF32, kF16 = DType::kF16, kBF16 = DType::kBF16;

void TestGather(const Gpu& gpu) {
  for (int slices : {1, 3}) {
    JAXCONV_CHECK(fprop, igemm_wgmma, bf16, 128x128x64_cooperative, gpu,
                  Batched(Layer(kFprop, kBF16, 2, 13, 11, 72, 136, 3), 2), slices);
    JAXCONV_CHECK(fprop, igemm_wgmma, f16, 256x64x64_swap_ab, gpu,
                  Grouped(Layer(kFprop, kF16, 3, 13, 11, 256, 144, 3), 2), slices);
    JAXCONV_CHECK(fprop, igemm_wgmma, bf16, 192x128x64_pingpong, gpu,
                  Layer(kFprop, kBF16, 3, 13, 11, 72, 136, 3), slices);
    JAXCONV_CHECK(dgrad, igemm_wgmma, bf16, 64x64x64_cluster, gpu,
                  Layer(kDgrad, kBF16, 2, 13, 11, 72, 136, 3), slices);
  }
  JAXCONV_CHECK(dgrad, igemm_wgmma, f16, 128x64x64_pingpong, gpu,
                Layer(kDgrad, kF16, 2, 13, 11, 72, 136, 3, 2), 0);
  JAXCONV_CHECK(fprop, igemm_wgmma, f32, 128x64x32_pingpong, gpu,
                Layer(kFprop, kF32, 2, 13, 11, 36, 72, 3), 1);
}

void TestFilterRow(const Gpu& gpu) {
  JAXCONV_CHECK(fprop, igemm_wgmma, bf16, 128x128x64_pingpong_filter_row, gpu,
                Layer(kFprop, kBF16, 3, 13, 11, 72, 136, 3), 0);
  JAXCONV_CHECK(fprop, igemm_wgmma, f16, 224x64x64_swap_ab_filter_row, gpu,
                Layer(kFprop, kF16, 3, 13, 11, 128, 64, 3), 0);
  JAXCONV_CHECK(dgrad, igemm_wgmma, bf16, 128x64x64_swap_ab_weight_stationary, gpu,
                Layer(kDgrad, kBF16, 3, 13, 11, 64, 64, 3), 0);
}

void TestPointwise(const Gpu& gpu) {
  JAXCONV_CHECK(fprop, igemm_wgmma, bf16, 128x128x64_pointwise, gpu,
                Layer(kFprop, kBF16, 3, 13, 11, 72, 136, 1), 0);
  JAXCONV_CHECK(fprop, igemm_wgmma, f16, 64x256x64_pointwise_c128, gpu,
                Layer(kFprop, kF16, 3, 13, 11, 128, 256, 1), 0);
  JAXCONV_CHECK(dgrad, igemm_wgmma, bf16, 256x64x64_pointwise_swap_ab, gpu,
                Layer(kDgrad, kBF16, 3, 13, 11, 64, 128, 1), 0);
}

void TestWgrad(const Gpu& gpu) {
  for (int slices : {1, 3}) {
    JAXCONV_CHECK(wgrad, igemm_wgmma, bf16, 128x128x64_cooperative, gpu,
                  Layer(kWgrad, kBF16, 8, 13, 11, 72, 136, 3), slices);
    JAXCONV_CHECK(wgrad, igemm_wgmma, f16, 128x64x64_pingpong, gpu,
                  Layer(kWgrad, kF16, 8, 13, 11, 72, 136, 3), slices);
    JAXCONV_CHECK(wgrad, igemm_wgmma, bf16, 192x64x128_filter_row, gpu,
                  Layer(kWgrad, kBF16, 8, 13, 11, 72, 136, 3), slices);
    JAXCONV_CHECK(wgrad, igemm_wgmma, f32, 128x64x32_mma_sync, gpu,
                  Layer(kWgrad, kF32, 8, 13, 11, 96, 160, 3), slices);
  }
}

}  // namespace
}  // namespace jaxconv

int main() {
  jaxconv::Gpu gpu;
  if (jaxconv::Status status = jaxconv::QueryGpu(0, &gpu); !status.ok()) {
    jaxconv::Fail(status.message());
  } else if (gpu.compute_capability() != 90) {
    std::printf("needs compute capability 90, the GPU has %d\n", gpu.compute_capability());
    return 77;
  } else {
    jaxconv::TestGather(gpu);
    jaxconv::TestFilterRow(gpu);
    jaxconv::TestPointwise(gpu);
    jaxconv::TestWgrad(gpu);
  }
  std::printf("fused_epilogue_sm90_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
