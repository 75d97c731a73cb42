// The fused epilogue in the filter-row, weight-stationary and pointwise forms of igemm_wgmma.
// Compiled for sm_90a; runs on Hopper only.
#include "cc/fused_igemm_wgmma_sm90.cuh"

namespace jaxconv {
namespace {

constexpr Op kFprop = Op::kFprop, kDgrad = Op::kDgrad;
constexpr DType kF16 = DType::kF16, kBF16 = DType::kBF16;

void TestForms(const Gpu& gpu) {
  JAXCONV_CHECK(fprop, igemm_wgmma, bf16, 128x128x64_pingpong_filter_row, gpu,
                Layer(kFprop, kBF16, 3, 13, 11, 72, 136, 3), 0);
  JAXCONV_CHECK(fprop, igemm_wgmma, f16, 224x64x64_swap_ab_filter_row, gpu,
                Layer(kFprop, kF16, 5, 13, 11, 128, 64, 3), 0);
  JAXCONV_CHECK(dgrad, igemm_wgmma, bf16, 128x64x64_swap_ab_weight_stationary, gpu,
                Layer(kDgrad, kBF16, 3, 13, 11, 64, 64, 3), 0);
  JAXCONV_CHECK(fprop, igemm_wgmma, bf16, 128x128x64_pointwise, gpu,
                Layer(kFprop, kBF16, 3, 13, 11, 72, 136, 1), 0);
  JAXCONV_CHECK(fprop, igemm_wgmma, bf16, 256x64x64_pointwise_swap_ab, gpu,
                Layer(kFprop, kBF16, 5, 13, 11, 128, 64, 1), 0);
  JAXCONV_CHECK(fprop, igemm_wgmma, f16, 64x256x64_pointwise_c128, gpu,
                Layer(kFprop, kF16, 3, 13, 11, 128, 256, 1), 0);
  JAXCONV_CHECK(dgrad, igemm_wgmma, bf16, 256x64x64_pointwise_swap_ab, gpu,
                Layer(kDgrad, kBF16, 5, 13, 11, 64, 128, 1), 0);
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
  return jaxconv::RunTest("fused_filter_row_sm90_test", jaxconv::Test, /*needs_hopper=*/true);
}
