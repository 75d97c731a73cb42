// Runs passes, the kernels that convolve nothing (sums for batch norm, pooling), without Python and
// XLA.
//
//     pass_check check|hash [KERNEL...]
//
//     check  small integers; results are filled with NaN before. Compares with the definition,
//            exactly except for moments and derivatives of activations
//     hash   normal operands; a hash of the results' bits, to compare processes
//
// KERNEL: part of a name in kPasses below; without one, all.
//
// To add a kernel: write NAME_cases.cuh beside masked_sums_cases.cuh, with a function that launches
// every form of the kernel on shapes with all kinds of tails, and name it in kPasses. The emulator
// (test_emulated_kernels.py), compute-sanitizer (sanitize.py) and the comparison of processes
// (same_bits.py) run all cases. They find only races and accesses out of bounds that the cases
// reach, so each case uses several CTAs; cases are small because the sanitizer is slow.
//
// CONTRIBUTING.md says how it is built. Exit status: 1 if a kernel fails or differs.
#include <cstdio>
#include <string>

#include "activated_sums_cases.cuh"
#include "elementwise_cases.cuh"
#include "masked_sums_cases.cuh"
#include "max_pool_cases.cuh"
#include "moments_cases.cuh"
#include "normalise_add_cases.cuh"
#include "normalise_cases.cuh"
#include "pass_test.cuh"

namespace jaxconv {
namespace {

struct Pass {
  const char* name;
  void (*cases)(PassTest& test);
};

constexpr Pass kPasses[] = {
    {"masked_sums", MaskedSumsCases},  {"activated_sums", ActivatedSumsCases},
    {"elementwise", ElementwiseCases}, {"moments", MomentsCases},
    {"normalise", NormaliseCases},     {"normalise_add", NormaliseAddCases},
    {"max_pool", MaxPoolCases},        {"max_pool_gradient", MaxPoolGradientCases},
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
