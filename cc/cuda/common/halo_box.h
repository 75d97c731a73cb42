// Host and device: the geometry of kernels that compute a tile of window positions from a box of
// the gathered tensor in shared memory (halo_box.cuh), and shared parts of their plans. Plain C++.
#ifndef JAXCONV_CUDA_COMMON_HALO_BOX_H_
#define JAXCONV_CUDA_COMMON_HALO_BOX_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/fast_divmod.h"
#include "core/status.h"
#include "cuda/common/epilogue_params.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"

namespace jaxconv {

inline constexpr int kHaloThreads = 256;

// One axis. A kernel computes window positions o of the walked tensor from elements i of the
// gathered tensor: o reads i under a tap if i * in_dilation = u = o * stride + tap * dilation -
// pad. In dgrad the walked tensor is dx, the gathered one dy, in_dilation the convolution's stride,
// and the taps run backwards.
struct Axis {
  int32_t in = 1, out = 1;  // extents of the gathered and of the walked tensor
  int32_t taps = 1;
  int32_t stride = 1, dilation = 1, pad = 0;
  FastDivmod in_dilation;
  int32_t tile = 1;  // window positions of a tile
  int32_t box = 1;   // u of a tile
  FastDivmod tiles;
  // For kernels that handle in_dilation = 2, where elements lie at even u only: a box holds them
  // without the zeros between (halved is 1, in_dilation 1), and the first tile begins `shift`
  // positions before 0, so that every tile's first u is even.
  int32_t halved = 0, shift = 0;
};

// The parameters common to these kernels, a part of the family's parameter block.
struct HaloParams {
  // The launch sets the pointers.
  const void* gathered = nullptr;  // x of fprop and wgrad, dy of dgrad
  const void* walked = nullptr;    // wgrad: dy
  const void* filter = nullptr;    // fprop and dgrad
  void* out = nullptr;             // y, dx, or the partial sums of dw
  Axis axis[3];                    // depth, rows, columns
  int32_t images = 1;              // images of all filters of a batch
  int32_t tile_images = 1;         // of a tile, which has a box for each
  FastDivmod image_tiles;          // of all filters
  FastDivmod images_divmod;        // of one filter
  int32_t filters = 1;             // of a batch
  int64_t filter_stride = 0;       // elements from a filter of the batch to the next
  int32_t channels = 1;            // of the result: of y and dw K, of dx C
  int32_t gathered_channels = 1;
  FastDivmod channel_tiles;
  // Channel o of the result depends on channels o / repeat * reduce + j of the gathered tensor, j <
  // reduce. For depthwise with K = m C, repeat = m in fprop and wgrad, reduce = m in dgrad.
  FastDivmod repeat;
  int32_t reduce = 1;
  int32_t vector = 0;  // channels are copied by 16 bytes
  int32_t flip = 0;    // taps run backwards
  int32_t out_is_f32 = 0;
  FastDivmod box_columns, tile_columns;
  int32_t items = 0;  // channel tiles x image tiles x tiles; wgrad: without the channel tiles
  // fprop and dgrad: each CTA has items_of_cta items, the first longer_ctas CTAs one more.
  int32_t items_of_cta = 0, longer_ctas = 0;
  int32_t stage_bytes = 0;
  int32_t slices = 1;  // wgrad: each takes every slices-th item
  EpilogueParams epilogue;
};

// The parameter block of a plan. Params: the family's.
template <class Params>
struct HaloLaunch {
  Params kernel;
  int64_t ctas = 0;
  int64_t shared_bytes = 0;
  int64_t out_elements = 0;  // wgrad
  DType out_dtype = DType::kF32;
};

// A shorter slice takes longer to fill its stages than to sum.
inline constexpr int64_t kMinItemsOfSlice = 4;

// Fills the fields that depend only on the problem and are common to all families: the axes (tiles
// of one position along the depth, not yet shaped along rows and columns), the batch, the output.
void DescribeAxes(const ConvProblem& problem, HaloParams* params);

// Refuses dilation, and strides other than `stride`, along rows and columns.
Status CheckStride(const ConvProblem& problem, int64_t stride);

// Makes the boxes hold elements of in_dilation 2 without the zeros between, along rows and columns.
void HalveBoxes(HaloParams* params);

// Tiles the rows and columns by tile_rows x tile_columns positions, whose boxes hold the window's
// row_taps and all its columns. False where a box is wider than any shared memory.
bool ShapeBox(int64_t tile_rows, int64_t tile_columns, int64_t row_taps, HaloParams* params);

// Counts the items for tiles of tile_channels channels: fills images, channel_tiles and items of
// `params`, whose tiles are shaped. A tile's images share a filter, so tile_images is 1 with a
// batch of filters.
Status CountItems(const ConvProblem& problem, int64_t tile_channels, HaloParams* params);

// Distributes the items of an fprop or dgrad over at most `resident` CTAs; returns their number.
int64_t ShareItems(int64_t resident, HaloParams* params);

// Splits a wgrad of `parts` CTAs a slice, after CountItems: into `slices` slices, or into as many
// as fill `resident` CTAs with at least min_items each. Fills plan->slices, the workspace and the
// CTAs.
Status CutIntoSlices(const ConvProblem& problem, int64_t parts, int64_t resident, int64_t slices,
                     HaloParams* params, int64_t* ctas, Plan* plan,
                     int64_t min_items = kMinItemsOfSlice);

// CTAs that share an SM, at most `most`.
int64_t CtasOfSm(int64_t most, int64_t shared_bytes, const Gpu& gpu);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_HALO_BOX_H_
