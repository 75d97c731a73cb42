// depthwise, fprop and dgrad: direct.cuh with boxes copied by TMA (sm_90a).
//
//     stage 0 | ... | stages - 1 | taps | scale and bias of the channels | barriers
//
// A stage holds the boxes of a tile's images, [image][row][column][channel], loaded by one copy;
// TMA fills in zeros outside the tensor. The warps spend no instructions on it, whereas direct.cuh
// spends a fifth of its instructions and 40 % of its time on copies and stores.
//
// Full(s): thread 0 announces a stage's bytes, TMA delivers them, every warp waits. Empty(s): every
// warp arrives when it has read its window; thread 0, after it has stored its block, waits and
// copies the item `stages` later. So items need no CTA barrier, except when the taps change: then
// all threads synchronise and load them.
//
// Refused, with a reason (plan.cc): tensors that TMA cannot load (channels that are not a multiple
// of 8, K other than C, dilated inputs, boxes of more than 256 pixels along an axis), filters with
// a depth.
#ifndef JAXCONV_CUDA_DEPTHWISE_DIRECT_TMA_SM90_CUH_
#define JAXCONV_CUDA_DEPTHWISE_DIRECT_TMA_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/depthwise/boxes_sm90.cuh"
#include "cuda/depthwise/direct.cuh"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/store_block.cuh"
#include "cuda/depthwise/warp_block.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"

namespace jaxconv::depthwise {

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    DirectTmaKernel(const __grid_constant__ Params params,
                    const __grid_constant__ CUtensorMap map) {
  using T = typename Tag::T;
  using Epilogue = typename Tag::Epilogue;
  using Pixels = typename Tag::Pixels;
  constexpr int kVec = Tag::kVec, kChannels = Pixels::kChannels;
  constexpr int kTaps = Tag::kFilterRows * Tag::kFilterColumns;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  auto* const taps = reinterpret_cast<float*>(dynamic + params.stages * params.stage_bytes);
  float* const terms = taps + kTaps * kChannels;  // scale, then bias
  const uint32_t ring = SharedAddress(dynamic);
  const uint32_t full = SharedAddress(terms + 2 * kChannels);
  const uint32_t empty = full + params.stages * 8;
  const int lane = threadIdx.x % Tag::kLanes;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const WarpBlock block(params, threadIdx.x / Tag::kLanes, Tag::kRows, Tag::kStrip);
  const int32_t box_bytes = params.axis[1].box * params.axis[2].box * Pixels::kBytes;
  const int32_t box_at = block.image * box_bytes +
                         (block.row * params.axis[1].stride / Tag::kSpread * params.axis[2].box +
                          block.column * params.axis[2].stride / Tag::kSpread) *
                             Pixels::kBytes +
                         lane * kVec * int32_t{sizeof(T)};
  const uint32_t copied = params.tile_images * box_bytes;
  const Epilogue epilogue(params.epilogue);

  // Called by one thread.
  auto copy = [&](int32_t item, int32_t stage) {
    BarrierArriveExpect(full + stage * 8, copied);
    CopyBoxes(params, &map, TilePlace(params, item, kChannels), ring + stage * params.stage_bytes,
              full + stage * 8);
  };
  if (warp == 0 && ElectOne()) {
    InitStages(full, empty, params.stages, kThreads / 32);
    PrefetchTensorMap(&map);
  }
  __syncthreads();
  WaitForInputs();
  const Cursor share(params);
  if (warp == 0 && ElectOne()) {
    for (int32_t s = 0; s < params.stages && share.item + s < share.end; ++s) {
      copy(share.item + s, s);
    }
  }
  __syncwarp();

  int64_t held = -1;
  RingTurn stage;
#pragma unroll 1
  for (int32_t item = share.item; item < share.end; ++item) {
    TilePlace first = TilePlace(params, item, kChannels);
    const int64_t wanted =
        int64_t{params.images_divmod.Div(first.image)} * params.channels + first.first_channel;
    if (wanted != held) {
      held = wanted;
      __syncthreads();
      FillTaps<T, kChannels>(params, first, Step(), Tag::kFilterRows, taps);
      if constexpr (!Epilogue::kPlain) {
        for (int32_t i = threadIdx.x; i < kChannels; i += kThreads) {
          const int32_t channel = min(first.first_channel + i, params.channels - 1);
          const ChannelTerms<1> of = epilogue.template Terms<1>(channel);
          terms[i] = of.scale[0], terms[kChannels + i] = of.bias[0];
        }
      }
      __syncthreads();
    }
    BarrierWait(full + stage.slot * 8, stage.parity);
    float sums[Tag::kRows][Tag::kStrip][kVec] = {};
    AddWindow<T, Tag>(params, dynamic + stage.slot * params.stage_bytes + box_at,
                      taps + lane * kVec, sums);
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(empty + stage.slot * 8);

    first = first.OfImage(block.image, params.images);
    first.row += block.row, first.column += block.column;
    const int32_t channel = first.first_channel + lane * kVec;
    if constexpr (Epilogue::kPlain) {
      StoreInside<T, Tag>(params, first, channel, sums, [](float sum, int) { return sum; });
    } else if (LaneClamp<kVec>::Takes(epilogue)) {
      ChannelTerms<kVec> of_lane;
      const auto* at = reinterpret_cast<const unsigned char*>(terms + lane * kVec);
      LoadLane<float>(at, of_lane.scale);
      LoadLane<float>(at + kChannels * sizeof(float), of_lane.bias);
      StoreInside<T, Tag>(params, first, channel, sums, LaneClamp<kVec>(epilogue, of_lane));
    } else {
      StoreFusedBlock<T, Tag>(params, epilogue, first, channel, sums);
    }
    __syncwarp();
    if (warp == 0 && item + params.stages < share.end && ElectOne()) {
      BarrierWait(empty + stage.slot * 8, stage.parity);
      copy(item + params.stages, stage.slot);
    }
    __syncwarp();
    stage.Next(params.stages);
  }
}

// Direct's arguments; the filter is known, operands have 16 bits.
template <Op kOp, DType kType, int kFilterRows_, int kFilterColumns_, int kConvStride, int kVec_,
          int kRows_, int kStrip_, int kCtasPerSm_>
struct DirectTma : Direct<kOp, kType, kFilterRows_, kFilterColumns_, kConvStride, kVec_, kRows_,
                          kStrip_, kCtasPerSm_> {
  static_assert(kFilterRows_ > 0 && kType != DType::kF32);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const Params params = GatherParams(plan, operands);
    CUtensorMap map;
    JAXCONV_RETURN_IF_ERROR(EncodeBoxes(params, kType, operands.lhs, Tag::Pixels::kChannels,
                                        params.images, /*walked=*/false, &map));
    return LaunchWithMaps<DirectTmaKernel<Tag>>(plan, params, kThreads, stream, map);
  }
};

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_DIRECT_TMA_SM90_CUH_
