// The parameter block of depthwise. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_DEPTHWISE_PARAMS_H_
#define JAXCONV_CUDA_DEPTHWISE_PARAMS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/fast_divmod.h"
#include "cuda/common/epilogue_params.h"

namespace jaxconv::depthwise {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;

// One axis: window position o of the walked tensor meets element i of the gathered one under a tap
// where i * in_dilation = u = o * stride + tap * dilation - pad. In dgrad the walked tensor is dx, the
// gathered one is dy, its dilation is the convolution's stride, and the taps run backwards.
struct Axis {
  int32_t in = 1, out = 1;  // extents of the gathered and of the walked tensor
  int32_t taps = 1;
  int32_t stride = 1, dilation = 1, pad = 0;
  FastDivmod in_dilation;
  int32_t tile = 1;  // window positions of a tile
  int32_t box = 1;   // u of a tile
  FastDivmod tiles;
};

// What the kernels get. A launch sets the pointers.
struct Params {
  const void* gathered = nullptr;  // x of fprop and wgrad, dy of dgrad
  const void* walked = nullptr;    // wgrad: dy
  const void* filter = nullptr;    // fprop and dgrad
  void* out = nullptr;             // y, dx, or the partial sums of dw
  Axis axis[3];                    // depth, rows, columns
  int32_t out_is_f32 = 0;
  int32_t images = 1;        // of one filter
  FastDivmod images_divmod;  // of one filter
  int32_t channels = 1;      // of the result: of y and dw K, of dx C
  int32_t gathered_channels = 1;
  FastDivmod channel_tiles;
  // Channel o of the result meets channels o / repeat * reduce + j of the gathered tensor, j < reduce:
  // of K = m C fprop and wgrad repeat m times, dgrad reduces m.
  FastDivmod repeat;
  int32_t reduce = 1;
  int32_t vector = 0;  // channels are copied by 16 bytes
  // Of the filter, in elements: from a tap to the next, from a channel to the next, from a filter to
  // the next. flip: taps run backwards.
  int32_t tap_stride = 1, channel_stride = 1;
  int64_t filter_stride = 0;
  int32_t flip = 0;
  // A tile's blocks of outputs, one a warp (toeplitz.cuh: strips, kChannels / 8 warps each).
  int32_t blocks_across = 1, blocks_down = 1;
  FastDivmod box_columns;
  int32_t items = 0;  // channel tiles x images x tiles; wgrad: without the channel tiles
  int32_t steps = 1;  // of an item: depth taps x reduced channels (x filter rows)
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
