// What a convolution does with its sums before it stores them. Part of the problem, because kernels
// are chosen and planned for it; the operands themselves come with each launch.
#ifndef JAXCONV_CORE_EPILOGUE_H_
#define JAXCONV_CORE_EPILOGUE_H_

#include <cstdint>

namespace jaxconv {

enum class Activation : int32_t { kNone, kRelu, kRelu6, kLeakyRelu, kGelu, kSilu };

// kChannel: one factor for each output channel. kImage: one for each image and output channel.
enum class ScaleKind : int32_t { kNone, kChannel, kImage };

// Of 8-bit operands, with the int32 sum `acc` of an output element (image n, channel k):
//
//     a = acc + offset[k]
//     t = fma(float(a), scale, bias[k])               scale[k], or scale[n, k]
//     t = fma(residual_scale, float(residual), t)     residual of the output's shape and type
//     t = activation(t)
//
// in float32. An integer output is t rounded to the nearest, ties to even (NaN gives 0), plus
// zero_point, saturated; a float output is t rounded once. Absent terms are left out. Without a
// scale there are no other terms: integer outputs are the sum's low bits, float outputs the sum.
struct Epilogue {
  ScaleKind scale = ScaleKind::kNone;
  bool offset = false, bias = false, residual = false;
  Activation activation = Activation::kNone;
  int64_t zero_point = 0;  // of an 8-bit output

  bool Plain() const {
    return scale == ScaleKind::kNone && !offset && !bias && !residual &&
           activation == Activation::kNone && zero_point == 0;
  }
};

}  // namespace jaxconv

#endif  // JAXCONV_CORE_EPILOGUE_H_
