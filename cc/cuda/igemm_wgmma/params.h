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
// Filter-row: the largest distance in pixels between a filter row's first and last tap. 8 keeps the
// loads multiples of the swizzle's 1024 bytes.
inline constexpr int kMaxSpan = 8;
// Wgrad filter-row: taps of a filter row that one instruction multiplies, 64 channels each; pixels
// of a load.
inline constexpr int kWgradRowTaps = 3;
inline constexpr int kWgradRowPixels = 128;
// In TF32: pixels of a load; units of a tile, each a filter row and 64 channels.
inline constexpr int kTf32WgradRowPixels = 32;
inline constexpr int kTf32WgradRowUnits = 3;
// Counters of dynamic scheduling, one for each range of output channels.
inline constexpr int kTileCounters = 16;
// The largest portable cluster size.
inline constexpr int kMaxClusterCtas = 8;

// One stride residue class of output pixels (core/implicit_gemm.h) in TMA coordinates. Axes
// innermost first: w, h, d.
struct ResidueClass {
  int32_t rows = 0;      // of gemm_m: images times pixels
  int32_t k_blocks = 1;  // loads of activations: taps (filter-row: rows of taps) x channel blocks
  // 0, or past the last channel of both operands if no tap hits the source: the reduction is then
  // one k-block of zeros, so that the kernel meets no empty sum (no k-block where the kernel stores
  // zeros).
  int32_t channel0 = 0;
  FastDivmod count[3];    // pixels along each axis, padding columns included
  int32_t width = 0;      // of count[0], the pixels that are outputs
  int32_t lower[3] = {};  // first base pixel
  int32_t taps[3] = {1, 1, 1};
  int32_t offset0[3] = {}, offset_step[3] = {};  // offset of a tap from the base pixel, never
                                                 // negative
  int32_t filter0 = 0, filter_step[3] = {};      // the filter's linear tap
  int32_t residue[3] = {};                       // output pixel = residue + j * period
};

// The kernels' argument. Launch sets out, epilogue and counters; the plan sets the rest.
struct Params {
  void* out = nullptr;
  int32_t out_is_f32 = 0;           // else the operand type
  int32_t images = 1;               // of one batch
  int32_t pixels = 1;               // wgrad: output pixels of one batch's images
  int32_t gemm_n = 1;               // per group
  int32_t rank = 2;                 // spatial axes of the tensor map; 0: rows of a matrix
  int32_t src_step[3] = {1, 1, 1};  // base pixels from one output pixel to the next
  FastDivmod channel_blocks;        // channel blocks under one tap
  // Digits of a tile index, fastest first: n tiles (so that concurrent CTAs share the activations
  // in L2), m tiles, slices, groups, batches, residue classes.
  FastDivmod n_tiles, m_tiles, slices, groups, batches;
  FastDivmod cluster;  // CTAs that share a tile; 1 in all forms but cluster
  int32_t tiles = 0;
  int32_t residue_classes = 1;
  int32_t k_blocks_per_slice = 0;
  int32_t filter_taps = 1;           // of one batch
  int32_t a_group = 0, b_group = 0;  // channels from one group to the next
  // Whether the rows of gemm_m are the output pixels in order.
  int32_t dense_rows = 1;
  int32_t period[3] = {1, 1, 1};
  int32_t out_extent[3] = {1, 1, 1};
  int32_t out_channels = 1;
  int32_t row_channels = 1;  // wgrad: C / groups, rows under one tap
  // Patches: a column is (row of a patch, element of that row). The elements of a row, and the
  // elements between the end of one row and the start of the next.
  FastDivmod patch_row;
  int32_t patch_skip = 0;
  int64_t out_batch = 0;
  int32_t out_group = 0;
  int64_t slice_elements = 0;  // of one slice's partial result; 0: the output itself is written
  EpilogueParams epilogue;
  ResidueClass residue_class[kMaxResidueClasses];
  // Pointwise, dynamic scheduling: the number of tiles taken from each range of output channels,
  // beyond every CTA's first. Null: static round-robin.
  int32_t* counters = nullptr;
};

// The parameters of Launch: the kernel's, the tensor maps' extents, the grid, the kernels before
// and after this one and their workspace.
struct LaunchParams {
  Params kernel;
  int64_t a_channels = 0;           // channels of a pixel
  int64_t a_extent[3] = {1, 1, 1};  // pixels, innermost first
  int64_t a_images = 0;             // all batches
  int32_t a_upper[kMaxResidueClasses][3] = {};
  // The filter as a tensor (taps of all batches, C / groups, K), transposed or stored as krsc
  // (taps, K, C / groups); wgrad: dy as (batch, pixels, K). Strides in elements, 0: dense.
  int64_t b_columns = 0, b_rows = 0, b_taps = 0;
  int64_t b_row_stride = 0, b_tap_stride = 0;
  // Wgrad filter-row: dy's pixels, innermost first, and the columns of zeros after each row.
  int64_t b_extent[3] = {1, 1, 1};
  int32_t b_upper = 0;

  int32_t ctas = 0;
  // A kernel before this one transposes the filter into the workspace: b_taps matrices of b_columns
  // rows.
  bool transposes_filter = false;
  bool resets_counters = false;
  int64_t partial_offset = 0;   // bytes in the workspace
  int64_t reduced_slices = 1;   // split-K slices that a reduction sums
  int64_t output_elements = 0;  // output elements of that reduction
  bool output_is_f32 = false;
  // Statistics: the place of the tiles' moments in the workspace, and their extents.
  int64_t moments_offset = 0;
  MomentSlots moments;
  int64_t rows = 0;  // rows of the output
  // 3xTF32: a kernel before this one splits the filter into the workspace, which b_* above
  // describe. Otherwise no matrices.
  FilterSplit filter_split;
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_PARAMS_H_
