// depthwise, fprop and dgrad at stride 1: strips of outputs that walk down a map (sm_90a).
//
// direct.cuh reads a block's window and leaves: 57 KB of straight code for 7x7, which every warp fetches anew
// for each block. Here a lane's two channels have a strip of kStrip columns and sums of R output rows, those
// that the present row of pixels meets:
//
//     slot p of the sums: output row i - (R - 1) + p, to which row i of pixels adds filter row R - 1 - p
//
// After a row slot 0 is complete and stored, and every slot is the next row's slot above it: the first
// multiply-add of a sum reads slot p + 1 and writes slot p, so that the shift takes no instruction. A row is
// R S kStrip multiply-adds a channel and kStrip + S - 1 loads, in a loop of 13 KB (7x7). Taps stay in
// registers; of 7x7 they are 98, as the sums.
//
//     stages of a row: [image][column][channel] | taps | scale and bias | places of copies | barriers
//
// Shared memory of 7x7, a tile of 56 columns: 8 x 62 x 64 bytes, taps 6 KB.
//
// Items are output rows of a tile's columns. A CTA's neighbouring rows of a column of tiles are a run; it
// begins R - 1 rows of pixels early, and filter rows that meet none of its outputs are left out. Full(s): one
// thread announces a row's bytes, TMA delivers them, every warp waits. Empty(s): every warp has the row in
// registers, so that kWalkLag rows later the row that is kWalkStages behind it may be copied.
//
// Refused, with a reason (walk_plan.cc): what TMA cannot walk, as in direct_tma_sm90.cuh; filters, strides and
// dilations of other instances.
#ifndef JAXCONV_CUDA_DEPTHWISE_WALK_SM90_CUH_
#define JAXCONV_CUDA_DEPTHWISE_WALK_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/depthwise/boxes_sm90.cuh"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/walk_plan.h"
#include "cuda/depthwise/walk_row.cuh"
#include "cuda/depthwise/warp_block.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"

namespace jaxconv::depthwise {

// A run of a CTA's items: output rows of one column of tiles. Of the rows of pixels that it meets, those
// in [first, last) are read; the others lie outside of the image.
struct Run {
  TilePlace place;  // of its first output row
  int32_t rows, first, last;
  __device__ __forceinline__ Run(const Params& params, int32_t item, int32_t end, int channels,
                                 int filter_rows)
      : place(Place(params, item, channels)),
        rows(min(end - item, params.axis[1].out - place.row)) {
    const int32_t above = params.axis[1].pad - place.row;
    // Each output row is begun by a row that is read, and none is complete before the first.
    first = min(max(above, 0), filter_rows - 1);
    last = max(min(rows + filter_rows - 1, params.axis[1].in + above), rows);
  }

 private:
  // Rows are the fastest, unlike TilePlace's.
  static __device__ __forceinline__ TilePlace Place(const Params& params, int32_t item,
                                                    int channels) {
    int32_t row, column, depth;
    params.axis[1].tiles.Divmod(item, &item, &row);
    params.axis[2].tiles.Divmod(item, &item, &column);
    params.axis[0].tiles.Divmod(item, &item, &depth);
    TilePlace place(params, 0, channels);
    params.image_tiles.Divmod(item, &place.first_channel, &place.image);
    place.row = row, place.column = column * params.axis[2].tile, place.depth = depth;
    place.image *= params.tile_images;
    place.first_channel *= channels;
    return place;
  }
};

// Which row of pixels a warp copies next, in shared memory. Warp w copies every kWalkWarps-th row of the
// CTA's from the w-th on: copies take 100 instructions, which would delay the warps of one scheduler.
struct CopyPlace {
  int32_t item;  // the first of the next run
  int32_t
      left;  // rows of this run from that row on; none: that row is -left rows into the next run
  int32_t channel, column, row, depth, image;
};

// What a thread loads of the taps of a tile's channels, and of their scale and bias, all under way at once:
// then stored as float32, taps[tap][channel], scale and bias.
template <class Tag>
struct ThreadTaps {
  using T = typename Tag::T;
  static constexpr int kChannels = Tag::Pixels::kChannels, kRows = Tag::kCtaThreads / kChannels;
  static constexpr int kTaps = Tag::kFilterRows * Tag::kFilterColumns;
  static constexpr int kMost = (kTaps + kRows - 1) / kRows;
  static constexpr bool kPlain = Tag::Epilogue::kPlain;
  static_assert(Tag::kCtaThreads % kChannels == 0);
  T tap[kMost];
  ChannelTerms<1> term;

  __device__ __forceinline__ ThreadTaps(const Params& params, const TilePlace& tile,
                                        const typename Tag::Epilogue& epilogue) {
    const int32_t channel = min(tile.first_channel + static_cast<int32_t>(threadIdx.x) % kChannels,
                                params.channels - 1);
    const T* filter = static_cast<const T*>(params.filter) +
                      params.images_divmod.Div(tile.image) * params.filter_stride +
                      int64_t{channel} * params.channel_stride;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const int i = min(static_cast<int>(threadIdx.x) / kChannels + k * kRows, kTaps - 1);
      tap[k] = filter[(params.flip ? kTaps - 1 - i : i) * params.tap_stride];
    }
    if constexpr (!kPlain) term = epilogue.template Terms<1>(channel);
  }
  __device__ __forceinline__ void Store(float* taps) const {
    const int c = threadIdx.x % kChannels;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const int i = threadIdx.x / kChannels + k * kRows;
      if (i < kTaps) taps[i * kChannels + c] = ToFloat(tap[k]);
    }
    if constexpr (!kPlain) {
      taps[kTaps * kChannels + c] = term.scale[0];
      taps[(kTaps + 1) * kChannels + c] = term.bias[0];
    }
  }
};

template <class Tag>
__global__ void __launch_bounds__(Tag::kCtaThreads, Tag::kCtasPerSm)
    WalkKernel(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap map) {
  using T = typename Tag::T;
  using Epilogue = typename Tag::Epilogue;
  using Pixels = typename Tag::Pixels;
  constexpr int kVec = Tag::kVec, kChannels = Pixels::kChannels, kBytes = Pixels::kBytes;
  constexpr int kR = Tag::kFilterRows, kS = Tag::kFilterColumns, kTaps = kR * kS;
  constexpr int kColumns = Tag::kStrip + kS - 1;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  auto* const taps = reinterpret_cast<float*>(dynamic + kWalkStages * params.stage_bytes);
  float* const terms = taps + kTaps * kChannels;  // scale, then bias
  auto* const copies = reinterpret_cast<CopyPlace*>(terms + 2 * kChannels);
  const uint32_t full = SharedAddress(copies + kWalkWarps);
  const uint32_t empty = full + kWalkStages * 8;
  static_assert(sizeof(CopyPlace) <= kCopyPlaceBytes && kCopyPlaceBytes % 8 == 0);
  const int lane = threadIdx.x % Tag::kLanes;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const WarpBlock block(params, threadIdx.x / Tag::kLanes, 1, Tag::kStrip);
  const int32_t box_bytes = params.axis[2].box * kBytes;
  const uint32_t copied = params.tile_images * box_bytes;
  const unsigned char* const pixels =
      dynamic + block.image * box_bytes + block.column * kBytes + lane * kVec * int32_t{sizeof(T)};
  const Epilogue epilogue(params.epilogue);
  const Cursor share(params);

  auto run_from = [&](int32_t item) { return Run(params, item, share.end, kChannels, kR); };
  // Of one thread of a warp: copies its next row of pixels, if there is one.
  auto copy = [&](int32_t stage) {
    CopyPlace at = copies[warp];
    while (at.left <= 0) {
      if (at.item >= share.end) return;
      const Run run = run_from(at.item);
      at.item += run.rows;
      at.channel = run.place.first_channel;
      at.column = run.place.column - params.axis[2].pad;
      at.row = run.place.row - params.axis[1].pad + run.first - at.left;
      at.depth = run.place.depth * params.axis[0].stride - params.axis[0].pad;
      at.image = run.place.image;
      at.left += run.last - run.first;
    }
    BarrierArriveExpect(full + stage * 8, copied);
    CopyTile5d(SharedAddress(dynamic) + stage * params.stage_bytes, &map, full + stage * 8,
               at.channel, at.column, at.row, at.depth, at.image);
    at.row += kWalkWarps, at.left -= kWalkWarps;
    copies[warp] = at;
  };
  if (warp == 0 && ElectOne()) {
    InitStages(full, empty, kWalkStages, kWalkWarps);
    PrefetchTensorMap(&map);
  }
  __syncthreads();
  WaitForInputs();
  // Which channels an item has, counted over all filters.
  auto channels_of = [&](int32_t item) {
    const TilePlace place = run_from(item).place;
    return params.images_divmod.Div(place.image) * params.channels + place.first_channel;
  };
  {
    // Before the pixels, behind which they would wait.
    const ThreadTaps<Tag> first(params, run_from(share.item).place, epilogue);
    if (ElectOne()) {
      copies[warp].item = share.item, copies[warp].left = -warp;
      for (int32_t s = warp; s < kWalkStages - kWalkLag; s += kWalkWarps) copy(s);
    }
    first.Store(taps);
  }
  __syncthreads();
  uint32_t read = 0;  // rows of pixels before the present one
  uint32_t words[kColumns];
  BarrierWait(full, 0);
  WalkSums<Tag>::Load(pixels, words);
  __syncwarp();
#pragma unroll 1
  for (int32_t item = share.item; item < share.end;) {
    const Run run = run_from(item);
    if (item > share.item && channels_of(item) != channels_of(item - 1)) {
      const ThreadTaps<Tag> next(params, run.place, epilogue);
      __syncthreads();
      next.Store(taps);
      __syncthreads();
    }
    item += run.rows;
    float tap[kTaps][kVec];
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      LoadLane<float>(reinterpret_cast<const unsigned char*>(taps + k * kChannels + lane * kVec),
                      tap[k]);
    }
    RowStore<T, Tag> out(params, run.place.OfImage(block.image, params.images), block.column,
                         run.place.first_channel + lane * kVec);
    WalkSums<Tag> sums = {};
    auto store = [&]() {
      if constexpr (Epilogue::kPlain) {
        out.Store(params, sums.done, [](float sum, int) { return sum; });
      } else {
        ChannelTerms<kVec> of_lane;
        const auto* at = reinterpret_cast<const unsigned char*>(terms + lane * kVec);
        LoadLane<float>(at, of_lane.scale);
        LoadLane<float>(at + kChannels * sizeof(float), of_lane.bias);
        if (LaneClamp<kVec>::Takes(epilogue)) {
          out.Store(params, sums.done, LaneClamp<kVec>(epilogue, of_lane));
        } else {
          out.StoreFused(params, epilogue, of_lane, sums.done);
        }
      }
    };
#pragma unroll 1
    for (int32_t i = run.first; i < run.last; ++i) {
      // The words are this row's.
      if (threadIdx.x % 32 == 0) BarrierArrive(empty + read % kWalkStages * 8);
      if ((read + kWalkStages - kWalkLag) % kWalkWarps == warp && ElectOne()) {
        // Of the row of kWalkLag rows ago, or not used yet.
        const uint32_t free = (read - kWalkLag) % kWalkStages;
        BarrierWait(empty + free * 8, (read - kWalkLag) / kWalkStages % 2);
        copy(free);
      }
      // Behind the CTA's last row the same words once more.
      if (i + 1 < run.last || item < share.end) ++read;
      const uint32_t stage = read % kWalkStages;
      BarrierWait(full + stage * 8, read / kWalkStages % 2);
      const unsigned char* next = pixels + stage * params.stage_bytes;
      if (i >= kR - 1 && i < run.rows) {
        sums.AddRow(words, next, tap);
      } else {
        sums.AddEdge(i, run.rows, words, next, tap);
      }
      if (i >= kR - 1) store();
      if constexpr (!sums.kAhead) sums.Load(next, words);
      __syncwarp();
    }
#pragma unroll 1
    for (int32_t i = run.last; i < run.rows + kR - 1; ++i) {
      sums.Shift();
      if (i >= kR - 1) store();
    }
  }
}

// kFilterRows_ x kFilterColumns_ taps at stride 1, strips of kStrip_ columns and 2 kLanes_ channels.
template <Op kOp, DType kType, int kFilterRows_, int kFilterColumns_, int kStrip_, int kCtasPerSm_,
          int kLanes_>
struct Walk {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kFilterRows = kFilterRows_, kFilterColumns = kFilterColumns_;
  static constexpr int kStrip = kStrip_, kCtasPerSm = kCtasPerSm_, kCtaThreads = kWalkThreads;
  static constexpr int kVec = 2, kLanes = kLanes_;
  using Pixels = Pixel<T, kVec, kLanes>;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<LaunchParams>();
    Params params = launch.kernel;
    params.filter = operands.rhs;
    params.out = operands.out;
    BindEpilogue(operands, &params.epilogue);
    CUtensorMap map;
    JAXCONV_RETURN_IF_ERROR(EncodeBoxes(params, kType, operands.lhs, Tag::Pixels::kChannels,
                                        params.images, /*walked=*/false, &map));
    LaunchConfig config;
    config.grid = static_cast<unsigned>(launch.ctas);
    config.threads = Tag::kCtaThreads;
    config.shared_bytes = launch.shared_bytes;
    config.overlaps = true;
    return ::jaxconv::Launch<WalkKernel<Tag>>(plan.kernel->name, config, stream, params, map);
  }
};

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_WALK_SM90_CUH_
