// Runs every form of masked_sums in the emulator on small integers and compares it with the
// definition in cuda/batch_norm/masked_sums.h. Exit status: 1 where a result differs.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cuda/batch_norm/masked_sums.h"
#include "emulator.h"
#include "round.h"

namespace jaxconv {
namespace {

constexpr float kNone = std::numeric_limits<float>::quiet_NaN();

template <typename T>
struct Array {
  explicit Array(int64_t count)
      : count(count), data(static_cast<T*>(emulator::Allocate(count * sizeof(T), 16))) {}
  ~Array() { emulator::Free(data); }
  Array(const Array&) = delete;
  const int64_t count;
  T* const data;
};

uint16_t Bits(DType dtype, double value) {
  return dtype == DType::kF16 ? emulator::Float16::Round(value) : emulator::Bfloat16::Round(value);
}
double Value(DType dtype, uint16_t bits) {
  return dtype == DType::kF16 ? emulator::Float16::Value(bits) : emulator::Bfloat16::Value(bits);
}

struct Case {
  DType dtype;
  int64_t rows, channels, parts;
  int gradients, arrays;
  bool by_result, stores;
  float below;
};

bool Run(const Case& c, uint32_t seed) {
  std::mt19937 random(seed);
  auto integer = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const int64_t count = c.rows * c.channels, kinds = 1 + c.arrays;
  Array<uint16_t> gradient(count), gradient2(count), result(count), y(count), y2(count),
      masked(count);
  Array<float> mean(c.channels), mean2(c.channels), scale(c.channels), offset(c.channels),
      sums(c.parts * kinds * c.channels);
  for (auto* array : {&gradient, &gradient2, &result, &y, &y2}) {
    for (int64_t i = 0; i < count; ++i) array->data[i] = Bits(c.dtype, integer(-3, 3));
  }
  // NaN is above nothing.
  result.data[count / 2] = Bits(c.dtype, std::nan(""));
  for (auto* vector : {&mean, &mean2, &scale, &offset}) {
    for (int64_t i = 0; i < c.channels; ++i) vector->data[i] = static_cast<float>(integer(-2, 2));
  }
  std::memset(masked.data, 0xff, count * 2);
  std::memset(sums.data, 0xff, sums.count * 4);
  MaskedSums p = {};
  p.rows = c.rows, p.channels = c.channels, p.parts = c.parts;
  p.gradient = gradient.data;
  if (c.gradients == 2) p.gradient2 = gradient2.data;
  p.arrays[0] = y.data, p.means[0] = mean.data;
  if (c.arrays == 2) p.arrays[1] = y2.data, p.means[1] = mean2.data;
  if (c.by_result) {
    p.result = result.data;
  } else {
    p.scale = scale.data, p.offset = offset.data;
  }
  p.above = 0, p.below = c.below;
  if (c.stores) p.masked = masked.data;
  p.sums = sums.data;
  const Status status = LaunchMaskedSums(c.dtype, p, nullptr);
  if (!status.ok()) {
    std::printf("%s\n", status.message().c_str());
    return false;
  }
  std::vector<double> expected(kinds * c.channels), found(kinds * c.channels);
  bool same = true;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t k = 0; k < c.channels; ++k) {
      const int64_t at = row * c.channels + k;
      double dz = Value(c.dtype, gradient.data[at]);
      if (c.gradients == 2) dz += Value(c.dtype, gradient2.data[at]);
      const double centred = Value(c.dtype, y.data[at]) - mean.data[k];
      const double a =
          c.by_result ? Value(c.dtype, result.data[at]) : centred * scale.data[k] + offset.data[k];
      if (!(a > 0) || a >= c.below) dz = 0;
      expected[k] += dz;
      expected[c.channels + k] += dz * centred;
      if (c.arrays == 2) {
        expected[2 * c.channels + k] += dz * (Value(c.dtype, y2.data[at]) - mean2.data[k]);
      }
      if (c.stores) same &= Value(c.dtype, masked.data[at]) == dz;
    }
  }
  for (int64_t i = 0; i < sums.count; ++i) found[i % found.size()] += sums.data[i];
  return same && found == expected;
}

}  // namespace
}  // namespace jaxconv

int main() {
  using jaxconv::Case;
  using jaxconv::DType;
  // Rows and channels: fewer than a CTA has, no multiple of its steps, a last slice that is not
  // full, parts without rows.
  const std::vector<std::vector<int64_t>> shapes = {{3, 8, 1},    {70, 64, 2},  {301, 24, 3},
                                                    {29, 264, 2}, {41, 520, 5}, {9, 72, 11}};
  struct Form {
    int gradients, arrays;
    bool by_result, stores;
  };
  const std::vector<Form> forms = {{1, 1, true, false}, {1, 2, true, true},  {2, 1, true, true},
                                   {2, 2, true, true},  {2, 2, true, false}, {1, 1, false, false},
                                   {1, 1, false, true}};
  int wrong = 0;
  uint32_t number = 0;
  for (const auto& shape : shapes) {
    for (const Form& form : forms) {
      const DType dtype = ++number % 2 != 0 ? DType::kBF16 : DType::kF16;
      const Case c = {dtype,          shape[0],       shape[1],
                      shape[2],       form.gradients, form.arrays,
                      form.by_result, form.stores,    number % 3 != 0 ? jaxconv::kNone : 2.0f};
      if (jaxconv::Run(c, number)) continue;
      ++wrong;
      std::printf("wrong: %d rows, %d channels, %d parts, %d gradients, %d arrays, result %d\n",
                  static_cast<int>(c.rows), static_cast<int>(c.channels), static_cast<int>(c.parts),
                  c.gradients, c.arrays, c.by_result);
    }
  }
  std::printf("%u cases, %d wrong\n", number, wrong);
  return wrong == 0 ? 0 : 1;
}
