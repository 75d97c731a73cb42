// The building blocks of pass_check.cu's cases: arrays in device memory, drawn or filled with NaN,
// that are compared with a definition computed on the host, or hashed.
#ifndef JAXCONV_TESTS_CC_PASS_TEST_CUH_
#define JAXCONV_TESTS_CC_PASS_TEST_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/conv_problem.h"
#include "core/status.h"
#include "device_program.cuh"

namespace jaxconv {

// A contiguous array in device memory, which the host reads and writes as numbers.
class DeviceArray {
 public:
  // Rounds the values to the type.
  DeviceArray(DType dtype, const std::vector<double>& values)
      : DeviceArray(dtype, static_cast<int64_t>(values.size())) {
    std::vector<char> bytes(static_cast<size_t>(count_) * ByteWidth(dtype));
    for (int64_t i = 0; i < count_; ++i) Put(bytes.data(), i, values[i]);
    Require(cudaMemcpyAsync(data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice, nullptr),
            "copy");
    Require(cudaStreamSynchronize(nullptr), "copy");
  }
  // A result before the kernel writes it: NaN, or for integers -1 (kU8: 255).
  DeviceArray(DType dtype, int64_t count)
      : dtype_(dtype), count_(count), buffer_(count * ByteWidth(dtype)) {
    Require(cudaMemsetAsync(data(), 0xff, count * ByteWidth(dtype), nullptr), "poison");
  }

  void* data() const { return buffer_.data(); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(buffer_.data());
  }

  std::vector<char> Bytes() const {
    std::vector<char> bytes(static_cast<size_t>(count_) * ByteWidth(dtype_));
    Require(cudaMemcpyAsync(bytes.data(), data(), bytes.size(), cudaMemcpyDeviceToHost, nullptr),
            "copy");
    Require(cudaStreamSynchronize(nullptr), "result");
    return bytes;
  }
  std::vector<double> Values() const {
    const std::vector<char> bytes = Bytes();
    std::vector<double> values;
    for (int64_t i = 0; i < count_; ++i) values.push_back(Get(bytes.data(), i));
    return values;
  }

 private:
  void Put(char* bytes, int64_t at, double value) const {
    switch (dtype_) {
      case DType::kF32:
        reinterpret_cast<float*>(bytes)[at] = static_cast<float>(value);
        break;
      case DType::kF16:
        reinterpret_cast<__half*>(bytes)[at] = __float2half(static_cast<float>(value));
        break;
      case DType::kBF16:
        reinterpret_cast<__nv_bfloat16*>(bytes)[at] = __float2bfloat16(static_cast<float>(value));
        break;
      case DType::kS32:
        reinterpret_cast<int32_t*>(bytes)[at] = static_cast<int32_t>(value);
        break;
      case DType::kS8:
      case DType::kU8:
        bytes[at] = static_cast<char>(static_cast<int>(value));
    }
  }
  double Get(const char* bytes, int64_t at) const {
    switch (dtype_) {
      case DType::kF32:
        return reinterpret_cast<const float*>(bytes)[at];
      case DType::kF16:
        return __half2float(reinterpret_cast<const __half*>(bytes)[at]);
      case DType::kBF16:
        return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(bytes)[at]);
      case DType::kS32:
        return reinterpret_cast<const int32_t*>(bytes)[at];
      case DType::kS8:
        return reinterpret_cast<const int8_t*>(bytes)[at];
      default:
        return reinterpret_cast<const uint8_t*>(bytes)[at];
    }
  }

  DType dtype_;
  int64_t count_;
  Buffer buffer_;
};

// `value` rounded to a floating-point type.
inline double Rounded(DType dtype, double value) {
  const auto single = static_cast<float>(value);
  return dtype == DType::kF32    ? single
         : dtype == DType::kBF16 ? double{__bfloat162float(__float2bfloat16(single))}
                                 : double{__half2float(__float2half(single))};
}

// Enumerates the floating-point types cyclically.
inline DType TypeOf(int number) {
  constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};
  return kTypes[number % 3];
}

// The cases of one kernel, in one of the program's modes.
class PassTest {
 public:
  PassTest(const char* kernel, bool exact) : kernel_(kernel), exact_(exact) {}

  // Begins a case. Its operands depend only on its name.
  void Begin(const std::string& name) {
    End();
    name_ = name;
    hash_ = 14695981039346656037ull;
    failed_ = false;
    ++cases_;
    std::seed_seq seed(name.begin(), name.end());
    random_.seed(seed);
  }
  // Integers from `low` to `high`, whose sums are exact, or normal numbers if results are hashed.
  std::vector<double> Drawn(int64_t count, int low = -3, int high = 3) {
    std::vector<double> values;
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(exact_ ? std::uniform_int_distribution<int>(low, high)(random_)
                              : std::normal_distribution<double>()(random_));
    }
    return values;
  }
  void Launched(const Status& status) {
    if (status.ok()) return;
    failed_ = true;
    std::printf("FAILED %s %s: %s\n", kernel_, name_.c_str(), status.message().c_str());
  }
  // Hashes a result, or compares it with its definition, which is computed only then. If the result
  // has `parts` slices in each segment, only their sum is defined, and that sum is compared.
  // The error may be `tolerance` times max(1, |expected|).
  template <class Define>
  void Result(const char* what, const DeviceArray& result, Define define, int64_t parts = 1,
              int64_t segments = 1, double tolerance = 0) {
    if (failed_) return;
    if (!exact_) {
      for (const char byte : result.Bytes()) {
        hash_ = (hash_ ^ static_cast<unsigned char>(byte)) * 1099511628211ull;
      }
      return;
    }
    const std::vector<double> expected = define(), values = result.Values();
    std::vector<double> found(values.size() / parts);
    const size_t of_segment = found.size() / segments;
    for (size_t i = 0; i < values.size(); ++i) {
      found[i / (of_segment * parts) * of_segment + i % of_segment] += values[i];
    }
    int64_t differ = found.size() == expected.size() ? 0 : 1, first = 0;
    for (size_t i = 0; i < found.size() && i < expected.size(); ++i) {
      if (found[i] == expected[i] || (found[i] != found[i] && expected[i] != expected[i])) continue;
      const double error = std::fabs(found[i] - expected[i]);
      if (error <= tolerance * std::max(1.0, std::fabs(expected[i]))) continue;
      if (differ++ == 0) first = static_cast<int64_t>(i);
    }
    if (differ == 0) return;
    failed_ = true;
    std::printf("FAILED %s %s: %s: %lld of %zu differ (%zu expected), the first %lld: %g, not %g\n",
                kernel_, name_.c_str(), what, static_cast<long long>(differ), found.size(),
                expected.size(), static_cast<long long>(first), found[first], expected[first]);
  }
  // Ends the previous case; also called after the last.
  void End() {
    if (name_.empty()) return;
    failures_ += failed_;
    if (!exact_ && !failed_) {
      std::printf("%s %s %016llx\n", name_.c_str(), kernel_, hash_);
    }
    name_.clear();
  }
  int cases() const { return cases_; }
  int failures() const { return failures_; }

 private:
  const char* kernel_;
  bool exact_, failed_ = false;
  std::string name_;
  unsigned long long hash_ = 0;
  std::mt19937 random_;
  int cases_ = 0, failures_ = 0;
};

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_PASS_TEST_CUH_
