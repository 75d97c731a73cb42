// The parameters of igemm_wgmma. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_DEVICE_IGEMM_WGMMA_PARAMS_H_
#define JAXCONV_CUDA_DEVICE_IGEMM_WGMMA_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/device/igemm_wmma_params.h"

namespace jaxconv {

// Strided gradients make one phase for each residue of the stride; a map for each must fit in the
// kernel's parameters.
inline constexpr int kMaxWgmmaPhases = 8;
// Pixels that the taps of a filter row may reach over, where they share one load: 8, so that slots
// stay multiples of the swizzle's 1024 bytes.
inline constexpr int kMaxWgmmaSpan = 8;
// wgrad in rows: taps of a filter row that one instruction multiplies, 64 columns each; pixels of a
// step.
inline constexpr int kWgradRowTaps = 3;
inline constexpr int kWgradRowsPixels = 128;

// Ranges of columns, each with a counter of tiles that are drawn.
inline constexpr int kWgmmaDrawCounters = 16;
// CTAs of a cluster that every device has room for.
inline constexpr int kMaxWgmmaCluster = 8;

// One phase (core/implicit_gemm.h) as the copy engine walks it. Axes innermost first: w, h, d.
struct WgmmaPhase {
  int32_t rows = 0;   // of gemm_m: images times pixels
  int32_t steps = 1;  // loads of activations: taps (rows of taps) times slabs
  // 0; where no tap hits anything, past the last channel of both operands: one step of zeros, so
  // that the kernel never meets an empty sum (or none, where it stores zeros).
  int32_t channel0 = 0;
  FastDivmod count[3];    // pixels of an axis, as walked
  int32_t width = 0;      // of count[0], those that are outputs
  int32_t lower[3] = {};  // of the box of base pixels
  int32_t taps[3] = {1, 1, 1};
  int32_t offset0[3] = {}, offset_step[3] = {};  // of a tap from the base pixel, never negative
  int32_t filter0 = 0, filter_step[3] = {};      // the filter's linear tap
  int32_t phase[3] = {};                         // output pixel = phase + j * period
};

struct IgemmWgmmaParams {
  void* out = nullptr;
  int32_t out_is_f32 = 0;           // else the operand type
  int32_t images = 1;               // of one batch
  int32_t pixels = 1;               // wgrad: of one batch's images
  int32_t gemm_n = 1;               // per group
  int32_t rank = 2;                 // spatial axes that the copy engine walks; 0: rows of a matrix
  int32_t src_step[3] = {1, 1, 1};  // base pixels from one output pixel to the next
  FastDivmod slabs;                 // of a step's channels under one tap
  // Neighbours of a tile index: n tiles fastest, so that CTAs running at the same time share the
  // activations in L2, then m tiles, slices, groups, batches,
  // phases.
  FastDivmod n_tiles, m_tiles, slices, groups, batches;
  FastDivmod cluster;  // CTAs that share a tile; other kernels than igemm_wgmma_cluster: 1
  int32_t tiles = 0;
  int32_t phases = 1;
  int32_t steps_per_slice = 0;
  int32_t filter_taps = 1;           // of one batch
  int32_t a_group = 0, b_group = 0;  // channels from one group to the next
  // Where a row of an output lies: dense rows are the output's pixels in order.
  int32_t dense_rows = 1;
  int32_t period[3] = {1, 1, 1};
  int32_t out_extent[3] = {1, 1, 1};
  int32_t out_channels = 1;
  int32_t row_channels = 1;  // wgrad: C / groups, rows under one tap
  int64_t out_batch = 0;
  int32_t out_group = 0;
  int64_t slice_elements = 0;  // of one slice's partial result; 0: the output itself is written
  EpilogueParams epilogue;
  WgmmaPhase phase[kMaxWgmmaPhases];
  // One tap: how many tiles of each range of columns are taken, beyond every CTA's first; null:
  // tiles go round by turns.
  int32_t* drawn = nullptr;
};

// What the tensor maps need beside the parameters.
struct WgmmaOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  int64_t a_channels = 0;           // of a pixel
  int64_t a_extent[3] = {1, 1, 1};  // pixels, innermost first
  int64_t a_images = 0;             // all batches
  int32_t a_upper[kMaxWgmmaPhases][3] = {};
  // The filter as a tensor (taps of all batches, C / groups, K), transposed or stored as krsc
  // (taps, K, C / groups); wgrad: dy as (batch, pixels, K). Strides in elements, 0: dense.
  int64_t b_columns = 0, b_rows = 0, b_taps = 0;
  int64_t b_row_stride = 0, b_tap_stride = 0;
  // wgrad in rows: dy's pixels, innermost first, and how far its walk runs past a row's end.
  int64_t b_extent[3] = {1, 1, 1};
  int32_t b_upper = 0;
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_DEVICE_IGEMM_WGMMA_PARAMS_H_
