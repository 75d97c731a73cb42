// The fused epilogue in every form of igemm_wmma and in their split-K reduction: full and partial
// tiles, groups and batches.
#include "cc/fused_epilogue.cuh"
#include "cuda/igemm_wmma/multistage.cuh"
#include "cuda/igemm_wmma/plan.h"

namespace jaxconv {

#define KERNEL(ops, types, variant, header, form, arguments, ...) \
  JAXCONV_FOR_EACH(ops, types, JAXCONV_FUSED_TAG, variant, igemm_wmma, form, arguments)
#define PADDED(...)
#define FUSED(...)
#include "cuda/igemm_wmma/kernels.def"

namespace {

constexpr Op kFprop = Op::kFprop, kDgrad = Op::kDgrad, kWgrad = Op::kWgrad;
constexpr DType kF32 = DType::kF32, kF16 = DType::kF16, kBF16 = DType::kBF16;

void Test(const Gpu& gpu) {
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

}  // namespace
}  // namespace jaxconv

int main() {
  return jaxconv::RunTest("fused_igemm_wmma_test", jaxconv::Test, /*needs_hopper=*/false);
}
