// The parameter block of block_diagonal. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "cuda/common/epilogue_params.h"
#include "cuda/common/halo_box.h"

namespace jaxconv::block_diagonal {

inline constexpr int kThreads = kHaloThreads, kWarps = kThreads / 32;
// Channels of a tile: 128 bytes of a pixel.
inline constexpr int kChannels = 64;

// What the kernels get. A launch sets the pointers.
struct Params : HaloParams {
  const void* walked = nullptr;  // wgrad: dy
  const void* filter = nullptr;  // fprop and dgrad
  void* out = nullptr;           // y, dx, or the partial sums of dw
  int32_t out_is_f32 = 0;
  int32_t group = 1;  // channels of a group, of x and of y
  // Of the filter, in elements: from a tap to the next, from a gathered channel of a group to the next,
  // from a channel of the result to the next, from a filter of the batch to the next. flip: taps run
  // backwards.
  int64_t tap_stride = 1, reduction_stride = 1, channel_stride = 1, group_stride = 1;
  int64_t filter_stride = 0;
  int32_t flip = 0;
  int32_t items = 0;  // channel tiles x images x tiles; wgrad: without the channel tiles
  int32_t stage_bytes = 0;
  FastDivmod tile_columns;
  int32_t tile_pixels = 1;
  // wgrad: each slice takes every slices-th item; a CTA has one filter row of one depth tap.
  int32_t slices = 1;
  int32_t filters = 1;  // of a batch
  EpilogueParams epilogue;
};

// The parameter block of a plan.
struct LaunchParams {
  Params kernel;
  int64_t ctas = 0;
  int64_t shared_bytes = 0;
  int64_t out_elements = 0;
  DType out_dtype = DType::kF32;
};

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_PARAMS_H_
