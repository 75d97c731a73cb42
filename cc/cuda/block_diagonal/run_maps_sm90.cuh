// The tensor maps and launches of runs_sm90.cuh, phases_sm90.cuh, rows_sm90.cuh and
// wgrad_runs_sm90.cuh.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_RUN_MAPS_SM90_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_RUN_MAPS_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/block_diagonal/params.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.h"

namespace jaxconv::block_diagonal {

// Boxes of the gathered tensor: every `step`-th column from column `first` on. `whole_f32`: float32
// elements are not rounded to TF32.
inline Status EncodeGathered(DType dtype, const Params& params, const void* gathered, int32_t step,
                             int32_t first, CUtensorMap* map, bool whole_f32 = false) {
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  DenseTensor tensor;
  tensor.dtype = dtype;
  tensor.whole_f32 = whole_f32;
  tensor.rank = 4;
  const int64_t bytes = ByteWidth(dtype);
  tensor.address = static_cast<const char*>(gathered) + first * params.channels * bytes;
  tensor.extent[0] = params.channels;
  tensor.extent[1] = (columns.in - first + step - 1) / step;
  tensor.extent[2] = rows.in;
  tensor.extent[3] = int64_t{params.images} * params.run_filters;
  tensor.stride[1] = int64_t{params.channels} * step;
  tensor.stride[2] = int64_t{params.channels} * columns.in;
  tensor.stride[3] = tensor.stride[2] * rows.in;
  const int32_t box[] = {TileChannels(static_cast<int>(ByteWidth(dtype))), columns.box, rows.box,
                         params.tile_images};
  return EncodeTiledMap(tensor, box, map);
}

// Tiles of the other tensor, `rows` by `columns`.
inline Status EncodeWalked(DType dtype, const Params& params, const void* walked, int32_t rows,
                           int32_t columns, CUtensorMap* map, bool whole_f32 = false) {
  DenseTensor tensor;
  tensor.dtype = dtype;
  tensor.whole_f32 = whole_f32;
  tensor.rank = 4;
  tensor.address = walked;
  tensor.extent[0] = params.channels;
  tensor.extent[1] = params.axis[2].out;
  tensor.extent[2] = params.axis[1].out;
  tensor.extent[3] = int64_t{params.images} * params.run_filters;
  const int32_t box[] = {TileChannels(static_cast<int>(ByteWidth(dtype))), columns, rows,
                         params.tile_images};
  return EncodeTiledMap(tensor, box, map);
}

// Single rows of a pair's images, with some columns and channels. Images precede rows in the
// dimensions of the map.
inline Status EncodeRows(DType dtype, const Params& params, const void* address, int32_t rows,
                         int32_t columns, int32_t box_channels, int32_t box_columns,
                         CUtensorMap* map, bool whole_f32 = false) {
  DenseTensor tensor;
  tensor.dtype = dtype;
  tensor.whole_f32 = whole_f32;
  tensor.rank = 4;
  tensor.address = address;
  tensor.extent[0] = params.channels;
  tensor.extent[1] = columns;
  tensor.extent[2] = params.images;
  tensor.extent[3] = rows;
  tensor.stride[1] = params.channels;
  tensor.stride[3] = int64_t{params.channels} * columns;
  tensor.stride[2] = tensor.stride[3] * rows;
  const int32_t box[] = {box_channels, box_columns, params.pair_images, 1};
  return EncodeTiledMap(tensor, box, map);
}

inline LaunchConfig RunConfig(const LaunchParams& launch, int threads, bool overlaps) {
  LaunchConfig config;
  config.grid = static_cast<unsigned>(launch.ctas);
  config.threads = threads;
  config.overlaps = overlaps;
  config.shared_bytes = launch.shared_bytes;
  return config;
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_RUN_MAPS_SM90_CUH_
