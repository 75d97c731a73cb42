// depthwise, fprop and dgrad: one filter for each channel, on the FMA pipe (sm_80).
//
//     out[n, o, k] = sum over taps of gathered[n, o stride + tap - pad, k / m] filter[tap, k]
//
// There is no reduction over channels, hence no matrix product: a lane has kVec neighbouring
// channels and sums in float32. dgrad is fprop of dy with the taps reversed. Instances of stride 2
// handle dy's dilation by 2 directly and do a quarter of the multiplications; other instances
// insert zeros between the pixels when they fill the box.
//
// Tile: blocks of kRows x kStrip outputs of kLanes kVec channels, a warp each (kLanes 16: half a
// warp each): blocks_across side by side, blocks_down below each other, the remaining warps in
// further images. The warp reads each row of its block's window once from shared memory, converts
// it once, and adds it to all output rows that use it: for a 3x3 filter and a block of 4 x 8, 60
// loads and 120 conversions for 576 multiply-adds.
//
//     stage 0 | stage 1 | taps 0 | taps 1        a stage: a box of each image, rows x columns x channels
//
// A CTA processes consecutive items. The next item's box is copied (cp.async, 16 bytes a thread)
// while this one is computed, with two barriers an item. Taps are float32, in shared memory and,
// during an item, in registers; they are loaded only when the channels change. Shared memory for
// 3x3, 64 channels of 16 bits, 16 x 16 outputs: 2 x 18 x 18 x 128 = 83 KB, taps 4.6 KB.
//
// kFilterRows = 0 is the general form: any filter, stride and dilation. A step then holds the
// pixels and taps of one filter row, and a tile is summed over all steps. Taps along the depth of
// rank 3, and the channels that dgrad with K = m C reduces, are further steps.
//
// Refused, with a reason (plan.cc): groups of more than one input channel, boxes beyond the shared
// memory.
#ifndef JAXCONV_CUDA_DEPTHWISE_DIRECT_CUH_
#define JAXCONV_CUDA_DEPTHWISE_DIRECT_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/store_block.cuh"
#include "cuda/depthwise/warp_block.cuh"
#include "cuda/ptx/cp_async.cuh"

namespace jaxconv::depthwise {

// The taps of a step as float32: taps[tap][channel of the tile].
template <typename T, int kChannels>
__device__ __forceinline__ void FillTaps(const Params& params, const TilePlace& tile,
                                         const Step& step, int32_t rows, float* taps) {
  const int32_t columns = params.axis[2].taps, count = rows * columns;
  const int32_t first = (step.depth_tap * params.axis[1].taps + step.row_tap) * columns;
  const int32_t all = params.axis[0].taps * params.axis[1].taps * columns;
  const T* filter = static_cast<const T*>(params.filter) +
                    params.images_divmod.Div(tile.image) * params.filter_stride;
  for (int32_t i = threadIdx.x; i < count * kChannels; i += kThreads) {
    const int32_t channel = tile.first_channel + i % kChannels;
    const int32_t tap = first + i / kChannels;
    const int64_t at = int64_t{params.flip ? all - 1 - tap : tap} * params.tap_stride +
                       (int64_t{channel} * params.reduce + step.channel) * params.channel_stride;
    taps[i] = channel < params.channels ? ToFloat(filter[at]) : 0.0f;
  }
}

// The sums of a warp's block: filters of kR x kS taps, known when compiled.
template <typename T, class Tag>
__device__ __forceinline__ void AddWindow(const Params& params, const unsigned char* box,
                                          const float* taps,
                                          float (&sums)[Tag::kRows][Tag::kStrip][Tag::kVec]) {
  constexpr int kVec = Tag::kVec, kR = Tag::kFilterRows, kS = Tag::kFilterColumns;
  constexpr int kStride = Tag::kStride, kSpread = Tag::kSpread;
  constexpr int kColumns = ((Tag::kStrip - 1) * kStride + kS - 1) / kSpread + 1;
  constexpr int kWindowRows = ((Tag::kRows - 1) * kStride + kR - 1) / kSpread + 1;
  float tap[kR * kS][kVec];
#pragma unroll
  for (int i = 0; i < kR * kS; ++i) {
    LoadLane<float>(reinterpret_cast<const unsigned char*>(taps + i * Tag::kLanes * kVec), tap[i]);
  }
  constexpr int kBytes = Tag::Pixels::kBytes;
  const int32_t row_bytes = params.axis[2].box * kBytes;
#pragma unroll
  for (int i = 0; i < kWindowRows; ++i) {
    float pixel[kColumns][kVec];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      LoadLane<T>(box + i * row_bytes + c * kBytes, pixel[c]);
    }
#pragma unroll
    for (int p = 0; p < Tag::kRows; ++p) {
      const int r = i * kSpread - p * kStride;
      if (r < 0 || r >= kR) continue;
#pragma unroll
      for (int s = 0; s < kS; ++s) {
#pragma unroll
        for (int q = 0; q < Tag::kStrip; ++q) {
          const int column = q * kStride + s;
          if (column % kSpread != 0) continue;
#pragma unroll
          for (int v = 0; v < kVec; ++v) {
            sums[p][q][v] = fmaf(pixel[column / kSpread][v], tap[r * kS + s][v], sums[p][q][v]);
          }
        }
      }
    }
  }
}

// The same for one filter row of any length, stride and dilation.
template <typename T, class Tag>
__device__ __forceinline__ void AddFilterRow(const Params& params, const unsigned char* box,
                                             const float* taps,
                                             float (&sums)[Tag::kRows][Tag::kStrip][Tag::kVec]) {
  constexpr int kVec = Tag::kVec, kBytes = Tag::Pixels::kBytes;
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  for (int32_t s = 0; s < columns.taps; ++s) {
    float tap[kVec];
    LoadLane<float>(reinterpret_cast<const unsigned char*>(taps + s * Tag::kLanes * kVec), tap);
    const unsigned char* at = box + s * columns.dilation * kBytes;
#pragma unroll
    for (int p = 0; p < Tag::kRows; ++p) {
#pragma unroll
      for (int q = 0; q < Tag::kStrip; ++q) {
        float pixel[kVec];
        LoadLane<T>(at + (p * rows.stride * columns.box + q * columns.stride) * kBytes, pixel);
#pragma unroll
        for (int v = 0; v < kVec; ++v) sums[p][q][v] = fmaf(pixel[v], tap[v], sums[p][q][v]);
      }
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    DirectKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  using Epilogue = typename Tag::Epilogue;
  constexpr int kVec = Tag::kVec;
  using Pixels = typename Tag::Pixels;
  constexpr int kChannels = Pixels::kChannels;
  constexpr bool kGeneral = Tag::kFilterRows == 0;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const int32_t rows_of_step = kGeneral ? 1 : Tag::kFilterRows;
  const int32_t row_steps = kGeneral ? params.axis[1].taps : 1;
  const int32_t tap_bytes = rows_of_step * params.axis[2].taps * kChannels * int32_t{sizeof(float)};
  unsigned char* const all_taps = dynamic + 2 * params.stage_bytes;
  const int lane = threadIdx.x % Tag::kLanes;
  const WarpBlock block(params, threadIdx.x / Tag::kLanes, Tag::kRows, Tag::kStrip);
  const int32_t box_bytes = params.axis[1].box * params.axis[2].box * Pixels::kBytes;
  const int32_t box_at = block.image * box_bytes +
                         (block.row * params.axis[1].stride / Tag::kSpread * params.axis[2].box +
                          block.column * params.axis[2].stride / Tag::kSpread) *
                             Pixels::kBytes +
                         lane * kVec * int32_t{sizeof(T)};
  const Epilogue epilogue(params.epilogue);

  // The taps in a buffer: taps of the same filter, channels and step are not loaded again.
  int64_t held_even = -1, held_odd = -1;
  auto fill = [&](const Cursor& at, int stage) {
    if (at.Done()) return;
    const TilePlace tile(params, at.item, kChannels);
    for (int32_t i = 0; i < params.tile_images; ++i) {
      FillBox<T, Pixels>(params, tile.OfImage(i, params.images), at.step, 0, params.axis[1].box,
                         dynamic + stage * params.stage_bytes + i * box_bytes);
    }
    const int64_t wanted =
        ((int64_t{params.images_divmod.Div(tile.image)} * params.channels + tile.first_channel) *
             params.axis[0].taps +
         at.step.depth_tap) *
            (int64_t{row_steps} * params.reduce) +
        at.step.channel * row_steps + at.step.row_tap;
    if (wanted == (stage == 0 ? held_even : held_odd)) return;
    (stage == 0 ? held_even : held_odd) = wanted;
    FillTaps<T, kChannels>(params, tile, at.step, rows_of_step,
                           reinterpret_cast<float*>(all_taps + stage * tap_bytes));
  };

  Cursor at(params);
  fill(at, 0);
  CopyAsyncCommit();
  float sums[Tag::kRows][Tag::kStrip][kVec] = {};
  for (int stage = 0; !at.Done(); stage ^= 1) {
    Cursor next = at;
    next.Next(params, row_steps);
    fill(next, stage ^ 1);
    CopyAsyncCommit();
    CopyAsyncWait<1>();
    __syncthreads();
    const unsigned char* box = dynamic + stage * params.stage_bytes + box_at;
    const float* taps = reinterpret_cast<const float*>(all_taps + stage * tap_bytes) + lane * kVec;
    if constexpr (kGeneral) {
      AddFilterRow<T, Tag>(params, box, taps, sums);
    } else {
      AddWindow<T, Tag>(params, box, taps, sums);
    }
    if (next.item != at.item) {
      TilePlace first = TilePlace(params, at.item, kChannels).OfImage(block.image, params.images);
      first.row += block.row, first.column += block.column;
      const int32_t channel = first.first_channel + lane * kVec;
      auto store = [&](auto pairs) {
        if (params.out_is_f32) {
          StoreBlock<float, pairs, Tag>(params, epilogue, first, channel, sums);
        } else {
          StoreBlock<T, pairs, Tag>(params, epilogue, first, channel, sums);
        }
      };
      if constexpr (!Epilogue::kPlain) {
        // More sums, with two kinds of stores, would not fit in the registers.
        constexpr bool kFew = Tag::kRows * Tag::kStrip * kVec <= 28;
        if (kFew && LaneClamp<kVec>::Takes(epilogue)) {
          const bool exists = first.exists && channel < params.channels;
          const LaneClamp<kVec> clamp(epilogue, LaneTerms<kVec>(epilogue, exists ? channel : 0));
          StoreInside<T, Tag>(params, first, channel, sums, clamp);
          ClearSums<Tag>(sums);
        } else {
          StoreFusedBlock<T, Tag>(params, epilogue, first, channel, sums);
        }
      } else if (kVec == 2 && params.channels % 2 == 0) {
        store(std::bool_constant<kVec == 2>());
      } else {
        store(std::false_type());
      }
    }
    // The next pass overwrites this stage.
    __syncthreads();
    at = next;
  }
}

// kFilterRows x kFilterColumns taps at the convolution's stride; kFilterRows 0: any. dgrad of
// stride 2 has boxes of dy without zeros between the pixels, and adds only taps that meet a pixel.
template <Op kOp, DType kType, int kFilterRows_, int kFilterColumns_, int kConvStride, int kVec_,
          int kRows_, int kStrip_, int kCtasPerSm_, int kLanes_ = 32>
struct Direct {
  using T = typename ElementOf<kType>::Type;
  using Pixels = Pixel<T, kVec_, kLanes_>;
  using Epilogue = PlainEpilogue;
  static constexpr int kFilterRows = kFilterRows_, kFilterColumns = kFilterColumns_;
  static constexpr bool kDgrad = kOp == Op::kDgrad;
  static constexpr int kStride = kDgrad && kFilterRows > 0 ? 1 : kConvStride;
  static constexpr int kSpread = kDgrad && kFilterRows > 0 ? kConvStride : 1;
  static constexpr int kVec = kVec_, kRows = kRows_, kStrip = kStrip_, kLanes = kLanes_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static_assert(kSpread <= 2 && kRows % kSpread == 0 && kStrip % kSpread == 0);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchHaloGather<Params, DirectKernel<Tag>>(plan, operands, stream);
  }
};

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_DIRECT_CUH_
