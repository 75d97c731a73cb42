// Elementwise functions of many small arrays by one launch: functions of a program's parameters
// that calls read, such as filters converted to bfloat16 and the scale and bias of a batch norm.
// XLA launches a kernel of 1.5 us for each.
//
// A function is computed in float32. Its values have consecutive indices: operands, constants, then
// the result of each step; the last value is the result, rounded to its type. A step reads two
// values; unary operations ignore the second.
#ifndef JAXCONV_CUDA_ELEMENTWISE_ELEMENTWISE_H_
#define JAXCONV_CUDA_ELEMENTWISE_ELEMENTWISE_H_

#include <cstdint>
#include <string_view>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv {

enum class ElementwiseOp : uint8_t {
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMax,
  kMin,
  kNeg,
  kRsqrt,
  kSqrt,
  kRoundF16,  // to float16 and back
  kRoundBf16,
};
// By ElementwiseOp, as in a call's attributes.
inline constexpr std::string_view kElementwiseNames[] = {
    "add", "sub", "mul", "div", "max", "min", "neg", "rsqrt", "sqrt", "float16", "bfloat16"};

inline constexpr int kElementwiseOperands = 6, kElementwiseConstants = 4, kElementwiseSteps = 12;
inline constexpr int kElementwiseValues =
    kElementwiseOperands + kElementwiseConstants + kElementwiseSteps;
// Functions and results of a launch, whose parameters have at most 32,764 bytes.
inline constexpr int kElementwiseFunctions = 32, kElementwiseResults = 256;

struct ElementwiseStep {
  ElementwiseOp op;
  uint8_t first, second;
};

struct ElementwiseFunction {
  uint8_t operands, constants, steps;
  float constant[kElementwiseConstants];
  ElementwiseStep step[kElementwiseSteps];
};

// A result of `elements` elements. Each operand has as many elements, or one.
struct ElementwiseResult {
  const void* operand[kElementwiseOperands];
  void* result;
  uint32_t elements, first_cta;
  DType operand_type[kElementwiseOperands], type;
  uint8_t function;
  uint8_t one_number;  // a bit for each operand
};

struct Elementwise {
  int functions, results;
  ElementwiseFunction function[kElementwiseFunctions];
  ElementwiseResult of[kElementwiseResults];
};

// Sets `first_cta` and launches. Unimplemented: a type that is no float32, float16 or bfloat16.
Status LaunchElementwise(Elementwise* work, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_ELEMENTWISE_ELEMENTWISE_H_
