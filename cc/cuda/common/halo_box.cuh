// For kernels that compute a tile of window positions from a box of the gathered tensor (halo tile)
// in shared memory: the position of a tile, and the copy of its box. Each CTA processes a range of
// consecutive items.
#ifndef JAXCONV_CUDA_COMMON_HALO_BOX_CUH_
#define JAXCONV_CUDA_COMMON_HALO_BOX_CUH_

#include <cstdint>
#include <cstring>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.h"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/splitk_reduce.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv {

// A pixel of a box: kLanes lanes of kVec channels. A warp reads neighbouring words, so no layout of
// the pixels has bank conflicts. With pixels of 64 bytes, the halves of a warp read two pixels;
// their numbers should differ by an odd number.
template <typename T, int kVec, int kLanes = 32>
struct Pixel {
  static constexpr int kChannels = kLanes * kVec;
  static constexpr int kBytes = kChannels * int{sizeof(T)};
  static constexpr int kChunks = kBytes / 16, kChunkChannels = 16 / int{sizeof(T)};
  // The offset of a chunk of pixel i.
  __device__ static int32_t Offset(int32_t i, int chunk) { return i * kBytes + chunk * 16; }
};

// A lane's channels of a pixel, as float32.
template <typename T, int kVec>
__device__ __forceinline__ void LoadLane(const unsigned char* pixel, float (&value)[kVec]) {
  if constexpr (kVec * sizeof(T) == 8) {
    const float2 pair = *reinterpret_cast<const float2*>(pixel);
    value[0] = pair.x, value[1] = pair.y;
  } else if constexpr (kVec == 2 && std::is_same_v<T, __nv_bfloat16>) {
    // bfloat16 is the upper half of a float32: a shift and a mask convert two. Element by element
    // it takes three instructions.
    const uint32_t word = *reinterpret_cast<const uint32_t*>(pixel);
    value[0] = __uint_as_float(word << 16), value[1] = __uint_as_float(word & 0xffff0000u);
  } else if constexpr (kVec == 2) {
    T pair[2];
    const uint32_t word = *reinterpret_cast<const uint32_t*>(pixel);
    memcpy(pair, &word, sizeof(word));
    value[0] = ToFloat(pair[0]), value[1] = ToFloat(pair[1]);
  } else {
    value[0] = ToFloat(*reinterpret_cast<const T*>(pixel));
  }
}

// A tile of window positions: the first position along each axis, its image and its channels.
struct TilePlace {
  int32_t depth, row, column, image, first_channel;
  bool exists = true;  // false: past the last image

  __device__ __forceinline__ TilePlace(const HaloParams& params, int32_t index, int tile_channels) {
    params.axis[2].tiles.Divmod(index, &index, &column);
    params.axis[1].tiles.Divmod(index, &index, &row);
    params.axis[0].tiles.Divmod(index, &index, &depth);
    column = column * params.axis[2].tile - params.axis[2].shift;
    row = row * params.axis[1].tile - params.axis[1].shift;
    // Images advance faster than channel tiles, so a CTA's next tile mostly has the same filter.
    params.image_tiles.Divmod(index, &first_channel, &image);
    image *= params.tile_images;
    first_channel *= tile_channels;
  }

  // The same tile in the i-th of its images; `images`: the number of images in all.
  __device__ __forceinline__ TilePlace OfImage(int32_t i, int32_t images) const {
    TilePlace tile = *this;
    tile.image += i;
    tile.exists = tile.image < images;
    return tile;
  }
};

// A step of a tile's sum: a tap along the depth, one of the reduced channels and, if a box holds
// the pixels of one filter row only, that row.
struct Step {
  int32_t depth_tap = 0, channel = 0, row_tap = 0;

  // False after the last step.
  __device__ __forceinline__ bool Next(const HaloParams& params, int32_t row_taps) {
    if (++row_tap < row_taps) return true;
    row_tap = 0;
    if (++channel < params.reduce) return true;
    channel = 0;
    return ++depth_tap < params.axis[0].taps;
  }
};

// A CTA's position in its items, first to end - 1, and their steps. The number of items differs by
// at most one between CTAs.
struct Cursor {
  int32_t item, end;
  Step step;
  __device__ __forceinline__ explicit Cursor(const HaloParams& params) {
    const auto cta = static_cast<int32_t>(blockIdx.x);
    item = cta * params.items_of_cta + min(cta, params.longer_ctas);
    end = item + params.items_of_cta + (cta < params.longer_ctas);
  }
  __device__ __forceinline__ bool Done() const { return item >= end; }
  __device__ __forceinline__ void Next(const HaloParams& params, int32_t row_taps) {
    if (step.Next(params, row_taps)) return;
    step = Step();
    ++item;
  }
};

// Iterates over the pixels of a box, or of another tile, that a thread copies: every (kHaloThreads
// / kChunks)-th, by additions only. P: the pixels' layout.
template <class P>
struct PixelWalk {
  int32_t pixel, row, column;
  __device__ __forceinline__ explicit PixelWalk(const FastDivmod& columns)
      : pixel(threadIdx.x / P::kChunks), columns_(static_cast<int32_t>(columns.divisor)) {
    // Otherwise the compiler would compute the steps before the kernel's loop and keep them: wgrad
    // of 7x7 would spill.
    asm volatile("" : "+r"(columns_));
    columns.Divmod(pixel, &row, &column);
    columns.Divmod(kStep, &row_step_, &column_step_);
  }
  __device__ __forceinline__ void Next() {
    pixel += kStep;
    row += row_step_;
    column += column_step_;
    if (column >= columns_) column -= columns_, ++row;
  }

 private:
  static constexpr int32_t kStep = kHaloThreads / P::kChunks;
  int32_t columns_, row_step_, column_step_;
};

__device__ __forceinline__ bool Inside(int32_t i, int32_t extent) {
  return static_cast<uint32_t>(i) < static_cast<uint32_t>(extent);
}

// The element of the gathered tensor at u, or -1.
__device__ __forceinline__ int32_t ElementAt(const Axis& axis, int32_t u) {
  int32_t element, rest;
  axis.in_dilation.Divmod(max(u, 0), &element, &rest);
  return u >= 0 && rest == 0 && element < axis.in ? element : -1;
}

// Starts to copy rows first_box_row to first_box_row + box_rows - 1 of the box of a tile and a step
// to `stage`: axis[2].box pixels each, from the tile's first u on, zeros where the gathered tensor
// has no element. P: the pixels' layout.
template <typename T, class P>
__device__ __forceinline__ void FillBox(const HaloParams& params, const TilePlace& tile,
                                        const Step& step, int32_t first_box_row, int32_t box_rows,
                                        unsigned char* stage) {
  const Axis &depths = params.axis[0], &rows = params.axis[1], &columns = params.axis[2];
  const int32_t depth =
      ElementAt(depths, tile.depth * depths.stride + step.depth_tap * depths.dilation - depths.pad);
  const int32_t first_row =
      ((tile.row * rows.stride + step.row_tap * rows.dilation - rows.pad) >> rows.halved) +
      first_box_row;
  const int32_t first_column = (tile.column * columns.stride - columns.pad) >> columns.halved;
  const int chunk = threadIdx.x % P::kChunks;
  const int32_t channel = tile.first_channel + chunk * P::kChunkChannels;
  const T* plane =
      static_cast<const T*>(params.gathered) + (int64_t{tile.image} * depths.in + max(depth, 0)) *
                                                   rows.in * columns.in * params.gathered_channels;
  const int32_t pixels = box_rows * columns.box;
  const bool some = tile.exists && depth >= 0 && channel < params.channels;
  PixelWalk<P> at(params.box_columns);
  if (params.vector) {
    // An invalid address is not read.
    const auto* from = reinterpret_cast<const unsigned char*>(plane + channel);
    const int32_t pitch = params.gathered_channels * int32_t{sizeof(T)};
    const uint32_t to = SharedAddress(stage);
    auto copy = [&](int32_t row, int32_t column, bool valid) {
      CopyAsync<16>(to + P::Offset(at.pixel, chunk),
                    from + int64_t{row * columns.in + column} * pitch, valid);
    };
    if (rows.in_dilation.divisor == 1 && columns.in_dilation.divisor == 1) {
      for (; at.pixel < pixels; at.Next()) {
        const int32_t row = first_row + at.row, column = first_column + at.column;
        copy(row, column, some && Inside(row, rows.in) && Inside(column, columns.in));
      }
    } else {
      for (; at.pixel < pixels; at.Next()) {
        const int32_t row = ElementAt(rows, first_row + at.row);
        const int32_t column = ElementAt(columns, first_column + at.column);
        copy(row, column, some && row >= 0 && column >= 0);
      }
    }
    return;
  }
  // Channels of 8 bits always fill chunks.
  if constexpr (sizeof(T) > 1) {
    for (; at.pixel < pixels; at.Next()) {
      const int32_t row = ElementAt(rows, first_row + at.row);
      const int32_t column = ElementAt(columns, first_column + at.column);
      const bool inside = tile.exists && depth >= 0 && row >= 0 && column >= 0;
      const T* pixel =
          plane + (inside ? (int64_t{row} * columns.in + column) * params.gathered_channels : 0);
      T elements[P::kChunkChannels];
#pragma unroll
      for (int e = 0; e < P::kChunkChannels; ++e) {
        const bool valid = inside && channel + e < params.channels;
        elements[e] = valid ? pixel[params.repeat.Div(channel + e) * params.reduce + step.channel]
                            : FromFloat<T>(0);
      }
      memcpy(stage + P::Offset(at.pixel, chunk), elements, 16);
    }
  }
}

// Starts to copy a tile of the walked tensor, zeros outside it. P: the pixels' layout.
template <typename T, class P>
__device__ __forceinline__ void FillWalked(const HaloParams& params, const TilePlace& tile,
                                           unsigned char* stage) {
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const int chunk = threadIdx.x % P::kChunks;
  const int32_t channel = tile.first_channel + chunk * P::kChunkChannels;
  const T* plane = static_cast<const T*>(params.walked) +
                   (int64_t{tile.image} * params.axis[0].out + tile.depth) * rows.out *
                       columns.out * params.channels;
  const int32_t pixels = rows.tile * columns.tile;
  PixelWalk<P> at(params.tile_columns);
  if (params.channels % P::kChunkChannels == 0) {
    const bool some = tile.exists && channel < params.channels;
    const auto* from = reinterpret_cast<const unsigned char*>(plane + channel);
    const int32_t pitch = params.channels * int32_t{sizeof(T)};
    for (; at.pixel < pixels; at.Next()) {
      const int32_t row = tile.row + at.row, column = tile.column + at.column;
      const bool valid = some && row < rows.out && column < columns.out;
      const int32_t pixel = valid ? row * columns.out + column : 0;
      CopyAsync<16>(SharedAddress(stage) + P::Offset(at.pixel, chunk),
                    from + int64_t{pixel} * pitch, valid);
    }
    return;
  }
  for (; at.pixel < pixels; at.Next()) {
    const int32_t row = tile.row + at.row, column = tile.column + at.column;
    const bool inside = tile.exists && row < rows.out && column < columns.out;
    const T* pixel = plane + (inside ? (int64_t{row} * columns.out + column) * params.channels : 0);
    T elements[P::kChunkChannels];
#pragma unroll
    for (int e = 0; e < P::kChunkChannels; ++e) {
      elements[e] = inside && channel + e < params.channels ? pixel[channel + e] : FromFloat<T>(0);
    }
    memcpy(stage + P::Offset(at.pixel, chunk), elements, 16);
  }
}

// Enqueues the kernel of a plan; `params` is the plan's block with its pointers set.
template <auto kKernel, class Params>
Status LaunchHalo(const Plan& plan, const Params& params, void* stream) {
  const auto& launch = plan.As<HaloLaunch<Params>>();
  LaunchConfig config;
  config.grid = static_cast<unsigned>(launch.ctas);
  config.threads = kHaloThreads;
  config.shared_bytes = launch.shared_bytes;
  return Launch<kKernel>(plan.kernel->name, config, stream, params);
}

// Enqueues an fprop or dgrad.
template <class Params, auto kKernel>
Status LaunchHaloGather(const Plan& plan, const Operands& operands, void* stream) {
  Params params = plan.As<HaloLaunch<Params>>().kernel;
  params.gathered = operands.lhs;
  params.filter = operands.rhs;
  params.out = operands.out;
  BindEpilogue(operands, &params.epilogue);
  return LaunchHalo<kKernel>(plan, params, stream);
}

// Enqueues a wgrad and the sum of its slices.
template <class Params, auto kKernel, class Epilogue>
Status LaunchHaloWgrad(const Plan& plan, const Operands& operands, void* stream) {
  const auto& launch = plan.As<HaloLaunch<Params>>();
  Params params = launch.kernel;
  params.gathered = operands.lhs;
  params.walked = operands.rhs;
  params.out = operands.workspace;
  BindEpilogue(operands, &params.epilogue);
  JAXCONV_RETURN_IF_ERROR(LaunchHalo<kKernel>(plan, params, stream));
  return ReduceSlices<Epilogue>(static_cast<const float*>(operands.workspace), launch.out_elements,
                                plan.slices, params.channels, params.epilogue, operands.out,
                                launch.out_dtype, stream);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_HALO_BOX_CUH_
