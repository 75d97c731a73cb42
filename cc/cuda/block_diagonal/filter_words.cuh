// The filter in shared memory for gather.cuh and, with 32-bit elements, for runs_sm90.cuh: words of
// B in the order of mma.sync (ptx/mma.cuh), so that a lane reads its words by vectors.
//
//     [owner][tap][piece][lane][words of a piece]
//
// An owner has 8 kBlocksN columns of a tile and all gathered channels of their block. Word 2 (kk
// kBlocksN + n) + half belongs to half `half` of step kk and to the 8 columns n.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_FILTER_WORDS_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_FILTER_WORDS_CUH_

#include <cstdint>

#include "cuda/block_diagonal/params.h"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::block_diagonal {

// kSteps: products along the gathered channels of a block. kBlocksN: blocks of 8 columns.
template <int kSteps_, int kBlocksN_>
struct FilterWords {
  static constexpr int kSteps = kSteps_, kBlocksN = kBlocksN_;
  // Words of a lane for one tap, in pieces of up to 16 bytes.
  static constexpr int kWords = kSteps * kBlocksN * 2, kPieceWords = kWords < 4 ? kWords : 4;
  static constexpr int kTapBytes = kWords * 128;

  // The offset of a lane's first word in bytes, and of another word from there.
  __device__ static constexpr uint32_t OfLane(int lane) { return lane * (kPieceWords * 4); }
  __device__ static constexpr uint32_t OfWord(int word) {
    return word / kPieceWords * (kPieceWords * 128) + word % kPieceWords * 4;
  }

  // filter: the address of the lane's first word of the tap.
  __device__ __forceinline__ static void Load(uint32_t filter, uint32_t (&b)[kWords]) {
    if constexpr (kPieceWords == 2) {
      LoadPair(filter, &b[0], &b[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 piece = LoadChunk(filter + OfWord(i));
        b[i] = piece.x, b[i + 1] = piece.y, b[i + 2] = piece.z, b[i + 3] = piece.w;
      }
    }
  }
};

// Starts copying the 32-bit elements of a tile's groups, which are surrounded by zeros.
// column_of(c): the column of an owner's channel c. A lane has one channel of the result, a warp
// every kWarps-th (tap, gathered channel of the group).
template <class Filter, class ColumnOf>
__device__ __forceinline__ void CopyFilterElements(const Params& params, const TilePlace& tile,
                                                   uint32_t to, ColumnOf column_of) {
  constexpr int kBlock = Filter::kSteps * 8, kOwned = Filter::kBlocksN * 8;
  const int in_tile = threadIdx.x % 32;
  const int32_t channel = tile.first_channel + in_tile;
  if (channel >= params.channels) return;
  const int32_t taps = params.axis[0].taps * params.axis[1].taps * params.axis[2].taps;
  const int32_t group_log2 = params.group_log2, in_group = (1 << group_log2) - 1;  // a mask
  const float* filter = static_cast<const float*>(params.filter) +
                        params.images_divmod.Div(tile.image) * params.filter_stride +
                        (channel >> group_log2) * params.group_stride +
                        (channel & in_group) * params.channel_stride;
  const int column = column_of(in_tile % kOwned), first = in_tile % kBlock & ~in_group;
  to += in_tile / kOwned * taps * Filter::kTapBytes + Filter::OfLane(column % 8 * 4);
#pragma unroll 1
  for (int32_t i = threadIdx.x / 32; i < taps << group_log2; i += kWarps) {
    const int32_t tap = i >> group_log2, gathered = i & in_group, f = first + gathered;
    const int word = (f / 8 * Filter::kBlocksN + column / 8) * 2 + f / 4 % 2;
    CopyAsync<4>(to + tap * Filter::kTapBytes + Filter::OfWord(word) + Filter::OfLane(f % 4),
                 filter + gathered * params.reduction_stride +
                     (params.flip ? taps - 1 - tap : tap) * params.tap_stride,
                 true);
  }
}

// Rounds a filter of 32-bit elements to TF32. Called by all threads, between two barriers.
__device__ __forceinline__ void RoundFilter(uint32_t filter, int32_t bytes) {
  for (int32_t i = threadIdx.x * 16; i < bytes; i += kThreads * 16) {
    const uint4 chunk = LoadChunk(filter + i);
    uint32_t word[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    RoundFragment<float>(word);
    StoreChunk(filter + i, word);
  }
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_FILTER_WORDS_CUH_
