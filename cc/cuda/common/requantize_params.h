// The parameters of the int8 families' epilogue. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_COMMON_REQUANTIZE_PARAMS_H_
#define JAXCONV_CUDA_COMMON_REQUANTIZE_PARAMS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/fast_divmod.h"
#include "cuda/common/kernel.h"

namespace jaxconv {

// Straight code for common layers, so that the epilogue stays in the instruction cache; general
// code for all others.
enum class RequantizePath : int32_t {
  kS8,  // one scale per channel; bias and ReLU optional
  kS8Residual,
  kU8,
  kU8Residual,
  kSums,  // int32 sums unchanged, or as float32
  kGeneral,
};

// core/epilogue.h has the formula. Null leaves a term out.
struct RequantizeParams {
  void* out = nullptr;
  const float* scale = nullptr;
  const int32_t* offset = nullptr;
  const float* bias = nullptr;
  const void* residual = nullptr;
  const float* residual_scale = nullptr;
  RequantizePath path = RequantizePath::kGeneral;
  DType out_dtype = DType::kS8;
  Activation activation = Activation::kNone;
  uint32_t kept_negative = ~0u;  // bits of a negative byte that stay: none with ReLU
  int32_t zero_point = 0;
  int32_t image_channels = 0;  // from one image's scales to the next; 0: all images share them
  // Strides of the output in elements: pixels of an image, from one pixel to the next, from one
  // image to the next, from one block of 32 channels to the next.
  FastDivmod pixels;
  int32_t pixel_stride = 0;
  int64_t image_stride = 0, block_stride = 0;
};

inline RequantizePath PathOf(const ConvProblem& problem) {
  const Epilogue& terms = problem.epilogue;
  const bool bytes = ByteWidth(problem.y_dtype) == 1;
  if (terms.Plain() && (problem.y_dtype == DType::kS32 || problem.y_dtype == DType::kF32)) {
    return RequantizePath::kSums;
  }
  if (bytes && terms.scale == ScaleKind::kChannel && !terms.offset && terms.zero_point == 0 &&
      terms.activation <= Activation::kRelu) {
    if (problem.y_dtype == DType::kS8) {
      return terms.residual ? RequantizePath::kS8Residual : RequantizePath::kS8;
    }
    return terms.residual ? RequantizePath::kU8Residual : RequantizePath::kU8;
  }
  return RequantizePath::kGeneral;
}

inline RequantizeParams MakeRequantizeParams(const ConvProblem& problem) {
  RequantizeParams params;
  params.path = PathOf(problem);
  params.out_dtype = problem.y_dtype;
  params.activation = problem.epilogue.activation;
  if (params.activation == Activation::kRelu) params.kept_negative = 0;
  params.zero_point = static_cast<int32_t>(problem.epilogue.zero_point);
  if (problem.epilogue.scale == ScaleKind::kImage) {
    params.image_channels = static_cast<int32_t>(problem.k);
  }
  const bool blocked = problem.activation_layout == ActivationLayout::kNchw32;
  params.pixels = FastDivmod(problem.out_pixels());
  params.pixel_stride = static_cast<int32_t>(blocked ? 32 : problem.k);
  params.image_stride = problem.out_pixels() * problem.k;
  params.block_stride = blocked ? problem.out_pixels() * 32 : 32;
  return params;
}

// The pointers of a launch.
inline void BindRequantize(const Operands& operands, RequantizeParams* params) {
  params->out = operands.out;
  params->scale = operands.scale;
  params->offset = operands.offset;
  params->bias = operands.bias;
  params->residual = operands.residual;
  params->residual_scale = operands.residual_scale;
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_REQUANTIZE_PARAMS_H_
