// The parameters of an epilogue. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_COMMON_EPILOGUE_PARAMS_H_
#define JAXCONV_CUDA_COMMON_EPILOGUE_PARAMS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/epilogue.h"

namespace jaxconv {

// The sums of a channel's elements and of their squares over some rows.
struct ChannelSums {
  double sum, squares;
};

// t = scale * sum + bias + residual; y = activation(t), then rounded to the output type. Scale and
// bias hold one float for each output channel. The residual, and `pre` to which t is stored, have
// the output's shape and type. Null omits a term.
struct EpilogueParams {
  const float* scale = nullptr;
  const float* bias = nullptr;
  const void* residual = nullptr;
  void* pre = nullptr;
  Activation activation = Activation::kNone;
  float negative_slope = 0;  // for kLeakyRelu
  // Where the sums of y are written, for each slot and channel (merge_moments.h); null: no
  // statistics. Each consumer of a CTA adds its share of the first joined_tiles tiles into one of
  // the first joined_slots slots; each further tile has its own slot.
  ChannelSums* moments = nullptr;
  int32_t joined_tiles = 0, joined_slots = 0;

  EpilogueParams() = default;
  // The fields that a plan knows; a launch sets the pointers.
  explicit EpilogueParams(const Epilogue& epilogue)
      : activation(epilogue.activation), negative_slope(epilogue.negative_slope) {}
};

// Bytes that an epilogue moves in addition to the result: the residual and the pre-activation.
inline int64_t EpilogueBytes(const ConvProblem& problem) {
  const int tensors = int{problem.epilogue.residual} + int{problem.epilogue.pre};
  return tensors * problem.y_elements() * ByteWidth(problem.y_dtype);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_EPILOGUE_PARAMS_H_
