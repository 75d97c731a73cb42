// The parameters of the tensor-core implicit GEMM. Plain data, made on the host without CUDA
// headers.
#ifndef JAXCONV_CUDA_DEVICE_IGEMM_WMMA_PARAMS_H_
#define JAXCONV_CUDA_DEVICE_IGEMM_WMMA_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "core/implicit_gemm.h"

namespace jaxconv {

// y = activation(scale * sum + bias + residual), then rounded to the output type. Scale and bias
// have one float for each output channel, the residual has the output's shape and type; null leaves
// a term out.
enum class Activation : int32_t { kNone, kRelu, kRelu6, kLeakyRelu, kGelu, kSilu };

struct EpilogueParams {
  const float* scale = nullptr;
  const float* bias = nullptr;
  const void* residual = nullptr;
  Activation activation = Activation::kNone;
  float negative_slope = 0;  // of kLeakyRelu
};

struct IgemmWmmaParams {
  ImplicitGemm gemm;
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  int32_t out_is_f32 = 0;  // else the operand type
  int32_t out_vector = 0;  // rows of the output are aligned to 16 bytes and a multiple of them
  // Bytes of one copy: 16, 8, 4 or 2, the most that the channel counts allow.
  int32_t a_copy_bytes = 16, b_copy_bytes = 16;
  // The taps of the one phase are the filter's, in order, so that the filter is one matrix.
  int32_t all_taps = 1;
  // A one-dimensional grid: n tiles fastest, so that neighbours share their rows of A; then
  // m tiles, split-K slices, batch * groups, phases (the ones with most taps first).
  FastDivmod n_tiles, m_tiles, slices, batch_groups;
  int32_t blocks_per_slice = 0;  // stages of one slice
  int64_t slice_elements = 0;    // of one slice's partial result; 0: the output itself is written
  EpilogueParams epilogue;
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_DEVICE_IGEMM_WMMA_PARAMS_H_
