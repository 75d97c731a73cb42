// The parameters of imma_wgmma. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_IMMA_WGMMA_PARAMS_H_
#define JAXCONV_CUDA_IMMA_WGMMA_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/common/requantize_params.h"

namespace jaxconv::imma_wgmma {

// A k-block: bytes of the reduction in a stage, and of one instruction.
inline constexpr int32_t kKBlockBytes = 128;
inline constexpr int32_t kStepBytes = 32;
inline constexpr int32_t kSteps = kKBlockBytes / kStepBytes;
// Filter-row reuse: the largest distance in pixels between a filter row's first and last tap. 8
// keeps the copies multiples of the swizzle's pattern.
inline constexpr int32_t kMaxSpan = 8;
inline constexpr int32_t kMaxRowTaps = kMaxSpan + 1;

// The digits of a number of units, or of a unit's position; taps innermost first.
struct UnitDigits {
  int32_t tap[3] = {}, channels = 0;
};

// The kernels' argument. Axes innermost first: w, h, d.
//
// A unit is one TMA copy: unit_bytes channels of every pixel of a tile under one tap (with
// filter-row reuse: under a filter row). A stage holds 128 / unit_bytes units and serves one
// k-block of the filter (with filter-row reuse: row_taps k-blocks).
struct Params {
  RequantizeParams requantize;
  int32_t rows = 1;             // of gemm_m: images times base pixels
  int32_t columns = 1;          // output channels of a group
  int32_t tiles = 0;            // of all groups
  FastDivmod n_tiles, m_tiles;  // digits of a tile index, fastest first; then groups
  int32_t rank = 2;             // spatial axes of the tensor map; 0: rows of a matrix
  int32_t nchw32 = 0;           // coordinates are (w, h, channel block, image)
  FastDivmod count[3];          // base pixels along each axis
  int32_t width = 1;            // of count[0], the pixels that are outputs
  int32_t lower[3] = {};        // first base pixel
  int32_t step[3] = {1, 1, 1};  // base pixels from one output pixel to the next
  int32_t offset0[3] = {}, offset_step[3] = {1, 1, 1};  // of a tap from the base pixel
  int32_t taps[3] = {1, 1, 1};       // taps over which units run; with filter-row reuse taps[0] is
                                     // 1
  int32_t channel_units = 1;         // of a tap
  int32_t unit_channels = 1;         // from one unit to the next, as a coordinate
  int32_t group_channels = 1;        // from one group to the next, as a coordinate
  int32_t taps_first = 0;            // the order of units: taps fastest, or channels
  int32_t units = 1;                 // of the reduction
  UnitDigits one_unit, stage_units;  // the next unit; the same unit of the next stage
  UnitDigits first[kSteps];          // the units of the first k-block
  int32_t k_blocks = 1;              // stages of a tile
  // Stages from full_k_blocks on have fewer instructions: last_steps in all, at most tail_steps for
  // a k-block of the filter.
  int32_t full_k_blocks = 0, last_steps = kSteps, tail_steps = kSteps;
  int32_t row_taps = 1;  // taps of a unit
  // The offset of a k-block in a packed row of the filter: 128 bytes further for each k-block; with
  // units of 128 bytes and taps fastest: tap * tap_bytes + channel unit * 128.
  int32_t tap_bytes = 0;
  int32_t unit_bytes = kKBlockBytes, units_of_k_block = 1;
  // Descriptors of A: the upper word; the offset / 16 of each instruction's 32 bytes from the start
  // of the stage, and from one block of 64 rows to the next.
  uint32_t descriptor = 0;
  uint32_t step_offset[kMaxRowTaps * kSteps] = {};
  uint32_t block_offset = 0;
};

// The parameters of Launch: the kernel's, the tensor maps' extents and the grid.
struct LaunchParams {
  Params kernel;
  int64_t images = 1, channels = 1;  // of x
  int64_t extent[3] = {1, 1, 1};     // of x, innermost first
  int32_t upper[3] = {};
  int64_t filters = 1, filter_row = 1;  // the packed filter: rows, and bytes of a row
  bool swap_ab = false;
  int32_t ctas = 0;
};

}  // namespace jaxconv::imma_wgmma

#endif  // JAXCONV_CUDA_IMMA_WGMMA_PARAMS_H_
