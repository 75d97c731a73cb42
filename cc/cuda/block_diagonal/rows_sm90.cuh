// block_diagonal, fprop and dgrad of 3x3 filters (sm_90a): wgmma whose columns are the three filter
// rows.
//
// A of a product is a row y of 64 pixels of the gathered tensor under one of three column taps,
// with 16 channels. B has the filter rows r = 0, 1, 2 side by side as columns. The product
// therefore adds to the output rows y, y - 1 and y - 2, whose sums a warpgroup has in registers.
// Output row o stays at place o % 3, so the filter rows in B rotate from one row to the next:
//
//     sums      place 0   place 1   place 2        filter rows in shared memory, a column tap:
//     row 3 i   F[0]      F[2]      F[1]
//       3 i + 1 F[1]      F[0]      F[2]                 F[2] F[1] F[0] F[2] F[1]
//       3 i + 2 F[2]      F[1]      F[0]   row 3 i + 2:  [------------]
//                                          row 3 i:                [------------]
//
// After row y output row y - 2 is complete: it is rounded, staged and stored by TMA, and its sums
// restart from zero.
//
// A block of 32 channels is m64n96k16: 48 cycles, during which 5 KB of shared memory are read in
// 40. With a single filter row, m64n32k16, a filter row would take 24 cycles instead of 16.
//
// Tile: 64 pixels, which are the columns of one or more consecutive images; some rows; 64 channels,
// 32 for each of two consumer warpgroups. Two such pairs of warpgroups share a filter: the second
// pair has other images, or the second half of the rows. If a tile has whole rows, one column of
// padding serves both the end of an image's row and the start of the next image's.
//
//     pair 0: kStages rows of 72 pixels, the last ones zeros | pair 1 | filter | results | barriers
//
// float32: a tile has 32 channels and a warpgroup 16 of the result. A block of 32 is divided into
// 16 columns for each warpgroup, m64n48k8. TMA rounds pixels to TF32.
//
// One warp for each pair loads rows by TMA, which inserts the zeros of the padding. A box is one
// row of the pair's images, so images precede rows in the dimensions of the tensor map. The next
// column tap starts one pixel later in the same row: a descriptor may start at any pixel, because
// the swizzle is a function of the address. Pixels between the outputs of two images are multiplied
// too, but lie outside the output, where TMA stores nothing.
//
// The filter has the order of global memory, with zeros between groups: for each tap rows of a
// block's channels, swizzled by the bytes of a row; MN-major in fprop, K-major in dgrad. In float32
// it must be K-major (TF32), so it is copied element by element.
//
// Full(s), Empty(s): the stages of a pair, as in common/ring_sm90.cuh. Named barriers 1 to 4: for
// one warpgroup each; 5 and 6: for two warpgroups with the same channels.
//
// Refused, with a reason: as in runs_sm90.cuh, and strides.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_ROWS_SM90_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_ROWS_SM90_CUH_

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/block_diagonal/params.h"
#include "cuda/block_diagonal/run_loads_sm90.cuh"
#include "cuda/block_diagonal/run_maps_sm90.cuh"
#include "cuda/block_diagonal/tile.cuh"
#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::block_diagonal {

// kBlock: channels of a block. kStages: rows of pixels in shared memory for each pair of
// warpgroups.
template <Op kOp_, DType kType_, int kBlock_, int kStages_>
struct Rows {
  using T = typename ElementOf<kType_>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kChannels = TileChannels(sizeof(T));
  static constexpr Op kOp = kOp_;
  static constexpr DType kType = kType_;
  static constexpr int kBlock = kBlock_, kStages = kStages_;
  static constexpr int kFilterSlots = 0, kStationary = 0;  // common/ring_sm90.cuh
  static constexpr bool kElements = sizeof(T) == 4;
  // Channels of a warpgroup, columns of a filter row, and blocks (or parts of a block) of a
  // warpgroup.
  static constexpr int kOwned = kRowBytes / int{sizeof(T)};
  static constexpr int kColumns = kBlock < kOwned ? kBlock : kOwned, kParts = kOwned / kColumns;
  // Bytes of a row of a block, of its filter for one tap, and of the whole filter of a warpgroup.
  static constexpr int kLineBytes = kBlock * int{sizeof(T)}, kTapBytes = kColumns * kLineBytes;
  static constexpr int kFilterBytes = kParts * 3 * kRowTaps * kTapBytes;
  static constexpr int kFilterAt = kRowPairs * kStages * kRowStageBytes;
  static constexpr int kStagingAt = kFilterAt + 2 * kFilterBytes;
  static constexpr int kBarriersAt = kStagingAt + 2 * kRowPairs * kRowStagingBytes;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// A pair's part of a tile: its first image and row, and the number of rows, which may be 0.
struct PairPlace {
  int32_t image, row, rows;
  __device__ __forceinline__ PairPlace(const Params& params, const TilePlace& tile, int pair)
      : image(tile.image), row(tile.row), rows(params.pair_rows) {
    if (params.tile_images > params.pair_images) {
      image += pair * params.pair_images;
    } else {
      row += pair * params.pair_rows;
      rows = min(rows, tile.row + params.axis[1].tile - row);
    }
    rows = image < params.images ? min(rows, params.axis[1].out - row) : 0;
  }
};

// The producer: one thread.
template <class Tag>
__device__ __forceinline__ void ProduceRows(const Params& params, const CUtensorMap* map,
                                            uint32_t ring, int pair,
                                            const Barriers<Tag>& barriers) {
  RingPlace<Tag::kStages> stage;
  for (Cursor range(params); !range.Done(); ++range.item) {
    const TilePlace tile(params, range.item, Tag::kChannels);
    const PairPlace place(params, tile, pair);
    const int32_t column = tile.column - params.axis[2].pad;
    const int32_t row = place.row - params.axis[1].pad;
    for (int32_t y = 0; place.rows > 0 && y < place.rows + 2; ++y) {
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      BarrierArriveExpect(barriers.Full(stage.slot), params.box_pixels * kRunPixelBytes);
      CopyTile4d(ring + stage.slot * kRowStageBytes, map, barriers.Full(stage.slot),
                 tile.first_channel, column, place.image, row + y);
      stage.Next();
    }
  }
}

// Starts copying the elements of the groups of a warpgroup's channels, up to 8 channels of a group
// at a time, to the first copies of the filter rows.
template <class Tag, int kBytes>
__device__ __forceinline__ void CopyRowGroups(const Params& params, const typename Tag::T* filter,
                                              int32_t first_channel, int thread, uint32_t to) {
  constexpr int kCount = kBytes / 2, kOfRow = Tag::kOwned / kCount;
  constexpr int kStep = kRowPairs * 128 / kOfRow;
  const int32_t group = params.group, group_log2 = params.group_log2;
  const int32_t channel = thread % kOfRow * kCount;
  if (first_channel + channel >= params.channels) return;
  const int32_t in_block = channel % Tag::kBlock, first_row = in_block & ~(group - 1);
  to += channel / Tag::kBlock * (3 * kRowTaps * Tag::kTapBytes) + channel % 8 * 2;
  filter += first_channel + channel;
  for (int32_t i = thread / kOfRow; i < 9 * group; i += kStep) {
    const int32_t tap = i >> group_log2, row = first_row + (i & (group - 1));
    const int32_t r = tap / 3, s = tap - r * 3;
    const int32_t source = Tag::kOp == Op::kDgrad ? i + (8 - 2 * tap) * group : i;
    const auto* from = filter + int64_t{source} * params.channels;
    // The chunks of a row of kLineBytes are swizzled by the address bits from 7 on.
    const int32_t line = row * Tag::kLineBytes;
    const int32_t chunk = in_block / 8 ^ (line >> 7 & (Tag::kLineBytes / 16 - 1));
    const uint32_t at = to + (s * kRowTaps + 2 - r) * Tag::kTapBytes + line + chunk * 16;
    CopyAsync<kBytes>(at, from, true);
  }
}

// The same for float32, element by element. B is K-major, rows of gathered channels. Columns 2 t
// and 2 t + 1 of eight are channels t and t + 4, to match StoreMatrices.
template <class Tag>
__device__ __forceinline__ void CopyRowElements(const Params& params, const float* filter,
                                                int32_t first_channel, int thread, uint32_t to) {
  constexpr int kStep = kRowPairs * 128 / Tag::kOwned;
  const int owned = thread % Tag::kOwned;
  const int32_t channel = first_channel + owned;
  if (channel >= params.channels) return;
  const int32_t group_log2 = params.group_log2, in_group = (1 << group_log2) - 1;  // a mask
  const int32_t first = channel % Tag::kBlock & ~in_group;
  const int32_t column = owned % Tag::kColumns, place = column & ~7;
  const int32_t line = (place + column % 4 * 2 + column / 4 % 2) * Tag::kLineBytes;
  const int32_t swizzle = line >> 7 & (Tag::kLineBytes / 16 - 1);
  to += owned / Tag::kColumns * (3 * kRowTaps * Tag::kTapBytes) + line;
  filter +=
      (channel >> group_log2) * params.group_stride + (channel & in_group) * params.channel_stride;
  for (int32_t i = thread / Tag::kOwned; i < 9 << group_log2; i += kStep) {
    const int32_t tap = i >> group_log2, gathered = i & in_group, f = first + gathered;
    const int32_t r = tap / 3, s = tap - r * 3;
    CopyAsync<4>(
        to + (s * kRowTaps + 2 - r) * Tag::kTapBytes + ((f / 4 ^ swizzle) << 4) + f % 4 * 4,
        filter + gathered * params.reduction_stride +
            (params.flip ? 8 - tap : tap) * params.tap_stride,
        true);
  }
}

// The filter of a warpgroup's channels. Several tiles, and the warpgroups of both pairs with these
// channels, share it.
template <class Tag>
struct HeldRowFilter {
  static constexpr int kThreads = kRowPairs * 128;
  const Params& params;
  const uint32_t shared;
  const int half, thread;
  int32_t held = -1;

  __device__ __forceinline__ HeldRowFilter(const Params& params, uint32_t shared, int warpgroup)
      : params(params),
        shared(shared),
        half(warpgroup % 2),
        thread(warpgroup / 2 * 128 + static_cast<int>(threadIdx.x) % 128) {
    // The zeros between groups are the same for every filter.
    if (params.group == Tag::kBlock) return;
    for (int32_t i = thread * 16; i < Tag::kFilterBytes; i += kThreads * 16) {
      StoreChunk(shared + i, {0, 0, 0, 0});
    }
    Meet();
  }
  __device__ __forceinline__ void Meet() const {
    NamedBarrierSync(1 + 2 * kRowPairs + half, kThreads);
  }
  // Loads the filter of a tile if it is a different one, and waits for it.
  __device__ __forceinline__ void Exchange(const TilePlace& tile) {
    const int32_t wanted = FilterOf(params, tile);
    if (wanted == held) return;
    // The previous filter has been read.
    if (held >= 0) Meet();
    held = wanted;
    const auto* filter = static_cast<const typename Tag::T*>(params.filter) +
                         params.images_divmod.Div(tile.image) * params.filter_stride;
    const int32_t channel = tile.first_channel + half * Tag::kOwned;
    if constexpr (Tag::kElements) {
      CopyRowElements<Tag>(params, filter, channel, thread, shared);
    } else if (params.group >= 8) {
      CopyRowGroups<Tag, 16>(params, filter, channel, thread, shared);
    } else if (params.group == 4) {
      CopyRowGroups<Tag, 8>(params, filter, channel, thread, shared);
    } else {
      CopyRowGroups<Tag, 4>(params, filter, channel, thread, shared);
    }
    CopyAsyncCommit();
    CopyAsyncWait<0>();
    Meet();
    // The second copies of filter rows 2 and 1; float32 is rounded to TF32.
    constexpr int kPairBytes = 2 * Tag::kTapBytes;
    constexpr int kBytes = Tag::kElements ? 3 * Tag::kTapBytes : kPairBytes;
    for (int32_t i = thread * 16; i < Tag::kParts * 3 * kBytes; i += kThreads * 16) {
      const int32_t in_taps = i % kBytes;
      const uint32_t from = shared + i / kBytes * (kRowTaps * Tag::kTapBytes) + in_taps;
      const uint4 chunk = LoadChunk(from);
      uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      RoundFragment<typename Tag::T>(words);
      if (Tag::kElements) StoreChunk(from, words);
      if (in_taps < kPairBytes) StoreChunk(from + 3 * Tag::kTapBytes, words);
    }
    FenceForCopies();
    Meet();
  }
};

// The sums of 64 pixels and a warpgroup's channels for three output rows: three places for each
// block.
template <class Tag>
using RowSums = float[Tag::kParts][Tag::kColumns * 3 / 2];

// Adds a row of pixels with index kPhase modulo three. a, b: low words of the descriptors of the
// row's first pixel and of the filter.
template <class Tag, int kPhase>
__device__ __forceinline__ void AddRow(uint32_t a, uint32_t b, RowSums<Tag>& sums) {
  constexpr bool kMnMajor = Tag::kOp == Op::kFprop && !Tag::kElements;
  constexpr int kStepBytes = kMnMajor ? 16 * Tag::kLineBytes : 32;
  constexpr uint32_t kHighA = KMajorDescriptorHigh();
  constexpr uint32_t kHighB = KMajorDescriptorHigh<Tag::kLineBytes>();
  // Writes to the sums must precede the fence.
#pragma unroll
  for (int part = 0; part < Tag::kParts; ++part) {
#pragma unroll
    for (float& sum : sums[part]) sum = WgmmaResult(sum);
  }
  WgmmaFence();
#pragma unroll
  for (int s = 0; s < 3; ++s) {
#pragma unroll
    for (int k = 0; k < Tag::kLineBytes / 32; ++k) {
#pragma unroll
      for (int part = 0; part < Tag::kParts; ++part) {
        const int from = s * kRunPixelBytes + part * Tag::kLineBytes + k * 32;
        const int filter = ((part * 3 + s) * kRowTaps + 2 - kPhase) * Tag::kTapBytes;
        Wgmma<3 * Tag::kColumns, typename Tag::T, false, kMnMajor>(
            sums[part], DescriptorOf(a + (from >> 4), kHighA),
            DescriptorOf(b + ((filter + k * kStepBytes) >> 4), kHighB), 1);
      }
    }
  }
  WgmmaCommit();
}

// Stores the sums of one place as a row of results, 64 bytes for each pixel. to: the lane's pixel
// and chunk.
template <class Tag, int kPlace>
__device__ __forceinline__ void StageRow(const RowSums<Tag>& sums, uint32_t to) {
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // In float32 a chunk has half of 8 columns.
      const int column = Tag::kElements ? q * 8 : q * 16 + i / 2 * 8;
      const int at = (kPlace * Tag::kColumns + column % Tag::kColumns) / 2 + i % 2 * 2;
      const auto& of = sums[column / Tag::kColumns];
      if constexpr (Tag::kElements) {
        word[i] = __float_as_uint(WgmmaResult(of[at + i / 2]));
      } else {
        word[i] = PackPair<typename Tag::T>(WgmmaResult(of[at]), WgmmaResult(of[at + 1]));
      }
    }
    StoreMatrices(to ^ q * 32, word[0], word[1], word[2], word[3]);
  }
}

// A consumer warpgroup.
template <class Tag>
__device__ __forceinline__ void ConsumeRows(const Params& params, const CUtensorMap* out_map,
                                            uint32_t shared, int warpgroup,
                                            const Barriers<Tag>& barriers) {
  const int lane = threadIdx.x % 32, warp = UniformWarp() % 4;
  const Release release;
  const int half = warpgroup % 2, pair = warpgroup / 2;
  const uint32_t filter = shared + Tag::kFilterAt + half * Tag::kFilterBytes;
  const uint32_t results = shared + Tag::kStagingAt + warpgroup * kRowStagingBytes;
  const uint32_t pixel = warp * 16 + lane % 16;
  const uint32_t of_lane = pixel * 64 + ((lane / 16 ^ (pixel >> 1 & 3)) << 4);
  // Low words of descriptors.
  const uint32_t ring = KMajorDescriptorLow(shared + pair * Tag::kStages * kRowStageBytes +
                                            (Tag::kBlock > Tag::kOwned ? 0 : half * kRowBytes));
  const uint32_t b = (filter & 0x3ffff) >> 4 | Tag::kTapBytes >> 4 << 16;
  HeldRowFilter<Tag> held(params, filter, warpgroup);
  RingPlace<Tag::kStages> stage;
  uint32_t buffer = 0;
  for (Cursor range(params); !range.Done(); ++range.item) {
    const TilePlace tile(params, range.item, Tag::kChannels);
    held.Exchange(tile);
    const PairPlace place(params, tile, pair);
    if (place.rows <= 0) continue;
    RowSums<Tag> sums = {};
    auto turn = [&](auto phase, int32_t y) {
      constexpr int kPhase = phase.value, kPlace = (kPhase + 1) % 3;
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      AddRow<Tag, kPhase>(ring + stage.slot * (kRowStageBytes >> 4), b, sums);
      WgmmaWait<0>();
      release(barriers.Empty(stage.slot));
      stage.Next();
      if (y >= 2) {
        const uint32_t to = results + buffer;
        StageRow<Tag, kPlace>(sums, to + of_lane);
        FenceForCopies();
        // The previous row has been read by its store; the next row overwrites it.
        if (warp == 0 && ElectOne()) WaitForStoresToRead();
        NamedBarrierSync(1 + warpgroup, 128);
        if (warp == 0 && ElectOne()) {
          StoreTile4d(out_map, to, tile.first_channel + half * Tag::kOwned, tile.column,
                      place.image, place.row + y - 2);
          CommitStores();
        }
        buffer ^= kRowStagingBytes / 2;
      }
#pragma unroll
      for (int part = 0; part < Tag::kParts; ++part) {
#pragma unroll
        for (int i = 0; i < Tag::kColumns / 2; ++i) {
          sums[part][kPlace * Tag::kColumns / 2 + i] = 0;
        }
      }
    };
    // A tile may end after any of the three; the branches out of the loop do not move the sums.
    for (int32_t y = 0;;) {
      turn(std::integral_constant<int, 0>(), y);
      if (++y == place.rows + 2) break;
      turn(std::integral_constant<int, 1>(), y);
      if (++y == place.rows + 2) break;
      turn(std::integral_constant<int, 2>(), y);
      if (++y == place.rows + 2) break;
    }
  }
  if (warp == 0 && ElectOne()) WaitForStoresToRead();
}

template <class Tag>
__global__ void __launch_bounds__(kRowThreads, 1)
    RowsKernel(const __grid_constant__ Params params,
               const __grid_constant__ CUtensorMap gathered_map,
               const __grid_constant__ CUtensorMap out_map) {
  constexpr int kWarpgroups = 2 * kRowPairs, kRingBytes = Tag::kStages * kRowStageBytes;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const uint32_t shared = SharedAddress(dynamic);
  const int warp = UniformWarp(), warpgroup = warp / 4;
  const bool produces = warpgroup >= kWarpgroups;
  const int pair = produces ? warp % 4 : warpgroup / 2;
  const Barriers<Tag> barriers{shared + Tag::kBarriersAt + pair * (2 * Tag::kStages * 8)};
  if (produces) {
    if (ElectOne()) barriers.Init(2);
    __syncwarp();
  } else {
    // After a row, the padding that its last image would share with a next one.
    const int32_t zeros = kRowStageBytes - params.box_pixels * kRunPixelBytes;
    for (int32_t i = threadIdx.x * 16; i < kRowPairs * Tag::kStages * zeros;
         i += kWarpgroups * 128 * 16) {
      const int32_t slot = i / zeros;
      StoreChunk(shared + (slot + 1) * kRowStageBytes - zeros + (i - slot * zeros), {0, 0, 0, 0});
    }
    FenceForCopies();
  }
  __syncthreads();
  WaitForInputs();
  if (produces) {
    if (ElectOne()) {
      ProduceRows<Tag>(params, &gathered_map, shared + pair * kRingBytes, pair, barriers);
    }
  } else {
    ConsumeRows<Tag>(params, &out_map, shared, warpgroup, barriers);
  }
}

template <Op kOp_, DType kType_, int kBlock_, int kStages_>
template <class Tag>
Status Rows<kOp_, kType_, kBlock_, kStages_>::Launch(const Plan& plan, const Operands& operands,
                                                     void* stream) {
  const auto& launch = plan.As<LaunchParams>();
  Params params = launch.kernel;
  params.filter = operands.rhs;
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  CUtensorMap gathered, out;
  JAXCONV_RETURN_IF_ERROR(EncodeRows(kType, params, operands.lhs, rows.in, columns.in,
                                     Tag::kChannels, columns.box, &gathered));
  JAXCONV_RETURN_IF_ERROR(EncodeRows(kType, params, operands.out, rows.out, columns.out,
                                     Tag::kOwned, params.walked_columns, &out,
                                     /*whole_f32=*/true));
  return jaxconv::Launch<RowsKernel<Tag>>(plan.kernel->name,
                                          RunConfig(launch, kRowThreads, /*overlaps=*/true), stream,
                                          params, gathered, out);
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_ROWS_SM90_CUH_
