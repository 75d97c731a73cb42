// The error of activations and of their derivatives: of those for 16-bit results on every number of
// bfloat16 and float16, of those for float32 results on every number of bfloat16.
//
//     activations
//
// prints, for each type and function, the largest error of an activation relative to its result, and
// of a derivative relative to max(1, result); and "not" where one of them is NaN alone.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "cc/epilogue_reference.h"
#include "cuda/common/activation.cuh"
#include "cuda/normalisation/derivative.cuh"
#include "round.h"

namespace jaxconv {
namespace {

// Below, an activation may be zero.
constexpr double kLeast = 1e-36;

struct Error {
  double largest = 0;
  bool not_a_number = false;

  void Add(double actual, double expected, double unit) {
    if (std::isnan(expected) || std::isnan(actual)) {
      not_a_number |= std::isnan(expected) != std::isnan(actual);
    } else if (actual != expected) {
      largest = std::fmax(largest, std::fabs(actual - expected) / unit);
    }
  }
  void Print(const char* type, const char* name) const {
    std::printf("%s %s %.2e%s\n", type, name, largest, not_a_number ? " not" : "");
  }
};

template <typename T, class Number>
void Check(const char* type) {
  const struct {
    const char* name;
    Activation activation;
    Derivative derivative;
  } functions[] = {{"silu", Activation::kSilu, Derivative::kSilu},
                   {"sigmoid", Activation::kSigmoid, Derivative::kSigmoid},
                   {"gelu", Activation::kGelu, Derivative::kGelu},
                   {"gelu_tanh", Activation::kGeluTanh, Derivative::kGeluTanh},
                   {"tanh", Activation::kTanh, Derivative::kTanh}};
  for (const auto& function : functions) {
    Error value, slope;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const float v = static_cast<float>(Number::Value(static_cast<uint16_t>(bits)));
      float result[1] = {v}, derivative[1] = {v};
      ActivateSlow<T>(function.activation, result);
      Differentiate<T>(function.derivative, 0, derivative);
      // -inf gives inf * 0 in the definitions too.
      const double expected = ActivateReference(function.activation, 0, v);
      value.Add(result[0], std::fabs(expected) < kLeast ? result[0] : expected,
                std::fabs(expected));
      if (std::isinf(v)) {  // v times a function's derivative of 0 there
        const bool times_v =
            function.activation != Activation::kSigmoid && function.activation != Activation::kTanh;
        slope.Add(derivative[0], times_v ? NAN : 0, 1);
        continue;
      }
      // Beyond, the cube overflows in the program too.
      if (function.activation == Activation::kGeluTanh && std::fabs(v) > 7e12f) continue;
      const double h = std::fmax(1e-6, std::fabs(v) * 1e-6);
      const double rise = ActivateReference(function.activation, 0, v + h) -
                          ActivateReference(function.activation, 0, v - h);
      slope.Add(derivative[0], rise / (2 * h), std::fmax(1, std::fabs(rise / (2 * h))));
    }
    value.Print(type, function.name);
    slope.Print(type, (std::string(function.name) + "'").c_str());
  }
}

}  // namespace
}  // namespace jaxconv

int main() {
  jaxconv::Check<__nv_bfloat16, emulator::Bfloat16>("bfloat16");
  jaxconv::Check<__half, emulator::Float16>("float16");
  jaxconv::Check<float, emulator::Bfloat16>("float32");
  return 0;
}
