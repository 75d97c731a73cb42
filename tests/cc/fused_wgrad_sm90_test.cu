// The fused epilogue in the weight gradients of igemm_wgmma and in their split-K reduction.
// Compiled for sm_90a; runs on Hopper only.
#include "cc/fused_igemm_wgmma_sm90.cuh"

namespace jaxconv {
namespace {

constexpr Op kWgrad = Op::kWgrad;
constexpr DType kF32 = DType::kF32, kF16 = DType::kF16, kBF16 = DType::kBF16;

void Test(const Gpu& gpu) {
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
  return jaxconv::RunTest("fused_wgrad_sm90_test", jaxconv::Test, /*needs_hopper=*/true);
}
