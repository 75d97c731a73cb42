// The fused epilogue in every form of few_channels and in their split-K reduction.
#include "cc/fused_epilogue.cuh"
#include "cuda/few_channels/dgrad.cuh"
#include "cuda/few_channels/fprop.cuh"
#include "cuda/few_channels/plan.h"
#include "cuda/few_channels/row_pairs_sm90.cuh"
#include "cuda/few_channels/rows_sm90.cuh"
#include "cuda/few_channels/wgrad.cuh"

namespace jaxconv {

#define KERNEL(ops, types, variant, header, form, arguments, ...) \
  JAXCONV_FOR_EACH(ops, types, JAXCONV_FUSED_TAG, variant, few_channels, form, arguments)
#define PADDED(...)
#define FUSED(...)
#include "cuda/few_channels/kernels.def"

namespace {

constexpr Op kFprop = Op::kFprop, kDgrad = Op::kDgrad, kWgrad = Op::kWgrad;
constexpr DType kF16 = DType::kF16, kBF16 = DType::kBF16;

void Test(const Gpu& gpu) {
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
  return jaxconv::RunTest("fused_few_channels_test", jaxconv::Test, /*needs_hopper=*/false);
}
