// Parses the names of GPUs and problem keys for tests of selection and planning.
#ifndef JAXCONV_TESTS_CC_TARGETS_AND_KEYS_H_
#define JAXCONV_TESTS_CC_TARGETS_AND_KEYS_H_

#include <string>

#include "cc/expect.h"
#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

inline Gpu Model(const std::string& target) {
  Gpu gpu;
  Expect(ModelOf(target, &gpu), target + " is a target");
  return gpu;
}

inline ConvProblem Parse(const std::string& key) {
  ConvProblem problem;
  const Status status = ConvProblem::Parse(key, &problem);
  Expect(status.ok(), key + ": " + status.message());
  return problem;
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_TARGETS_AND_KEYS_H_
