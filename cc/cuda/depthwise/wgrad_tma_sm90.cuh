// depthwise, wgrad: wgrad.cuh with boxes copied by TMA (sm_90a).
//
//     stage: boxes of x of a tile's images | tiles of dy of them | stage | ... | barriers
//
// There are two copies a tile. TMA fills in zeros outside x and dy, which add nothing. Full(s) and
// Empty(s) as in direct_tma_sm90.cuh, so tiles need no CTA barrier. The warps' sums are added in
// order through the stages' memory, as in wgrad.cuh.
//
// Refused, with a reason (plan.cc): what direct_tma_sm90.cuh refuses.
#ifndef JAXCONV_CUDA_DEPTHWISE_WGRAD_TMA_SM90_CUH_
#define JAXCONV_CUDA_DEPTHWISE_WGRAD_TMA_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/splitk_reduce.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/depthwise/boxes_sm90.cuh"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/share.cuh"
#include "cuda/depthwise/warp_block.cuh"
#include "cuda/depthwise/wgrad.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"

namespace jaxconv::depthwise {

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    WgradTmaKernel(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap dy_map) {
  using T = typename Tag::T;
  constexpr int kVec = Tag::kVec, kChannels = 32 * kVec, kBytes = Pixel<T, kVec>::kBytes;
  constexpr int kR = Tag::kFilterRows, kS = Tag::kFilterColumns;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const Share share(params, params.tap_parts, kChannels);
  const uint32_t ring = SharedAddress(dynamic);
  const uint32_t full = ring + params.stages * params.stage_bytes, empty = full + params.stages * 8;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const WarpBlock block(params, warp, Tag::kRows, Tag::kStrip);
  const int32_t lane_at = threadIdx.x % 32 * kVec * int32_t{sizeof(T)};
  const int32_t box_bytes = rows.box * columns.box * kBytes;
  const int32_t walked_bytes = rows.tile * columns.tile * kBytes;
  const int32_t box_at =
      block.image * box_bytes +
      (block.row * rows.stride * columns.box + block.column * columns.stride) * kBytes + lane_at;
  const int32_t walked_at = params.walked_offset + block.image * walked_bytes +
                            (block.row * columns.tile + block.column) * kBytes + lane_at;
  const uint32_t copied = params.tile_images * (box_bytes + walked_bytes);

  // Called by one thread.
  auto copy = [&](int32_t item, int32_t stage) {
    TilePlace tile(params, item, kChannels);
    tile.first_channel = share.first_channel;
    tile.image += share.filter * params.images;
    const uint32_t shared = ring + stage * params.stage_bytes, barrier = full + stage * 8;
    BarrierArriveExpect(barrier, copied);
    CopyBoxes(params, &x_map, tile, shared, barrier);
    CopyTile5d(shared + params.walked_offset, &dy_map, barrier, tile.first_channel, tile.column,
               tile.row, tile.depth, tile.image);
  };
  if (warp == 0 && ElectOne()) {
    InitStages(full, empty, params.stages, kWarps);
    PrefetchTensorMap(&x_map);
    PrefetchTensorMap(&dy_map);
  }
  __syncthreads();
  WaitForInputs();
  if (warp == 0 && ElectOne()) {
    int32_t item = share.slice;
    for (int32_t s = 0; s < params.stages && item < params.items; ++s, item += params.slices) {
      copy(item, s);
    }
  }
  __syncwarp();

  float sums[kR][kS][kVec] = {};
  RingTurn stage;
#pragma unroll 1
  for (int32_t item = share.slice; item < params.items; item += params.slices) {
    BarrierWait(full + stage.slot * 8, stage.parity);
    const unsigned char* box = dynamic + stage.slot * params.stage_bytes;
    float gradient[Tag::kRows][Tag::kStrip][kVec];
    LoadGradient<T, Tag>(columns.tile, box + walked_at, gradient);
    AddToTaps<T, Tag>(columns.box, box + box_at, gradient, sums);
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(empty + stage.slot * 8);
    const int32_t next = item + params.stages * params.slices;
    if (warp == 0 && next < params.items && ElectOne()) {
      BarrierWait(empty + stage.slot * 8, stage.parity);
      copy(next, stage.slot);
    }
    __syncwarp();
    stage.Next(params.stages);
  }
  __syncthreads();
  StoreTaps(params, share, sums, reinterpret_cast<float*>(dynamic), 0, kR * kS);
}

// Wgrad's arguments; the filter is known, operands have 16 bits.
template <Op kOp, DType kType, int kFilterRows_, int kFilterColumns_, int kStride_, int kVec_,
          int kRows_, int kStrip_, int kCtasPerSm_>
struct WgradTma : Wgrad<kOp, kType, kFilterRows_, kFilterColumns_, kStride_, kVec_, kRows_, kStrip_,
                        kCtasPerSm_> {
  static_assert(kFilterRows_ > 0 && kType != DType::kF32);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<LaunchParams>();
    Params params = launch.kernel;
    params.out = operands.workspace;
    CUtensorMap x_map, dy_map;
    const int64_t images = int64_t{params.images} * params.filters;
    JAXCONV_RETURN_IF_ERROR(
        EncodeBoxes(params, kType, operands.lhs, 32 * kVec_, images, /*walked=*/false, &x_map));
    JAXCONV_RETURN_IF_ERROR(
        EncodeBoxes(params, kType, operands.rhs, 32 * kVec_, images, /*walked=*/true, &dy_map));
    JAXCONV_RETURN_IF_ERROR(
        LaunchWithMaps<WgradTmaKernel<Tag>>(plan, params, kThreads, stream, x_map, dy_map));
    return ReduceSlices<PlainEpilogue>(static_cast<const float*>(operands.workspace),
                                       launch.out_elements, plan.slices, params.channels,
                                       params.epilogue, operands.out, launch.out_dtype, stream);
  }
};

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_WGRAD_TMA_SM90_CUH_
