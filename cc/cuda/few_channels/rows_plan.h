#ifndef JAXCONV_CUDA_FEW_CHANNELS_ROWS_PLAN_H_
#define JAXCONV_CUDA_FEW_CHANNELS_ROWS_PLAN_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/fast_divmod.h"
#include "core/status.h"
#include "cuda/common/epilogue_params.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"

namespace jaxconv::few_channels {

// kRowPixels: columns of dy in a wgmma of row_pairs_sm90.cuh. Both kernels: output channels of a
// CTA, consumer warpgroups.
inline constexpr int kRowPixels = 112;
inline constexpr int kRowChannels = 64;
inline constexpr int kRowConsumers = 2;
inline constexpr int kPairSlots = 8;  // row_pairs_sm90.cuh: rows of dy in the ring
// rows_sm90.cuh: pixels of x in which the windows of a row of y begin.
inline constexpr int kStripPixels = 224;

// A line of kernels.def for rows_sm90.cuh or row_pairs_sm90.cuh, and the shape of rows_sm90.cuh
// that follows from it. A chunk is 16 bytes: a pair of pixels with four channels each.
struct RowsInstance {
  int32_t filter_rows, filter_columns, stride = 2;

  // Outputs of a row, the columns of a wgmma.
  JAXCONV_HOST_DEVICE constexpr int32_t pixels() const { return kStripPixels / stride; }
  JAXCONV_HOST_DEVICE constexpr int32_t window_pairs() const { return (filter_columns + 1) / 2; }
  // The distance between windows in chunks. Chunk j of every window is stored in plane j % planes,
  // so that the chunks of neighbouring windows are neighbours.
  JAXCONV_HOST_DEVICE constexpr int32_t planes() const { return stride / 2; }
  JAXCONV_HOST_DEVICE constexpr int32_t plane_chunks() const {
    return pixels() + (window_pairs() + planes() - 1) / planes() - 1;
  }
  // The distance between planes in chunks. Neighbouring chunks of two planes have no bank
  // conflicts.
  JAXCONV_HOST_DEVICE constexpr int32_t pitch() const {
    return planes() == 1 ? plane_chunks() : (plane_chunks() + 3) / 8 * 8 + 4;
  }
  // A row of the ring: its planes and, if windows end in the middle of a chunk, a second copy of
  // the plane of their last chunks with zeros for the second pixel.
  JAXCONV_HOST_DEVICE constexpr int32_t row_bytes() const {
    return 16 * pitch() * (planes() + filter_columns % 2);
  }
  JAXCONV_HOST_DEVICE constexpr int32_t ring_pairs() const {
    return 8 * planes();
  }  // of image rows
  // Warpgroups that copy rows, and the number of pairs of unmodified image rows that each holds.
  JAXCONV_HOST_DEVICE constexpr int32_t producers() const {
    return filter_rows < 5 || stride > 2 ? 2 : 1;
  }
  JAXCONV_HOST_DEVICE constexpr int32_t raw_pairs() const { return producers() == 2 ? 4 : 6; }
  // A staged row of y, in whole matrices of 16 pixels.
  JAXCONV_HOST_DEVICE constexpr int32_t staged_bytes() const {
    return (pixels() + 15) / 16 * 16 * kRowChannels * 2;
  }
  // The place of the staged rows; the filter passes through it first.
  JAXCONV_HOST_DEVICE constexpr int32_t first_bytes() const {
    const int32_t filter_bytes = filter_rows * filter_columns * 4 * kRowChannels * 2;
    const int32_t staged = kRowConsumers * staged_bytes();
    return filter_bytes > staged ? filter_bytes : staged;
  }
};
struct RowPairsInstance : RowsInstance {};

// A line of kernels.def for row_windows_sm90.cuh: rows of the filter, planes of 8 elements of a
// filter row, the stride of rows, warpgroups with 64 output channels each, and rows of dy in their
// ring.
struct RowWindowsInstance {
  int32_t filter_rows, row_planes, stride, consumers, gradient_rows;

  // Warpgroups that spread rows of x, groups of rows in the rings of planes and of unmodified rows.
  static constexpr int32_t kSpreaders = 2, kGroups = 8, kRawGroups = 4;

  JAXCONV_HOST_DEVICE constexpr int32_t columns() const { return filter_rows * row_planes * 8; }
  // Groups of `stride` rows of x in a window.
  JAXCONV_HOST_DEVICE constexpr int32_t window_groups() const {
    return (filter_rows + stride - 1) / stride;
  }
  // Pixels of a strip: 64, or 112 and 128 too.
  JAXCONV_HOST_DEVICE constexpr int32_t most_pixels() const { return stride > 2 ? 64 : 128; }
};

// The parameter block of row_windows_sm90.cuh. A launch sets the pointer.
struct WindowsParams {
  void* out = nullptr;                   // float32 sums, one filter after another
  int64_t out_elements = 0;              // of all batches' filters
  int64_t w_batch = 0;                   // of a batch's filter
  int32_t images = 1, batch_images = 1;  // of all batches; of one batch
  int32_t k = 8, row_elements = 1;       // output channels; elements of a filter row
  int32_t x_rows = 1, x_row_words = 2;   // words of 8 bytes
  int32_t out_columns = 1, pad_rows = 0;
  int32_t units = 1;            // rows of y in strips, of one batch
  FastDivmod out_rows, strips;  // rows of y; strips across
  FastDivmod column_parts;      // of 64 channels for each consumer
  int32_t pixels = 64;          // of a strip
  // The first word of the first strip, negative with padding; the words from strip to strip; the bytes
  // from the first word to pixel 0's window and from window to window; the elements of padding.
  int32_t first_word = 0, strip_words = 0, lead_bytes = 0, step_bytes = 2, left_elements = 0;
  int32_t raw_row_bytes = 16, raw_group_bytes = 128;
  int64_t shared_bytes = 0;
  int64_t grid_x = 1, grid_y = 1;
};

// The parameter block of rows_sm90.cuh. A launch sets the pointers.
struct RowsParams {
  const void* x = nullptr;
  const void* w = nullptr;
  void* y = nullptr;
  int32_t images = 1;  // of all batches
  int32_t c = 1, k = 1;
  int32_t in_rows = 1, row_elements = 8;  // of x
  int32_t out_columns = 1;
  int32_t pad_rows = 0, pad_columns = 0;
  int32_t units = 1;            // rows of y in strips, of one batch
  FastDivmod out_rows, strips;  // rows of y; strips across
  FastDivmod column_parts;      // of kRowChannels output channels
  int32_t batch_images = 1;     // images of a batch
  int64_t w_batch = 0;          // elements of a batch's filter
  // An unmodified row begins with the chunk that contains the tile's first element, lead elements
  // before this element.
  int32_t lead = 0, raw_chunks = 1;
  EpilogueParams epilogue;
  int64_t shared_bytes = 0;
  int64_t grid_x = 1, grid_y = 1;
};

// row_pairs_sm90.cuh: lines of z, the distance between lines in floats (four lines use different
// banks), and the floats before the first column. The floats around the columns stay zero.
inline constexpr int kZLines = 64, kZPitch = 120, kZLead = 4;
inline constexpr int kZFloats = kZLines * kZPitch;

// The parameter block of row_pairs_sm90.cuh.
struct PairsParams {
  const void* w = nullptr;
  void* dx = nullptr;
  int32_t images = 1, batch_images = 1;  // of all batches; of one batch
  int64_t w_batch = 0;
  int32_t c = 1, k = 8;
  int32_t in_rows = 1, in_columns = 1, dy_rows = 1, dy_columns = 1;
  int32_t pad_rows = 0, pad_columns = 0;
  int32_t units = 1;  // pairs of rows of dx in strips, of one batch
  FastDivmod out_rows, strips;
  // The number of a pair of rows (columns) is the row (column) of dy under tap 0 of its second row
  // (column). first_row, first_pair_column: the number of the first pair; first_column: the first
  // column of dy in the first strip.
  int32_t first_row = 0, first_pair_column = 0, first_column = 0;
  int32_t pair_columns = 1, strip_columns = 1;  // pairs in a row, and in a strip
  int32_t whole_words = 0;                      // pairs of pixels begin at multiples of 4 bytes
  int64_t shared_bytes = 0;
  int64_t grid_x = 1, grid_y = 1;
};

Status PlanRows(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan);
Status PlanRowPairs(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                    int64_t slices, Plan* plan);
Status PlanRowWindows(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                      int64_t slices, Plan* plan);

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_ROWS_PLAN_H_
