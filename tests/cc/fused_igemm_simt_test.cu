// The fused epilogue (scale, bias, residual, activation) in every form of igemm_simt and in their
// split-K reduction: full and partial tiles, groups and batches.
#include "cc/fused_epilogue.cuh"
#include "cuda/igemm_simt/plan.h"
#include "cuda/igemm_simt/two_stage.cuh"

namespace jaxconv {

#define KERNEL(ops, types, variant, header, form, arguments, ...) \
  JAXCONV_FOR_EACH(ops, types, JAXCONV_FUSED_TAG, variant, igemm_simt, form, arguments)
#define PADDED(...)
#define FUSED(...)
#include "cuda/igemm_simt/kernels.def"

namespace {

constexpr Op kFprop = Op::kFprop, kDgrad = Op::kDgrad, kWgrad = Op::kWgrad;
constexpr DType kF32 = DType::kF32, kF16 = DType::kF16, kBF16 = DType::kBF16;

void Test(const Gpu& gpu) {
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

}  // namespace
}  // namespace jaxconv

int main() {
  return jaxconv::RunTest("fused_igemm_simt_test", jaxconv::Test, /*needs_hopper=*/false);
}
