// The fused epilogue (scale, bias, residual, activation) in every form of the portable families and
// in the split-K reduction behind them, on whole and ragged rows, groups and batches.
#include <cstdio>

#include "cc/fused_epilogue.cuh"
#include "cuda/common/query_gpu.h"
#include "cuda/few_channels/dgrad.cuh"
#include "cuda/few_channels/fprop.cuh"
#include "cuda/few_channels/plan.h"
#include "cuda/few_channels/wgrad.cuh"
#include "cuda/igemm_simt/plan.h"
#include "cuda/igemm_simt/two_stage.cuh"
#include "cuda/igemm_wmma/multistage.cuh"
#include "cuda/igemm_wmma/plan.h"

namespace jaxconv {

#define KERNEL(ops, types, variant, header, form, arguments, ...) \
  JAXCONV_FOR_EACH(ops, types, JAXCONV_FUSED_TAG, variant, JAXCONV_FAMILY, form, arguments)
#define PADDED(...)
#define FUSED(...)
#define JAXCONV_FAMILY igemm_simt
#include "cuda/igemm_simt/kernels.def"
#undef JAXCONV_FAMILY
#define JAXCONV_FAMILY igemm_wmma
#include "cuda/igemm_wmma/kernels.def"
#undef JAXCONV_FAMILY
#define JAXCONV_FAMILY few_channels
#include "cuda/few_channels/kernels.def"
#undef JAXCONV_FAMILY

namespace {

constexpr Op kFprop = Op::kFprop, kDgrad = Op::kDgrad, kWgrad = Op::kWgrad;
constexpr DType kF32 = DType::kF32, kF16 = DType::kF16, kBF16 = DType::kBF16;

void TestIgemmSimt(const Gpu& gpu) {
  JAXCONV_CHECK(fprop, igemm_simt, f32, 128x64x8_vec, gpu,
                Batched(Layer(kFprop, kF32, 2, 9, 11, 20, 36, 3), 2), 0);
  JAXCONV_CHECK(fprop, igemm_simt, f32, 128x64x8_vec_wide, gpu,
                Grouped(Layer(kFprop, kF32, 2, 9, 11, 24, 40, 3, 2), 2), 0);
  JAXCONV_CHECK(fprop, igemm_simt, f16, 128x32x8_scalar, gpu,
                Layer(kFprop, kF16, 2, 9, 11, 5, 37, 3), 0);
  JAXCONV_CHECK(dgrad, igemm_simt, f32, 64x64x8_vec, gpu,
                Layer(kDgrad, kF32, 2, 9, 11, 36, 20, 3, 2), 0);
  JAXCONV_CHECK(dgrad, igemm_simt, f32, 128x64x8_scalar, gpu,
                Layer(kDgrad, kF32, 2, 9, 11, 37, 5, 3, 2), 0);
  for (int slices : {1, 3}) {
    JAXCONV_CHECK(wgrad, igemm_simt, f32, 64x64x8_vec, gpu,
                  Grouped(Layer(kWgrad, kF32, 2, 9, 11, 24, 40, 3), 2), slices);
    JAXCONV_CHECK(wgrad, igemm_simt, bf16, 128x32x8_scalar, gpu,
                  Layer(kWgrad, kBF16, 2, 9, 11, 5, 37, 3), slices);
  }
}

void TestIgemmWmma(const Gpu& gpu) {
  for (int slices : {1, 3}) {
    JAXCONV_CHECK(fprop, igemm_wmma, bf16, 64x64x64_3stage, gpu,
                  Batched(Layer(kFprop, kBF16, 2, 9, 11, 40, 136, 3), 2), slices);
    JAXCONV_CHECK(fprop, igemm_wmma, f32, 64x64x32_3stage, gpu,
                  Grouped(Layer(kFprop, kF32, 2, 9, 11, 24, 40, 3), 2), slices);
    JAXCONV_CHECK(dgrad, igemm_wmma, f16, 64x64x64_3stage, gpu,
                  Layer(kDgrad, kF16, 2, 9, 11, 72, 40, 3, 2), slices);
    JAXCONV_CHECK(wgrad, igemm_wmma, bf16, 256x16x64_3stage, gpu,
                  Layer(kWgrad, kBF16, 2, 9, 11, 40, 24, 3), slices);
  }
  JAXCONV_CHECK(dgrad, igemm_wmma, f16, 128x64x64_3stage_align8, gpu,
                Layer(kDgrad, kF16, 2, 9, 11, 20, 36, 3, 2), 0);
  JAXCONV_CHECK(fprop, igemm_wmma, bf16, 256x16x64_3stage_b_align2, gpu,
                Layer(kFprop, kBF16, 2, 9, 11, 24, 13, 3), 0);
  JAXCONV_CHECK(fprop, igemm_wmma, f16, 128x16x64_3stage_align2, gpu,
                Layer(kFprop, kF16, 2, 9, 11, 6, 13, 3), 0);
  JAXCONV_CHECK(dgrad, igemm_wmma, bf16, 128x64x32_3stage_align2, gpu,
                Layer(kDgrad, kBF16, 2, 9, 11, 37, 5, 3, 2), 0);
}

void TestFewChannels(const Gpu& gpu) {
  JAXCONV_CHECK(fprop, few_channels, bf16, 128x64, gpu,
                Batched(Layer(kFprop, kBF16, 2, 19, 21, 3, 72, 7, 2), 2), 0);
  JAXCONV_CHECK(fprop, few_channels, f16, 128x64, gpu, Layer(kFprop, kF16, 2, 19, 21, 4, 37, 3), 0);
  JAXCONV_CHECK(dgrad, few_channels, f16, 256x16, gpu, Layer(kDgrad, kF16, 2, 19, 21, 3, 40, 3), 0);
  JAXCONV_CHECK(dgrad, few_channels, bf16, 256x24, gpu,
                Batched(Layer(kDgrad, kBF16, 2, 19, 21, 3, 72, 7, 2), 2), 0);
  JAXCONV_CHECK(dgrad, few_channels, bf16, 256x48, gpu, Layer(kDgrad, kBF16, 2, 19, 21, 8, 40, 5),
                0);
  for (int slices : {1, 3}) {
    JAXCONV_CHECK(wgrad, few_channels, bf16, 32x64, gpu, Layer(kWgrad, kBF16, 2, 19, 21, 3, 72, 3),
                  slices);
    JAXCONV_CHECK(wgrad, few_channels, f16, 64x64, gpu, Layer(kWgrad, kF16, 2, 19, 21, 4, 40, 3),
                  slices);
    JAXCONV_CHECK(wgrad, few_channels, bf16, 192x64, gpu,
                  Layer(kWgrad, kBF16, 2, 19, 21, 3, 40, 7, 2), slices);
  }
}

}  // namespace
}  // namespace jaxconv

int main() {
  jaxconv::Gpu gpu;
  if (jaxconv::Status status = jaxconv::QueryGpu(0, &gpu); !status.ok()) {
    jaxconv::Fail(status.message());
  } else {
    jaxconv::TestIgemmSimt(gpu);
    jaxconv::TestIgemmWmma(gpu);
    jaxconv::TestFewChannels(gpu);
  }
  std::printf("fused_epilogue_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
