// Conversions between float16, bfloat16 and double, rounded once to nearest even.
#ifndef JAXCONV_TESTS_EMULATOR_ROUND_H_
#define JAXCONV_TESTS_EMULATOR_ROUND_H_

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

// kFraction: bits of the fraction; kLeast and kMost: exponents of the smallest and largest normal
// number.
template <int kFraction, int kLeast, int kMost>
struct Narrow {
  static constexpr int kExponentBits = 15 - kFraction;
  static constexpr uint16_t kInfinity = ((1 << kExponentBits) - 1) << kFraction;

  static uint16_t Round(double value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (value != value) return 0x7fff;
    value = std::fabs(value);
    if (value == 0) return sign;
    if (std::isinf(value)) return sign | kInfinity;  // frexp gives no exponent for it
    int exponent;
    std::frexp(value, &exponent);
    exponent = exponent - 1 < kLeast ? kLeast : exponent - 1;
    if (exponent > kMost) return sign | kInfinity;
    // In units of the last place. A carry goes into the exponent.
    const auto units =
        static_cast<uint32_t>(std::nearbyint(std::ldexp(value, kFraction - exponent)));
    return static_cast<uint16_t>(sign | (((exponent - kLeast) << kFraction) + units));
  }
  static double Value(uint16_t bits) {
    const int exponent = (bits & 0x7fff) >> kFraction, fraction = bits & ((1 << kFraction) - 1);
    double value;
    if (exponent == (1 << kExponentBits) - 1) {
      value = fraction != 0 ? NAN : INFINITY;
    } else if (exponent == 0) {
      value = std::ldexp(fraction, kLeast - kFraction);
    } else {
      value = std::ldexp(fraction + (1 << kFraction), exponent - 1 + kLeast - kFraction);
    }
    return (bits & 0x8000) != 0 ? -value : value;
  }
};
using Float16 = Narrow<10, -14, 15>;
using Bfloat16 = Narrow<7, -126, 127>;

// a + b rounded to odd, so that a second rounding to a narrower type gives the correctly rounded
// sum.
inline double AddToOdd(double a, double b) {
  const double sum = a + b;
  if (!std::isfinite(sum)) return sum;
  const double rest = sum - a, error = (a - (sum - rest)) + (b - rest);
  uint64_t bits;
  std::memcpy(&bits, &sum, 8);
  if (error == 0 || (bits & 1) != 0) return sum;
  bits += (error > 0) == (sum > 0) ? 1 : -1;
  double odd;
  std::memcpy(&odd, &bits, 8);
  return odd;
}

}  // namespace emulator

#endif  // JAXCONV_TESTS_EMULATOR_ROUND_H_
