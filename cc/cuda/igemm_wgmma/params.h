// The parameters of igemm_wgmma. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_PARAMS_H_
#define JAXCONV_CUDA_IGEMM_WGMMA_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/common/epilogue_params.h"
#include "cuda/common/merge_moments.h"
#include "cuda/igemm_wgmma/filter_split.h"

namespace jaxconv::igemm_wgmma {

// Strided gradients have one class of output pixels for each residue of the stride; a tensor map
// for each must fit in the kernel's parameters.
inline constexpr int kMaxResidueClasses = 8;
// Filter-row: the distance in pixels from a filter row's first tap to its last, at most. 8 keeps
// the loads multiples of the swizzle's 1024 bytes.
inline constexpr int kMaxSpan = 8;
// Wgrad filter-row: taps of a filter row that one instruction multiplies, 64 channels each; pixels
// of a load.
inline constexpr int kWgradRowTaps = 3;
inline constexpr int kWgradRowPixels = 128;
// Counters of dynamic scheduling, one for each range of output channels.
inline constexpr int kTileCounters = 16;
// CTAs of a cluster, for which every GPU has room.
inline constexpr int kMaxClusterCtas = 8;

// One residue class of output pixels (a phase of core/implicit_gemm.h) as TMA walks it. Axes
// innermost first: w, h, d.
struct ResidueClass {
  int32_t rows = 0;      // of gemm_m: images times pixels
  int32_t k_blocks = 1;  // loads of activations: taps (filter-row: rows of taps) x channel blocks
  // 0; where no tap hits the source, past the last channel of both operands: one k-block of zeros,
  // so that the kernel never meets an empty sum (or none, where the kernel stores zeros).
  int32_t channel0 = 0;
  FastDivmod count[3];    // pixels of an axis, as walked
  int32_t width = 0;      // of count[0], the pixels that are outputs
  int32_t lower[3] = {};  // first base pixel
  int32_t taps[3] = {1, 1, 1};
  int32_t offset0[3] = {}, offset_step[3] = {};  // of a tap from the base pixel, never negative
  int32_t filter0 = 0, filter_step[3] = {};      // the filter's linear tap
  int32_t residue[3] = {};                       // output pixel = residue + j * period
};

// The kernels' argument. Launch sets out, epilogue and counters; the plan makes the rest.
struct Params {
  void* out = nullptr;
  int32_t out_is_f32 = 0;           // else the operand type
  int32_t images = 1;               // of one batch
  int32_t pixels = 1;               // wgrad: of one batch's images
  int32_t gemm_n = 1;               // per group
  int32_t rank = 2;                 // spatial axes that TMA walks; 0: rows of a matrix
  int32_t src_step[3] = {1, 1, 1};  // base pixels from one output pixel to the next
  FastDivmod channel_blocks;        // of a k-block's channels, under one tap
  // Digits of a tile index, fastest first: n tiles, so that CTAs running at the same time share the
  // activations in L2, then m tiles, slices, groups, batches, residue classes.
  FastDivmod n_tiles, m_tiles, slices, groups, batches;
  FastDivmod cluster;  // CTAs that share a tile; 1 in all forms but cluster
  int32_t tiles = 0;
  int32_t residue_classes = 1;
  int32_t k_blocks_per_slice = 0;
  int32_t filter_taps = 1;           // of one batch
  int32_t a_group = 0, b_group = 0;  // channels from one group to the next
  // Whether the rows of gemm_m are the output's pixels in order.
  int32_t dense_rows = 1;
  int32_t period[3] = {1, 1, 1};
  int32_t out_extent[3] = {1, 1, 1};
  int32_t out_channels = 1;
  int32_t row_channels = 1;  // wgrad: C / groups, rows under one tap
  // Patches: columns are (row of a patch, element of that row). Elements of a row, and what lies
  // between the end of one and the next.
  FastDivmod patch_row;
  int32_t patch_skip = 0;
  int64_t out_batch = 0;
  int32_t out_group = 0;
  int64_t slice_elements = 0;  // of one slice's partial result; 0: the output itself is written
  EpilogueParams epilogue;
  ResidueClass residue_class[kMaxResidueClasses];
  // Pointwise, dynamic scheduling: how many tiles of each range of output channels are taken,
  // beyond every CTA's first; null: static round-robin.
  int32_t* counters = nullptr;
};

// What Launch needs beside the kernel's parameters: the tensor maps' extents, the grid, the kernels
// around this one and their workspace.
struct LaunchParams {
  Params kernel;
  int64_t a_channels = 0;           // of a pixel
  int64_t a_extent[3] = {1, 1, 1};  // pixels, innermost first
  int64_t a_images = 0;             // all batches
  int32_t a_upper[kMaxResidueClasses][3] = {};
  // The filter as a tensor (taps of all batches, C / groups, K), transposed or stored as krsc
  // (taps, K, C / groups); wgrad: dy as (batch, pixels, K). Strides in elements, 0: dense.
  int64_t b_columns = 0, b_rows = 0, b_taps = 0;
  int64_t b_row_stride = 0, b_tap_stride = 0;
  // Wgrad filter-row: dy's pixels, innermost first, and how far its walk runs past a row's end.
  int64_t b_extent[3] = {1, 1, 1};
  int32_t b_upper = 0;

  int32_t ctas = 0;
  // The filter is transposed in front, b_taps matrices of b_columns rows, into the workspace.
  bool transposes_filter = false;
  bool resets_counters = false;
  int64_t partial_offset = 0;   // bytes in the workspace
  int64_t reduced_slices = 1;   // split-K slices that a reduction sums
  int64_t output_elements = 0;  // of them
  bool output_is_f32 = false;
  // Statistics: where the moments of tiles lie in the workspace, and what of.
  int64_t moments_offset = 0;
  MomentSlots moments;
  int64_t rows = 0;  // of the output
  // 3xTF32: the filter is split in front, into the workspace, where b_* above find it. Elsewhere no
  // matrices.
  FilterSplit filter_split;
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_PARAMS_H_
