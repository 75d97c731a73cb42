// Runs the CPU kernels on small integers, on which results are exact.
#ifndef JAXCONV_TESTS_CC_CPU_RUNS_H_
#define JAXCONV_TESTS_CC_CPU_RUNS_H_

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/expect.h"
#include "cc/naive_conv.h"
#include "core/conv_problem.h"
#include "core/selection.h"
#include "core/status.h"
#include "cpu/convert.h"
#include "cpu/execution.h"
#include "cpu/select.h"

namespace jaxconv {

#define EXPECT(condition, what) Expect(condition, std::string(#condition) + ": " + (what))

inline void RunOnThreads(int64_t tasks, const std::function<void(int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int64_t task = 1; task < tasks; ++task) threads.emplace_back(body, task);
  body(0);
  for (std::thread& thread : threads) thread.join();
}

inline std::vector<double> RandomIntegers(int64_t count, std::mt19937* random) {
  std::uniform_int_distribution<int> value(-3, 3);
  std::vector<double> values(count);
  for (double& v : values) v = value(*random);
  return values;
}

// The bytes of `values` rounded to `dtype`.
inline std::vector<char> Encode(DType dtype, const std::vector<double>& values) {
  int64_t count = static_cast<int64_t>(values.size());
  std::vector<char> bytes(count * ByteWidth(dtype));
  if (dtype == DType::kS8 || dtype == DType::kU8 || dtype == DType::kS32) {
    for (int64_t i = 0; i < count; ++i) {
      auto value = static_cast<int32_t>(values[i]);
      if (dtype != DType::kS32) {
        bytes[i] = static_cast<char>(value);
      } else {
        std::memcpy(&bytes[4 * i], &value, 4);
      }
    }
    return bytes;
  }
  std::vector<float> floats(values.begin(), values.end());
  cpu::FromFloat(dtype, floats.data(), bytes.data(), 0, count);
  return bytes;
}

inline int64_t Elements(const ConvProblem& p, char tensor) {
  return tensor == 'x' ? p.x_elements() : tensor == 'w' ? p.w_elements() : p.y_elements();
}

struct Data {
  std::vector<char> lhs, rhs, expected;
};

inline Data MakeData(const ConvProblem& p, std::mt19937* random) {
  std::vector<double> lhs = RandomIntegers(Elements(p, p.op == Op::kDgrad ? 'y' : 'x'), random);
  std::vector<double> rhs = RandomIntegers(Elements(p, p.op == Op::kWgrad ? 'y' : 'w'), random);
  if (p.lhs_dtype() == DType::kS8) {  // sums of two extreme products overflow 16 bits
    for (size_t i = 0; i < lhs.size(); i += 3) lhs[i] = i % 2 ? -128 : 127;
    for (size_t i = 0; i < rhs.size(); i += 2) rhs[i] = i % 3 ? -128 : 127;
  }
  if (p.lhs_dtype() == DType::kU8) {
    for (size_t i = 0; i < lhs.size(); ++i) lhs[i] = i % 3 ? std::abs(lhs[i]) : 255;
    for (size_t i = 0; i < rhs.size(); i += 2) rhs[i] = i % 3 ? -128 : 127;
  }
  return {Encode(p.lhs_dtype(), lhs), Encode(p.rhs_dtype(), rhs),
          Encode(p.output_dtype(), NaiveConv(p, lhs, rhs))};
}

inline Status Run(const ConvProblem& p, const Selection& s, const Data& data, char* out,
                  char* workspace, int64_t workspace_bytes) {
  std::shared_ptr<const cpu::Plan> plan;
  JAXCONV_RETURN_IF_ERROR(cpu::FindPlan(p.ToString(), s.instance, s.slices, &plan));
  return cpu::Execute(*plan, data.lhs.data(), data.rhs.data(), out, workspace, workspace_bytes,
                      RunOnThreads);
}

inline Status RunInstance(const ConvProblem& p, const Selection& s, const Data& data,
                          std::vector<char>* out) {
  out->assign(data.expected.size(), static_cast<char>(0xff));
  std::vector<char> workspace(s.workspace_bytes, static_cast<char>(0xff));
  return Run(p, s, data, out->data(), workspace.data(), s.workspace_bytes);
}

struct Types {
  DType operand, result;
};

inline void SetTypes(Op op, Types types, ConvProblem* p) {
  p->op = op;
  p->x_dtype = op == Op::kDgrad ? types.result : types.operand;
  p->w_dtype = op == Op::kWgrad ? types.result : types.operand;
  p->y_dtype = op == Op::kFprop ? types.result : types.operand;
  if (p->w_dtype == DType::kU8) p->w_dtype = DType::kS8;  // u8 images have s8 filters
}

inline ConvProblem Geometry2d(int64_t n, int64_t h, int64_t w, int64_t c, int64_t k, int64_t r,
                              int64_t s, int64_t stride, int64_t pad, int64_t groups = 1,
                              int64_t dilation = 1) {
  ConvProblem p;
  p.n = n, p.c = c, p.k = k, p.groups = groups;
  p.in = {1, h, w};
  p.filter = {1, r, s};
  p.stride = {1, stride, stride};
  p.dilation = {1, dilation, dilation};
  p.pad_lo = p.pad_hi = {0, pad, pad};
  return p;
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_CPU_RUNS_H_
