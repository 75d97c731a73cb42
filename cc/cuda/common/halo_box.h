// Host and device: the geometry of kernels that compute a tile of window positions from its box of the
// gathered tensor in shared memory (halo_box.cuh), and what their plans share. Plain C++.
#ifndef JAXCONV_CUDA_COMMON_HALO_BOX_H_
#define JAXCONV_CUDA_COMMON_HALO_BOX_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/fast_divmod.h"
#include "core/status.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

inline constexpr int kHaloThreads = 256;

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

// Geometry of a launch, a part of the family's parameter block.
struct HaloParams {
  const void* gathered = nullptr;  // x of fprop and wgrad, dy of dgrad; the launch sets it
  Axis axis[3];                    // depth, rows, columns
  int32_t images = 1;              // of all filters of a batch
  FastDivmod images_divmod;        // of one filter
  int32_t channels = 1;            // of the result: of y and dw K, of dx C
  int32_t gathered_channels = 1;
  FastDivmod channel_tiles;
  // Channel o of the result meets channels o / repeat * reduce + j of the gathered tensor, j < reduce:
  // of K = m C a depthwise fprop and wgrad repeat m times, dgrad reduces m.
  FastDivmod repeat;
  int32_t reduce = 1;
  int32_t vector = 0;  // channels are copied by 16 bytes
  FastDivmod box_columns;
};

// Fills the axes, whose tiles are not shaped but along the depth, where a tile is one position.
void DescribeAxes(const ConvProblem& problem, HaloParams* params);

// Refuses other strides than `stride`, and dilation, of rows and columns.
Status CheckStride(const ConvProblem& problem, int64_t stride);

// Tiles the rows and columns by tile_rows x tile_columns positions, whose boxes hold the window's
// row_taps and all its columns. False where a box is wider than any shared memory.
bool ShapeBox(int64_t tile_rows, int64_t tile_columns, int64_t row_taps, HaloParams* params);

// The items of tiles of so many channels: fills images and channel_tiles of `params`, whose tiles are
// shaped. *of_channels: the items of one channel tile.
Status CountItems(const ConvProblem& problem, int64_t tile_channels, HaloParams* params,
                  int64_t* of_channels);

// CTAs that share an SM, at most `most`.
int64_t CtasOfSm(int64_t most, int64_t shared_bytes, const Gpu& gpu);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_HALO_BOX_H_
