// The fused epilogue (scale, bias, residual, activation) in the forms of igemm_wgmma that gather
// every tap, and in their split-K reduction. Compiled for sm_90a; runs on Hopper only.
#include "cc/fused_igemm_wgmma_sm90.cuh"

namespace jaxconv {
namespace {

constexpr Op kFprop = Op::kFprop, kDgrad = Op::kDgrad;
constexpr DType kF32 = DType::kF32, kF16 = DType::kF16, kBF16 = DType::kBF16;

void TestForms(const Gpu& gpu) {
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
  JAXCONV_CHECK(fprop, igemm_wgmma, bf16, 128x320x64_cooperative, gpu,
                Layer(kFprop, kBF16, 3, 13, 11, 72, 600, 1), 0);
  JAXCONV_CHECK(fprop, igemm_wgmma, f32, 128x64x32_pingpong, gpu,
                Layer(kFprop, kF32, 2, 13, 11, 36, 72, 3), 1);
  JAXCONV_CHECK(fprop, igemm_wgmma, f32, 192x64x32_3xtf32, gpu,
                Layer(kFprop, kF32, 3, 13, 11, 36, 72, 3), 1);
}

// Plans for all SMs, and for one SM, whose CTA processes at least three tiles.
void Test(const Gpu& gpu) {
  TestForms(gpu);
  Gpu one = gpu;
  one.sm_count = 1;
  TestForms(one);
}

}  // namespace
}  // namespace jaxconv

int main() {
  return jaxconv::RunTest("fused_gather_sm90_test", jaxconv::Test, /*needs_hopper=*/true);
}
