// The filter in shared memory and the first boxes of runs_sm90.cuh and phases_sm90.cuh.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_RUN_LOADS_SM90_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_RUN_LOADS_SM90_CUH_

#include <cstdint>

#include "cuda/block_diagonal/filter_words.cuh"
#include "cuda/block_diagonal/params.h"
#include "cuda/block_diagonal/tile.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::block_diagonal {

// Initialises the barriers of the two stages and waits for the previous grids; then one thread
// starts loading the first two boxes: load(item, stage).
template <class Load>
__device__ __forceinline__ void LoadFirstBoxes(uint32_t barriers, const Cursor& range,
                                               const Load& load) {
  const bool loads = UniformWarp() == 0;
  if (loads && ElectOne()) {
    BarrierInit(barriers, 1);
    BarrierInit(barriers + 8, 1);
    BarrierInitFence();
  }
  // Uniform instructions initialise the barriers once for a warp; racecheck attributes them to all
  // its threads.
  __syncwarp();
  WaitForPrecedingGrids();
  LetNextGridStart();
  if (loads && ElectOne()) {
    if (range.item < range.end) load(range.item, 0);
    if (range.item + 1 < range.end) load(range.item + 1, 1);
  }
}

// Starts copying the elements of the groups of a tile's channels, which are surrounded by zeros. A
// thread copies up to 8 channels of a group at a time.
template <class Tag, int kBytes>
__device__ __forceinline__ void CopyGroups(const Params& params, const typename Tag::T* filter,
                                           int32_t first_channel, uint32_t to) {
  constexpr int kCount = kBytes / 2, kOfRow = Tag::kChannels / kCount;
  const int32_t group = params.group, group_log2 = params.group_log2;
  const int32_t channel = static_cast<int32_t>(threadIdx.x) % kOfRow * kCount;
  if (first_channel + channel >= params.channels) return;
  const int32_t first_row = channel % Tag::kBlock & ~(group - 1);
  to += channel % 8 * 2;
  filter += first_channel + channel;
  for (int32_t i = threadIdx.x / kOfRow; i < 9 * group; i += kThreads / kOfRow) {
    const int32_t tap = i >> group_log2, row = first_row + (i & (group - 1));
    const int32_t source = Tag::kOp == Op::kDgrad ? i + ((8 - 2 * tap) << group_log2) : i;
    CopyAsync<kBytes>(
        to + tap * Tag::kTapBytes + row * kRunPixelBytes + ((channel / 8 ^ (row & 7)) << 4),
        filter + int64_t{source} * params.channels, true);
  }
}
template <class Tag>
__device__ __forceinline__ void CopyFilter(const Params& params, const TilePlace& tile,
                                           uint32_t to) {
  if constexpr (sizeof(typename Tag::T) == 4) {
    // In StoreMatrices a lane has channels t and t + 4.
    CopyFilterElements<typename Tag::Filter>(params, tile, to,
                                             [](int c) { return c % 4 * 2 + c / 4; });
    return;
  }
  const auto* filter = static_cast<const typename Tag::T*>(params.filter) +
                       params.images_divmod.Div(tile.image) * params.filter_stride;
  if (params.group >= 8) {
    CopyGroups<Tag, 16>(params, filter, tile.first_channel, to);
  } else if (params.group == 4) {
    CopyGroups<Tag, 8>(params, filter, tile.first_channel, to);
  } else {
    CopyGroups<Tag, 4>(params, filter, tile.first_channel, to);
  }
}

// The zeros between groups are the same for every filter.
template <class Tag>
__device__ __forceinline__ void ClearFilter(const Params& params, uint32_t filter) {
  if (params.group == Tag::kBlock) return;
  for (int32_t i = threadIdx.x * 16; i < Tag::kFilterBytes; i += kThreads * 16) {
    StoreChunk(filter + i, {0, 0, 0, 0});
  }
  __syncthreads();
}

// The index of a tile's filter and channels.
__device__ __forceinline__ int32_t FilterOf(const Params& params, const TilePlace& tile) {
  return params.images_divmod.Div(tile.image) * params.channels + tile.first_channel;
}

// The filter of a tile's channels, which several tiles share.
template <class Tag>
struct HeldFilter {
  const Params& params;
  const uint32_t shared;
  int32_t held;

  // Starts copying the filter of a tile.
  __device__ __forceinline__ HeldFilter(const Params& params, uint32_t shared, int32_t item)
      : params(params), shared(shared) {
    const TilePlace tile(params, item, Tag::kChannels);
    held = FilterOf(params, tile);
    ClearFilter<Tag>(params, shared);
    CopyFilter<Tag>(params, tile, shared);
    CopyAsyncCommit();
  }
  // Waits for the copies. Called by all threads.
  __device__ __forceinline__ void Wait() {
    CopyAsyncWait<0>();
    __syncthreads();
    if constexpr (Tag::kRounds) {
      RoundFilter(shared, Tag::kFilterBytes);
      __syncthreads();
    }
  }
  // Loads the filter of a tile if it is a different one, and waits for it. Called by all threads,
  // after all have read the previous one.
  __device__ __forceinline__ void Exchange(int32_t item) {
    const TilePlace tile(params, item, Tag::kChannels);
    const int32_t wanted = FilterOf(params, tile);
    if (wanted == held) return;
    CopyFilter<Tag>(params, tile, shared);
    CopyAsyncCommit();
    Wait();
    held = wanted;
  }
};

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_RUN_LOADS_SM90_CUH_
