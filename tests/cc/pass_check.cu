// Passes over tensors that convolve nothing (batch norm's sums, pooling), as kernels alone, without
// Python and XLA.
//
//     pass_check check|hash [KERNEL...]
//
//     check  small integers, results filled with NaN before, compared with the definition: exactly,
//            but for moments and derivatives of activations
//     hash   normal operands; of the results' bits, to compare processes
//
// KERNEL: part of a name in kPasses below; without one, all.
//
// To add a kernel: write NAME_cases.cuh beside masked_sums_cases.cuh, a function that launches every
// form of the kernel on shapes of all tails, and name it in kPasses. The emulator
// (test_emulated_kernels.py), compute-sanitizer (sanitize.py) and the comparison of processes
// (same_bits.py) then run it. What can be seen of a race or an access out of bounds is what the
// cases reach, each in several CTAs; they are small, since the sanitizer is slow.
//
// It is built as kernel_check.cu is (CONTRIBUTING.md). Exit status: 1 where a kernel fails or
// differs.
#include <cstdio>
#include <string>

#include "masked_sums_cases.cuh"
#include "max_pool_cases.cuh"
#include "moments_cases.cuh"
#include "normalise_add_cases.cuh"
#include "pass_test.cuh"

namespace jaxconv {
namespace {

struct Pass {
  const char* name;
  void (*cases)(PassTest& test);
};

constexpr Pass kPasses[] = {
    {"masked_sums", MaskedSumsCases},
    {"moments", MomentsCases},
    {"normalise_add", NormaliseAddCases},
    {"max_pool", MaxPoolCases},
    {"max_pool_gradient", MaxPoolGradientCases},
};

int Main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode != "check" && mode != "hash") {
    std::printf("pass_check check|hash [KERNEL...]\n");
    return 2;
  }
  int kernels = 0, cases = 0, failures = 0;
  for (const Pass& pass : kPasses) {
    bool wanted = argc == 2;
    for (int i = 2; i < argc; ++i) {
      wanted = wanted || std::string(pass.name).find(argv[i]) != std::string::npos;
    }
    if (!wanted) continue;
    PassTest test(pass.name, mode == "check");
    pass.cases(test);
    test.End();
    ++kernels;
    cases += test.cases();
    failures += test.failures() + (test.cases() == 0);
    std::fflush(stdout);
  }
  std::printf("%s: %d problems, %d kernels, %d failures\n", mode.c_str(), cases, kernels, failures);
  return failures != 0 || kernels == 0;
}

}  // namespace
}  // namespace jaxconv

int main(int argc, char** argv) { return jaxconv::Main(argc, argv); }
