// The error bound of a kernel instance on integers, relative to the largest result.
#ifndef JAXCONV_TESTS_CC_STATED_ERROR_H_
#define JAXCONV_TESTS_CC_STATED_ERROR_H_

#include <string_view>

namespace jaxconv {

// The bound is 0 except for family winograd. F(2, 3) is exact, but G of F(4, 3) and F(6, 3) divides
// by 3 and 5, so U is rounded to float16; instances named half also round M. Bounds are about twice
// the largest error found; an omitted tap gives about 0.1. tests/support/numerics.py reads these
// lines.
struct WinogradError {
  char m;
  double error;
};
constexpr WinogradError kWinogradErrors[] = {{'2', 0}, {'4', 0.015}, {'6', 0.03}};
constexpr double kHalfFactor = 1.7;

constexpr double StatedError(std::string_view instance) {
  constexpr std::string_view kFamily = "_winograd_", kHalf = "_half";
  const size_t family = instance.find(kFamily);
  if (family == instance.npos) return 0;
  // In fprop_winograd_bf16_4x4_..., m follows the operands' type.
  const char m = instance[instance.find('_', family + kFamily.size()) + 1];
  const bool half = instance.rfind(kHalf) == instance.size() - kHalf.size();
  for (const WinogradError& of : kWinogradErrors) {
    if (of.m == m) return of.error * (half ? kHalfFactor : 1);
  }
  return 0;
}
static_assert(StatedError("fprop_winograd_bf16_4x4_pkf_shmem_16x32") == 0.015);
static_assert(StatedError("dgrad_winograd_f16_6x6_four_stage_128x128x64_pingpong_half") ==
              0.03 * 1.7);
static_assert(StatedError("fprop_igemm_wgmma_bf16_128x128x64_pingpong") == 0);

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_STATED_ERROR_H_
