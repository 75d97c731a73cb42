// Shared by the kernels of block_diagonal: the layout of pixels in shared memory, and the tables of
// a tile's positions.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_TILE_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_TILE_CUH_

#include <cstdint>

#include "cuda/block_diagonal/params.h"
#include "cuda/common/halo_box.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::block_diagonal {

// A tile's channels of a pixel.
struct PaddedPixel {
  static constexpr int kBytes = kPixelBytes, kChunks = kTileBytes / 16;
  __device__ static int32_t Offset(int32_t i, int chunk) { return i * kBytes + chunk * 16; }
};

// The index of the thread's warp, as a value that the compiler knows to be uniform in the warp.
__device__ __forceinline__ int UniformWarp() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
}

// Tables in shared memory describe the positions of a tile and the pixels of a box, so that loops
// over them do not divide. An entry has the row in the upper 16 bits of a word and the column in
// the lower ones, then an offset from the first entry. Missing positions are beyond every limit and
// have offset 0.
__device__ __forceinline__ void StorePlace(uint32_t table, int32_t i, bool exists, int32_t row,
                                           int32_t column, int32_t distance) {
  const uint32_t row_column = static_cast<uint32_t>(row) << 16 | static_cast<uint32_t>(column);
  StoreWord(table + i * kPlaceBytes, exists ? row_column : 0x7fff7fffu);
  StoreWord(table + i * kPlaceBytes + 4, exists ? static_cast<uint32_t>(distance) : 0);
}

// outputs: for positions, with offsets in pixels of the output. boxes: for the same positions, with
// offsets in bytes of the box under the first tap. gathered: for the pixels of the box, with
// offsets in pixels of the gathered tensor if it is not dilated. With several images, whose boxes
// are consecutive, the rows of `gathered` are numbered through all of them, and missing rows are
// beyond every limit of columns.
struct Tables {
  uint32_t outputs, boxes, gathered;
  __device__ __forceinline__ explicit Tables(uint32_t first)
      : outputs(first),
        boxes(first + kPositions * kPlaceBytes),
        gathered(first + 2 * kPositions * kPlaceBytes) {}
};
__device__ __forceinline__ void FillTables(const Params& params, int32_t row_tap,
                                           const Tables& to) {
  static_assert(kPositions == kThreads);
  const Axis &depths = params.axis[0], &rows = params.axis[1], &columns = params.axis[2];
  const auto position = static_cast<int32_t>(threadIdx.x);
  const bool exists = position < params.tile_pixels;
  int32_t row, column;
  params.tile_columns.Divmod(position, &row, &column);
  const int32_t image = row / rows.tile;
  row -= image * rows.tile;
  StorePlace(to.outputs, position, exists, row, column,
             (image * depths.out * rows.out + row) * columns.out + column);
  StorePlace(to.boxes, position, exists, row, column,
             (image * rows.box + row * rows.stride) * params.box_row_bytes +
                 column * columns.stride * kPixelBytes);
  for (int32_t i = threadIdx.x; i < params.box_pixels; i += kThreads) {
    params.box_columns.Divmod(i, &row, &column);
    const int32_t of_image = row / rows.box, in_image = row - of_image * rows.box;
    const bool has = params.tile_images == 1 ||
                     jaxconv::Inside(in_image + row_tap * rows.dilation - rows.pad, rows.in);
    StorePlace(to.gathered, i, true, row, has ? column : 0x7fff,
               (of_image * depths.in * rows.in + in_image) * columns.in + column);
  }
}

// The first and last row and column of a tile or box inside a tensor, each with a bit that is
// cleared by borrowing if a row or column is outside.
constexpr uint32_t kBorrowed = 0x80008000u;
__device__ __forceinline__ uint32_t Limit(int32_t row, int32_t column) {
  return static_cast<uint32_t>(row) << 16 | static_cast<uint32_t>(column);
}
__device__ __forceinline__ uint32_t Limits(const Params& params, const TilePlace& tile) {
  return kBorrowed | Limit(min(params.axis[1].out - tile.row, params.axis[1].tile) - 1,
                           min(params.axis[2].out - tile.column, params.axis[2].tile) - 1);
}
__device__ __forceinline__ bool InTile(uint32_t limits, uint32_t row_column) {
  return ((limits - row_column) & kBorrowed) == kBorrowed;
}

// Starts copying the box of a tile for one depth tap and, if a box has the pixels of one filter
// row, for one row tap; with zeros outside the gathered tensor. Requires HaloParams::vector. The
// common FillBox, which uses no tables, needs 21 instructions for each chunk instead of 15.
template <typename T>
__device__ __forceinline__ void CopyBox(const Params& params, const TilePlace& tile,
                                        int32_t depth_tap, int32_t row_tap, uint32_t table,
                                        uint32_t to) {
  using P = PaddedPixel;
  constexpr int kStep = kThreads / P::kChunks;
  const Axis &depths = params.axis[0], &rows = params.axis[1], &columns = params.axis[2];
  const int32_t depth =
      ElementAt(depths, tile.depth * depths.stride + depth_tap * depths.dilation - depths.pad);
  const int32_t first_row = tile.row * rows.stride + row_tap * rows.dilation - rows.pad;
  const int32_t first_column = tile.column * columns.stride - columns.pad;
  const int chunk = threadIdx.x % P::kChunks, pixel = threadIdx.x / P::kChunks;
  const int32_t channel = tile.first_channel + chunk * (16 / int{sizeof(T)});
  const bool some = depth >= 0 && channel < params.channels;
  const T* first =
      static_cast<const T*>(params.gathered) + channel +
      (int64_t{tile.image} * depths.in + max(depth, 0)) * rows.in * columns.in * params.channels;
  const int32_t pitch = params.channels * int32_t{sizeof(T)};
  const uint32_t behind_row = params.box_row_bytes - columns.box * P::kBytes;
  int32_t left = params.box_pixels - pixel;
  to += P::Offset(pixel, chunk);
  table += pixel * kPlaceBytes;
  if (rows.in_dilation.divisor == 1 && columns.in_dilation.divisor == 1) {
    const bool all_rows = params.tile_images > 1;
    const int32_t last_row = all_rows ? 0x7fff : min(rows.box, rows.in - first_row) - 1;
    const int32_t last_column = min(columns.box, columns.in - first_column) - 1;
    const bool any = some && last_row >= 0 && last_column >= 0;
    // Added to an entry, these keep the bit from the first row and column on.
    const uint32_t from = kBorrowed - Limit(all_rows ? 0 : min(max(-first_row, 0), rows.box),
                                            min(max(-first_column, 0), columns.box));
    const uint32_t until = kBorrowed | Limit(max(last_row, 0), max(last_column, 0));
    // May point before the tensor; elements outside are not read.
    first += (int64_t{first_row} * columns.in + first_column) * params.channels;
    for (; left > 0; left -= kStep) {
      uint32_t row_column, moved;
      LoadPair(table, &row_column, &moved);
      const bool valid = ((row_column + from) & (until - row_column) & kBorrowed) == kBorrowed;
      CopyAsync<16>(to + (row_column >> 16) * behind_row,
                    OffsetBytes(first, static_cast<int32_t>(moved), pitch), any && valid);
      table += kStep * kPlaceBytes, to += kStep * P::kBytes;
    }
    return;
  }
#pragma unroll 1
  for (; left > 0; left -= kStep) {
    const uint32_t row_column = LoadWord(table);
    const int32_t row = ElementAt(rows, first_row + static_cast<int32_t>(row_column >> 16));
    const int32_t column =
        ElementAt(columns, first_column + static_cast<int32_t>(row_column & 0xffff));
    CopyAsync<16>(to + (row_column >> 16) * behind_row,
                  OffsetBytes(first, row * columns.in + column, pitch),
                  some && row >= 0 && column >= 0);
    table += kStep * kPlaceBytes, to += kStep * P::kBytes;
  }
}

// The pixel of the output at a tile's first position.
__device__ __forceinline__ int64_t FirstPixel(const Params& params, const TilePlace& tile) {
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  return ((int64_t{tile.image} * params.axis[0].out + tile.depth) * rows.out + tile.row) *
             columns.out +
         tile.column;
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_TILE_CUH_
