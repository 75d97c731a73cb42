// Compares FastDivmod with / and % on the dividends and divisors where an error of one in the
// multiplier would show.
#include "core/fast_divmod.h"

#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace jaxconv {
namespace {

constexpr int64_t kLargest = (int64_t{1} << 31) - 1;
int64_t checked = 0;
int failures = 0;

void Check(int64_t divisor, const FastDivmod& divmod, int64_t n) {
  if (n < 0 || n > kLargest) return;
  int32_t quotient = -1, remainder = -1;
  divmod.Divmod(static_cast<int32_t>(n), &quotient, &remainder);
  ++checked;
  if (quotient == n / divisor && remainder == n % divisor &&
      divmod.Div(static_cast<int32_t>(n)) == n / divisor) {
    return;
  }
  if (++failures <= 20) {
    std::printf("FAIL %lld / %lld: expected %lld rest %lld, got %d rest %d\n",
                static_cast<long long>(n), static_cast<long long>(divisor),
                static_cast<long long>(n / divisor), static_cast<long long>(n % divisor), quotient,
                remainder);
  }
}

// Errors show first at large dividends, at a multiple of the divisor or just below.
void CheckDivisor(int64_t divisor, std::mt19937_64* random) {
  FastDivmod divmod(divisor);
  int64_t last = kLargest / divisor;
  for (int64_t multiple : {int64_t{0}, int64_t{1}, int64_t{2}, last / 2, last - 1, last}) {
    for (int64_t offset : {-1, 0, 1}) Check(divisor, divmod, multiple * divisor + offset);
  }
  for (int64_t n : {kLargest, kLargest - 1, kLargest / 2, kLargest / 2 + 1}) {
    Check(divisor, divmod, n);
  }
  std::uniform_int_distribution<int64_t> any(0, kLargest), any_multiple(0, last);
  for (int i = 0; i < 4; ++i) {
    Check(divisor, divmod, any(*random));
    int64_t multiple = any_multiple(*random) * divisor;
    Check(divisor, divmod, multiple);
    Check(divisor, divmod, multiple - 1);
  }
}

}  // namespace
}  // namespace jaxconv

int main() {
  using namespace jaxconv;
  std::mt19937_64 random(1);
  // Every pair of small numbers.
  for (int64_t divisor = 1; divisor <= 600; ++divisor) {
    FastDivmod divmod(divisor);
    for (int64_t n = 0; n <= 4 * 600; ++n) Check(divisor, divmod, n);
  }
  // Every divisor that an extent is likely to be, and the neighbours of every power of two.
  for (int64_t divisor = 1; divisor <= 200000; ++divisor) CheckDivisor(divisor, &random);
  for (int bit = 0; bit < 31; ++bit) {
    for (int64_t offset : {-2, -1, 0, 1, 2}) {
      int64_t divisor = (int64_t{1} << bit) + offset;
      if (divisor >= 1) CheckDivisor(divisor, &random);
    }
  }
  std::uniform_int_distribution<int64_t> any(1, kLargest);
  for (int i = 0; i < 200000; ++i) CheckDivisor(any(random), &random);
  for (int64_t divisor : {kLargest, kLargest - 1, kLargest / 2, kLargest / 2 + 1}) {
    CheckDivisor(divisor, &random);
  }
  // The default divides by 1, and so does the divisor of an axis without elements.
  for (int64_t n : {int64_t{0}, int64_t{1}, int64_t{12345}, kLargest}) {
    Check(1, FastDivmod(), n);
    Check(1, FastDivmod(0), n);
  }
  std::printf("%lld divisions checked, %d failures\n", static_cast<long long>(checked), failures);
  return failures != 0 || checked < 10000000;
}
