// Division by an invariant divisor: n / d as one wide multiplication and one shift.
//
// For 1 <= d < 2^31 and 0 <= n < 2^31, with l = ceil(log2 d) and p = 31 + l, the multiplier
// m = ceil(2^p / d) fits in 32 bits and floor(n / d) = (n * m) >> p exactly: m * d = 2^p + e with
// 0 <= e < d <= 2^l, so the error n * e / (d * 2^p) stays below 1 / d. (Granlund and Montgomery,
// "Division by Invariant Integers using Multiplication", PLDI 1994, theorem 4.2 with N = 31.)
#ifndef JAXCONV_CORE_FAST_DIVMOD_H_
#define JAXCONV_CORE_FAST_DIVMOD_H_

#include <cstdint>

#include "core/host_device.h"

namespace jaxconv {

struct FastDivmod {
  uint32_t divisor = 1;
  uint32_t multiplier = 1u << 31;
  uint32_t shift = 31;

  FastDivmod() = default;
  // Host only: it does the two wide divisions that the device avoids. A divisor of 0 (an axis
  // without elements) is stored as 1, so that no code divides by zero before an empty loop.
  explicit FastDivmod(int64_t d) : divisor(d > 0 ? static_cast<uint32_t>(d) : 1u) {
    uint32_t log2_ceil = 0;
    while ((uint64_t{1} << log2_ceil) < divisor) ++log2_ceil;
    shift = 31 + log2_ceil;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }

  JAXCONV_HOST_DEVICE int32_t Div(int32_t n) const {
    return static_cast<int32_t>((static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier) >>
                                shift);
  }
  // quotient = n / divisor, remainder = n % divisor.
  JAXCONV_HOST_DEVICE void Divmod(int32_t n, int32_t* quotient, int32_t* remainder) const {
    *quotient = Div(n);
    *remainder = n - *quotient * static_cast<int32_t>(divisor);
  }
};

}  // namespace jaxconv

#endif  // JAXCONV_CORE_FAST_DIVMOD_H_
