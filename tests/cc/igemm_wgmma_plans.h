// Plans of igemm_wgmma for an H200, shared by its plan tests.
#ifndef JAXCONV_TESTS_CC_IGEMM_WGMMA_PLANS_H_
#define JAXCONV_TESTS_CC_IGEMM_WGMMA_PLANS_H_

#include <cstdio>
#include <string>
#include <vector>

#include "cuda/igemm_wgmma/geometry.h"
#include "cuda/igemm_wgmma/params.h"
#include "cuda/igemm_wgmma/plan.h"

namespace jaxconv::igemm_wgmma {

inline int failures = 0;

inline void Fail(const ConvProblem& problem, const std::string& what) {
  if (++failures < 20) std::printf("FAIL %s: %s\n", problem.ToString().c_str(), what.c_str());
}

inline const Gpu& H200() {
  static const Gpu gpu = [] {
    Gpu model;
    if (!ModelOf("h200", &model)) std::printf("FAIL: no model of an H200\n"), ++failures;
    return model;
  }();
  return gpu;
}

inline const std::vector<KernelDesc>& AllKernels() {
  static const std::vector<KernelDesc> kernels = Kernels();
  return kernels;
}

// The first instance of the operation whose name contains `part`.
inline const KernelDesc& KernelNamed(Op op, const std::string& part) {
  for (const KernelDesc& kernel : AllKernels()) {
    if (kernel.op == op && std::string(kernel.name).find(part) != std::string::npos) return kernel;
  }
  std::printf("FAIL: no kernel '%s'\n", part.c_str());
  ++failures;
  return AllKernels()[0];
}

inline Status PlanOf(const KernelDesc& kernel, const ConvProblem& problem, Plan* plan,
                     int64_t slices = 1) {
  return kernel.plan(kernel, problem, H200(), slices, plan);
}

inline bool Accepts(const KernelDesc& kernel, const ConvProblem& problem) {
  Plan plan;
  return PlanOf(kernel, problem, &plan).ok();
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_TESTS_CC_IGEMM_WGMMA_PLANS_H_
