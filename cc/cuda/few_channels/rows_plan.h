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

// Outputs of a row, the columns of a wgmma, and output channels of a CTA.
inline constexpr int kRowPixels = 112;
inline constexpr int kRowChannels = 64;
inline constexpr int kRowConsumers = 2;  // warpgroups
inline constexpr int kPairSlots = 8;     // pairs of image rows with four channels a pixel
// Warpgroups that copy rows, and pairs of image rows as they lie in x, of each of them. With few
// products for a row the copies take longest; with many a second warpgroup only takes issue slots.
constexpr int RowProducers(int filter_rows) { return filter_rows < 5 ? 2 : 1; }
constexpr int RawPairs(int filter_rows) { return filter_rows < 5 ? 4 : 6; }

// Chunks of 16 bytes, two pixels of four channels each, that the windows of a row of y begin in or
// reach.
constexpr int RowChunks(int filter_columns) { return kRowPixels + (filter_columns + 1) / 2 - 1; }
// A row of the ring: its pairs of pixels, and the same with zeros for the second one.
constexpr int RowBytes(int filter_columns) { return 2 * 16 * RowChunks(filter_columns); }

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
  int32_t units = 1;            // rows of y, kRowPixels wide, of a batch
  FastDivmod out_rows, strips;  // rows of y; tiles of kRowPixels columns across
  FastDivmod column_parts;      // of kRowChannels output channels
  int32_t batch_images = 1;     // images of a batch
  int64_t w_batch = 0;          // elements of a batch's filter
  // A row as it lies in x begins with the chunk of the tile's first element, lead elements earlier.
  int32_t lead = 0, raw_chunks = 1;
  EpilogueParams epilogue;
  int64_t shared_bytes = 0;
  int64_t grid_x = 1, grid_y = 1;
};

// row_pairs_sm90.cuh: lines of z, floats from one to the next (banks of four lines differ), and
// those in front of its first column; the ones around its columns stay zero.
inline constexpr int kZLines = 64, kZPitch = 120, kZLead = 4;
inline constexpr int kZFloats = kZLines * kZPitch;

// The parameter block of row_pairs_sm90.cuh.
struct PairsParams {
  const void* w = nullptr;
  void* dx = nullptr;
  int32_t images = 1, batch_images = 1;  // of all batches, and of one
  int64_t w_batch = 0;
  int32_t c = 1, k = 8;
  int32_t in_rows = 1, in_columns = 1, dy_rows = 1, dy_columns = 1;
  int32_t pad_rows = 0, pad_columns = 0;
  int32_t units = 1;  // pairs of rows of dx, a strip wide, of a batch
  FastDivmod out_rows, strips;
  // A pair of rows (columns) is named after the row (column) of dy that tap 0 of its second one
  // lies on. first_row, first_pair_column: of the first pair; first_column: the first column of dy
  // of the first strip.
  int32_t first_row = 0, first_pair_column = 0, first_column = 0;
  int32_t pair_columns = 1, strip_columns = 1;  // pairs of a row, and of a strip
  int32_t whole_words = 0;                      // pairs of pixels begin at multiples of 4 bytes
  int64_t shared_bytes = 0;
  int64_t grid_x = 1, grid_y = 1;
};

// A line of kernels.def, of rows_sm90.cuh or row_pairs_sm90.cuh.
struct RowsInstance {
  int32_t filter_rows, filter_columns;
};
struct RowPairsInstance : RowsInstance {};

Status PlanRows(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan);
Status PlanRowPairs(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                    int64_t slices, Plan* plan);

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_ROWS_PLAN_H_
