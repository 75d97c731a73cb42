// Checks that print a failure and let the test go on.
#ifndef JAXCONV_TESTS_CC_EXPECT_H_
#define JAXCONV_TESTS_CC_EXPECT_H_

#include <cstdio>
#include <string>

namespace jaxconv {

inline int failures = 0;

inline void Expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::printf("FAIL %s\n", what.c_str());
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_EXPECT_H_
