// The parameters of an epilogue. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_COMMON_EPILOGUE_PARAMS_H_
#define JAXCONV_CUDA_COMMON_EPILOGUE_PARAMS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/epilogue.h"

namespace jaxconv {

// Of some rows of a channel: the sum of its elements, and of their squares.
struct ChannelSums {
  double sum, squares;
};

// t = scale * sum + bias + residual; y = activation(t), then rounded to the output type. Scale and
// bias have one float for each output channel, the residual has the output's shape and type, and so
// has `pre`, to which t is stored. Null leaves a term out.
struct EpilogueParams {
  const float* scale = nullptr;
  const float* bias = nullptr;
  const void* residual = nullptr;
  void* pre = nullptr;
  Activation activation = Activation::kNone;
  float negative_slope = 0;  // of kLeakyRelu
  // Where the sums of y are wanted (merge_moments.h): for each slot and channel, behind so many
  // counters, which the kernel sets to 0. Null: they are not. The first tiles of rows are joined,
  // by each consumer of a CTA in one of the first slots; each further tile has a slot of its own.
  ChannelSums* moments = nullptr;
  int32_t joined_tiles = 0, joined_slots = 0;
  int32_t moment_counters = 0;

  EpilogueParams() = default;
  // What a plan knows; the pointers come with a launch.
  explicit EpilogueParams(const Epilogue& epilogue)
      : activation(epilogue.activation), negative_slope(epilogue.negative_slope) {}
};

// Bytes that an epilogue moves beside the result: the residual and the result before activation.
inline int64_t EpilogueBytes(const ConvProblem& problem) {
  const int tensors = int{problem.epilogue.residual} + int{problem.epilogue.pre};
  return tensors * problem.y_elements() * ByteWidth(problem.y_dtype);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_EPILOGUE_PARAMS_H_
