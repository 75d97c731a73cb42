// Elementwise functions against the definition in their header.
#ifndef JAXCONV_TESTS_CC_ELEMENTWISE_CASES_CUH_
#define JAXCONV_TESTS_CC_ELEMENTWISE_CASES_CUH_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/elementwise/elementwise.h"
#include "pass_test.cuh"

namespace jaxconv {

inline double Applied(ElementwiseOp op, double a, double b) {
  switch (op) {
    case ElementwiseOp::kAdd:
      return a + b;
    case ElementwiseOp::kSub:
      return a - b;
    case ElementwiseOp::kMul:
      return a * b;
    case ElementwiseOp::kDiv:
      return a / b;
    case ElementwiseOp::kMax:
      return std::max(a, b);
    case ElementwiseOp::kMin:
      return std::min(a, b);
    case ElementwiseOp::kNeg:
      return -a;
    case ElementwiseOp::kRsqrt:
      return 1 / std::sqrt(a);
    case ElementwiseOp::kSqrt:
      return std::sqrt(a);
    case ElementwiseOp::kRoundF16:
      return Rounded(DType::kF16, a);
    case ElementwiseOp::kRoundBf16:
      return Rounded(DType::kBF16, a);
  }
  return 0;
}

// Several functions in one launch: conversions between all types, sums of all steps, the vectors of
// a batch norm; results of one element, of less than a CTA and of several CTAs, and operands of one
// number.
inline void ElementwiseCases(PassTest& test) {
  using Op = ElementwiseOp;
  auto work = std::make_unique<Elementwise>();
  work->function[0] = {1, 0, 0, {}, {}};
  // gain * rsqrt(max(variance, 1) + 3), offset - mean * scale
  work->function[1] = {
      2, 2, 4, {1, 3}, {{Op::kMax, 1, 2}, {Op::kAdd, 4, 3}, {Op::kRsqrt, 5, 5}, {Op::kMul, 0, 6}}};
  work->function[2] = {3, 0, 2, {}, {{Op::kMul, 1, 2}, {Op::kSub, 0, 3}}};
  // bfloat16(-(a * a)), float16(sqrt(|.|)), divided and bounded
  work->function[3] = {2,
                       1,
                       7,
                       {2},
                       {{Op::kMul, 0, 0},
                        {Op::kRoundBf16, 3, 3},
                        {Op::kSqrt, 4, 4},
                        {Op::kRoundF16, 5, 5},
                        {Op::kDiv, 6, 2},
                        {Op::kMin, 7, 1},
                        {Op::kNeg, 8, 8}}};
  work->functions = 4;
  struct Case {
    int function;
    int64_t elements;
    DType from, to;
    int one_number;
  };
  constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
  std::vector<Case> cases;
  for (const DType from : kTypes) {
    for (const DType to : kTypes) cases.push_back({0, 2048 + 17, from, to, 0});
  }
  for (const int64_t elements : {1, 255, 6000}) {
    cases.push_back({0, elements, DType::kF32, DType::kBF16, 0});
    for (int function = 1; function < 4; ++function) {
      cases.push_back({function, elements, DType::kF32, DType::kF32, 0});
      cases.push_back({function, elements, DType::kBF16, DType::kF16, elements > 1 ? 2 : 0});
    }
  }
  test.Begin("several");
  std::vector<std::unique_ptr<DeviceArray>> results, operands;
  std::vector<std::vector<std::vector<double>>> drawn;
  for (const Case& c : cases) {
    ElementwiseResult& of = work->of[work->results++];
    of = {};
    drawn.emplace_back();
    for (int i = 0; i < work->function[c.function].operands; ++i) {
      const bool one = (c.one_number >> i & 1) != 0;
      drawn.back().push_back(test.Drawn(one ? 1 : c.elements));
      operands.push_back(std::make_unique<DeviceArray>(c.from, drawn.back().back()));
      of.operand[i] = operands.back()->data(), of.operand_type[i] = c.from;
    }
    results.push_back(std::make_unique<DeviceArray>(c.to, c.elements));
    of.result = results.back()->data(), of.type = c.to;
    of.elements = static_cast<uint32_t>(c.elements);
    of.function = static_cast<uint8_t>(c.function);
    of.one_number = static_cast<uint8_t>(c.one_number);
  }
  test.Launched(LaunchElementwise(work.get(), nullptr));
  for (size_t at = 0; at < cases.size(); ++at) {
    const Case& c = cases[at];
    auto defined = [&] {
      const ElementwiseFunction& function = work->function[c.function];
      std::vector<double> expected;
      for (int64_t i = 0; i < c.elements; ++i) {
        std::vector<double> values;
        for (const std::vector<double>& operand : drawn[at]) {
          values.push_back(operand[operand.size() > 1 ? i : 0]);
        }
        values.insert(values.end(), function.constant, function.constant + function.constants);
        for (int s = 0; s < function.steps; ++s) {
          const ElementwiseStep& step = function.step[s];
          values.push_back(Applied(step.op, values[step.first], values[step.second]));
        }
        expected.push_back(Rounded(c.to, values.back()));
      }
      return expected;
    };
    const double ulp = c.to == DType::kF32 ? 1e-6 : c.to == DType::kF16 ? 1e-3 : 8e-3;
    test.Result("result", *results[at], defined, 1, 1, c.function == 0 ? 0 : ulp);
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_ELEMENTWISE_CASES_CUH_
