// The parameter block of depthwise. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_DEPTHWISE_PARAMS_H_
#define JAXCONV_CUDA_DEPTHWISE_PARAMS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "cuda/common/epilogue_params.h"
#include "cuda/common/halo_box.h"

namespace jaxconv::depthwise {

inline constexpr int kThreads = kHaloThreads, kWarps = kThreads / 32;

// What the kernels get. A launch sets the pointers.
struct Params : HaloParams {
  const void* walked = nullptr;  // wgrad: dy
  const void* filter = nullptr;  // fprop and dgrad
  void* out = nullptr;           // y, dx, or the partial sums of dw
  int32_t out_is_f32 = 0;
  // Of the filter, in elements: from a tap to the next, from a channel to the next, from a filter to
  // the next. flip: taps run backwards.
  int32_t tap_stride = 1, channel_stride = 1;
  int64_t filter_stride = 0;
  int32_t flip = 0;
  // A tile's blocks of outputs, one a warp (toeplitz.cuh: strips, kChannels / 8 warps each).
  int32_t blocks_across = 1, blocks_down = 1;
  int32_t items = 0;  // channel tiles x images x tiles; wgrad: without the channel tiles
  int32_t stage_bytes = 0;
  // toeplitz.cuh: box rows of a stage; bytes from a channel's plane to the next and from a row to the
  // next; where the band lies in shared memory.
  int32_t stage_rows = 0, plane_bytes = 0, plane_row_bytes = 0, band_offset = 0;
  // wgrad: each slice takes every slices-th item.
  int32_t slices = 1;
  int32_t tap_parts = 1;  // groups of taps, each with CTAs of its own
  int32_t filters = 1;    // of a batch
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

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_PARAMS_H_
