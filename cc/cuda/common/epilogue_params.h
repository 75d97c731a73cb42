// The parameters of an epilogue. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_COMMON_EPILOGUE_PARAMS_H_
#define JAXCONV_CUDA_COMMON_EPILOGUE_PARAMS_H_

#include <cstdint>

#include "core/epilogue.h"

namespace jaxconv {

// y = activation(scale * sum + bias + residual), then rounded to the output type. Scale and bias
// have one float for each output channel, the residual has the output's shape and type. Null leaves
// a term out.
struct EpilogueParams {
  const float* scale = nullptr;
  const float* bias = nullptr;
  const void* residual = nullptr;
  Activation activation = Activation::kNone;
  float negative_slope = 0;  // of kLeakyRelu
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_EPILOGUE_PARAMS_H_
