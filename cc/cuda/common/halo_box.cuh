// Kernels that compute a tile of window positions from its box of the gathered tensor in shared memory:
// where a tile lies, and how its box is copied. CTA b processes items b, b + gridDim.x, ...
#ifndef JAXCONV_CUDA_COMMON_HALO_BOX_CUH_
#define JAXCONV_CUDA_COMMON_HALO_BOX_CUH_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.h"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/splitk_reduce.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv {

// A pixel of a box: 32 lanes of kVec channels. A warp reads neighbouring words, so that no layout of
// the pixels has bank conflicts.
template <typename T, int kVec>
struct Pixel {
  static constexpr int kChannels = 32 * kVec;
  static constexpr int kBytes = kChannels * int{sizeof(T)};
  static constexpr int kChunks = kBytes / 16, kChunkChannels = 16 / int{sizeof(T)};
  // Of a chunk of pixel i.
  __device__ static int32_t Offset(int32_t i, int chunk) { return i * kBytes + chunk * 16; }
};

// A lane's channels of a pixel, as float32.
template <typename T, int kVec>
__device__ __forceinline__ void LoadLane(const unsigned char* pixel, float (&value)[kVec]) {
  if constexpr (kVec * sizeof(T) == 8) {
    const float2 pair = *reinterpret_cast<const float2*>(pixel);
    value[0] = pair.x, value[1] = pair.y;
  } else if constexpr (kVec == 2) {
    T pair[2];
    const uint32_t word = *reinterpret_cast<const uint32_t*>(pixel);
    memcpy(pair, &word, sizeof(word));
    value[0] = ToFloat(pair[0]), value[1] = ToFloat(pair[1]);
  } else {
    value[0] = ToFloat(*reinterpret_cast<const T*>(pixel));
  }
}

// A tile of window positions: the first of each axis, its image and its channels.
struct TilePlace {
  int32_t depth, row, column, image, first_channel;

  __device__ __forceinline__ TilePlace(const HaloParams& params, int32_t index, int tile_channels) {
    params.axis[2].tiles.Divmod(index, &index, &column);
    params.axis[1].tiles.Divmod(index, &index, &row);
    params.axis[0].tiles.Divmod(index, &index, &depth);
    column *= params.axis[2].tile;
    row *= params.axis[1].tile;
    // Images vary before channel tiles: the next tile of a CTA mostly has the same filter.
    first_channel = index / params.images * tile_channels;
    image = index % params.images;
  }
};

// A part of a tile's sum: a tap along the depth, one of the reduced channels, and, where a box holds
// the pixels of one filter row, that row.
struct Step {
  int32_t depth_tap = 0, channel = 0, row_tap = 0;

  // False where all steps are done.
  __device__ __forceinline__ bool Next(const HaloParams& params, int32_t row_taps) {
    if (++row_tap < row_taps) return true;
    row_tap = 0;
    if (++channel < params.reduce) return true;
    channel = 0;
    return ++depth_tap < params.axis[0].taps;
  }
};

// A CTA's place in its items and their steps.
struct Cursor {
  int32_t item;
  Step step;
  __device__ __forceinline__ void Next(const HaloParams& params, int32_t row_taps) {
    if (step.Next(params, row_taps)) return;
    step = Step();
    item += gridDim.x;
  }
};

// The element of the gathered tensor at u, or -1.
__device__ __forceinline__ int32_t ElementAt(const Axis& axis, int32_t u) {
  int32_t element, rest;
  axis.in_dilation.Divmod(max(u, 0), &element, &rest);
  return u >= 0 && rest == 0 && element < axis.in ? element : -1;
}

// Begins to copy `box_rows` rows of the box of a tile and a step to `stage`, from row first_box_row on:
// axis[2].box pixels each from the tile's first u, zeros where the gathered tensor has no element. P:
// the pixels' layout.
template <typename T, class P>
__device__ __forceinline__ void FillBox(const HaloParams& params, const TilePlace& tile,
                                        const Step& step, int32_t first_box_row, int32_t box_rows,
                                        unsigned char* stage) {
  const Axis &depths = params.axis[0], &rows = params.axis[1], &columns = params.axis[2];
  const int32_t depth =
      ElementAt(depths, tile.depth * depths.stride + step.depth_tap * depths.dilation - depths.pad);
  const int32_t first_row =
      tile.row * rows.stride + step.row_tap * rows.dilation - rows.pad + first_box_row;
  const int32_t first_column = tile.column * columns.stride - columns.pad;
  const int chunk = threadIdx.x % P::kChunks;
  const int32_t channel = tile.first_channel + chunk * P::kChunkChannels;
  const T* plane =
      static_cast<const T*>(params.gathered) + (int64_t{tile.image} * depths.in + max(depth, 0)) *
                                                   rows.in * columns.in * params.gathered_channels;
  const int32_t pixels = box_rows * columns.box;
  for (int32_t i = threadIdx.x / P::kChunks; i < pixels; i += kHaloThreads / P::kChunks) {
    int32_t row, column;
    params.box_columns.Divmod(i, &row, &column);
    row = ElementAt(rows, first_row + row);
    column = ElementAt(columns, first_column + column);
    const bool inside = depth >= 0 && row >= 0 && column >= 0;
    const T* pixel =
        plane + (inside ? (int64_t{row} * columns.in + column) * params.gathered_channels : 0);
    unsigned char* to = stage + P::Offset(i, chunk);
    if (params.vector) {
      const bool valid = inside && channel < params.channels;
      CopyAsync<16>(SharedAddress(to), pixel + (valid ? channel : 0), valid);
      continue;
    }
    T elements[P::kChunkChannels];
#pragma unroll
    for (int e = 0; e < P::kChunkChannels; ++e) {
      const bool valid = inside && channel + e < params.channels;
      elements[e] = valid ? pixel[params.repeat.Div(channel + e) * params.reduce + step.channel]
                          : FromFloat<T>(0);
    }
    memcpy(to, elements, 16);
  }
}

// kCount neighbouring channels of an output, all inside and aligned for 16 bytes, or all of 8.
template <typename Out, int kCount, class Epilogue>
__device__ __forceinline__ void StoreChannels(const HaloParams& params, const Epilogue& epilogue,
                                              int64_t row, int32_t channel,
                                              const float (&sum)[kCount]) {
  const int64_t at = row * params.channels + channel;
  alignas(16) Out elements[kCount];
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const OutputPlace place{at + c, static_cast<int32_t>(row), channel + c, true};
    elements[c] = FromFloat<Out>(epilogue.template operator()<Out>(sum[c], place));
  }
  using Piece = std::conditional_t<sizeof(elements) == 8, uint2, uint4>;
  Piece pieces[sizeof(elements) / sizeof(Piece)];
  memcpy(pieces, elements, sizeof(elements));
  auto* out = reinterpret_cast<Piece*>(static_cast<Out*>(params.out) + at);
#pragma unroll
  for (int i = 0; i < int{sizeof(elements) / sizeof(Piece)}; ++i) out[i] = pieces[i];
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
