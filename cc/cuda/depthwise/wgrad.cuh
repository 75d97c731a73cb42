// depthwise, wgrad: one filter for each channel, on the FMA pipe (sm_80).
//
//     dw[tap, k] = sum over n, o of x[n, o stride + tap dilation - pad, k / m] dy[n, o, k]
//
// A lane has kVec neighbouring channels and keeps the float32 sums of all taps in registers. Tile:
// kWarps blocks of kRows x kStrip outputs of 32 kVec channels, one warp each. The warp holds its
// block of dy in registers, reads each row of the block's window of x once, and adds it to all taps
// that use it: for a 3x3 filter and a block of 4 x 7, 54 loads of x and 28 of dy for 252
// multiply-adds a channel.
//
//     stage 0: x box | dy tile | stage 1: x box | dy tile
//
// A CTA has one channel tile and processes tiles slice, slice + slices, ...; the next tile is
// copied (cp.async) while this one is computed, with two barriers a tile. At the end the warps'
// sums are added in order through the stages' memory, and common/splitk_reduce.cuh adds the slices,
// with the same bits in every run.
//
// kFilterRows = 0 is the general form: any filter, stride and dilation, kPartTaps taps of a filter
// row at a time, with separate CTAs for each part and for each tap along the depth of rank 3.
//
// Refused, with a reason (plan.cc): groups of more than one input channel, boxes beyond the shared
// memory.
#ifndef JAXCONV_CUDA_DEPTHWISE_WGRAD_CUH_
#define JAXCONV_CUDA_DEPTHWISE_WGRAD_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/share.cuh"
#include "cuda/depthwise/warp_block.cuh"
#include "cuda/ptx/cp_async.cuh"

namespace jaxconv::depthwise {

// A block's gradients, as float32.
template <typename T, class Tag>
__device__ __forceinline__ void LoadGradient(
    int32_t tile_columns, const unsigned char* walked,
    float (&gradient)[Tag::kRows][Tag::kStrip][Tag::kVec]) {
#pragma unroll
  for (int p = 0; p < Tag::kRows; ++p) {
#pragma unroll
    for (int q = 0; q < Tag::kStrip; ++q) {
      LoadLane<T>(walked + (p * tile_columns + q) * Pixel<T, Tag::kVec>::kBytes, gradient[p][q]);
    }
  }
}

// Adds the block to the sums of a filter known at compile time.
template <typename T, class Tag>
__device__ __forceinline__ void AddToTaps(
    int32_t box_columns, const unsigned char* box,
    const float (&gradient)[Tag::kRows][Tag::kStrip][Tag::kVec],
    float (&sums)[Tag::kFilterRows][Tag::kFilterColumns][Tag::kVec]) {
  constexpr int kVec = Tag::kVec, kBytes = Pixel<T, kVec>::kBytes;
  constexpr int kR = Tag::kFilterRows, kS = Tag::kFilterColumns, kStride = Tag::kStride;
  constexpr int kColumns = (Tag::kStrip - 1) * kStride + kS;
  constexpr int kWindowRows = (Tag::kRows - 1) * kStride + kR;
#pragma unroll
  for (int i = 0; i < kWindowRows; ++i) {
    float pixel[kColumns][kVec];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      LoadLane<T>(box + (i * box_columns + c) * kBytes, pixel[c]);
    }
#pragma unroll
    for (int p = 0; p < Tag::kRows; ++p) {
      const int r = i - p * kStride;
      if (r < 0 || r >= kR) continue;
#pragma unroll
      for (int q = 0; q < Tag::kStrip; ++q) {
#pragma unroll
        for (int s = 0; s < kS; ++s) {
#pragma unroll
          for (int v = 0; v < kVec; ++v) {
            sums[r][s][v] = fmaf(pixel[q * kStride + s][v], gradient[p][q][v], sums[r][s][v]);
          }
        }
      }
    }
  }
}

// Stores the CTA's sums of kR x kS taps from tap `before` on. It adds the warps' sums in order,
// through `shared` as [warp][tap][channel]. Only taps of a row before `taps` exist.
template <int kR, int kS, int kVec>
__device__ __forceinline__ void StoreTaps(const Params& params, const Share& share,
                                          const float (&sums)[kR][kS][kVec], float* shared,
                                          int32_t before, int32_t taps) {
  constexpr int kChannels = 32 * kVec, kTaps = kR * kS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      shared[(warp * kTaps + i) * kChannels + lane * kVec + v] = sums[i / kS][i % kS][v];
    }
  }
  __syncthreads();
  const int32_t all_taps = params.axis[0].taps * params.axis[1].taps * params.axis[2].taps;
  float* out = static_cast<float*>(params.out) +
               (int64_t{share.slice} * params.filters + share.filter) * all_taps * params.channels;
  for (int i = threadIdx.x; i < kTaps * kChannels; i += kThreads) {
    const int32_t tap = i / kChannels, channel = share.first_channel + i % kChannels;
    if (channel >= params.channels || tap >= taps) continue;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[w * kTaps * kChannels + i];
    out[int64_t{before + tap} * params.channels + channel] = sum;
  }
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    WgradKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  constexpr int kVec = Tag::kVec, kChannels = 32 * kVec, kBytes = Pixel<T, kVec>::kBytes;
  constexpr bool kGeneral = Tag::kFilterRows == 0;
  constexpr int kR = kGeneral ? 1 : Tag::kFilterRows;
  constexpr int kS = kGeneral ? Tag::kPartTaps : Tag::kFilterColumns;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const Share share(params, params.tap_parts, kChannels);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const WarpBlock block(params, warp, Tag::kRows, Tag::kStrip);
  // The part's first tap: along the depth, its filter row, within the row.
  Step step;
  int32_t first_tap = 0;
  step.depth_tap = share.part;
  if constexpr (kGeneral) {
    const int32_t parts_of_row = (columns.taps + kS - 1) / kS;
    first_tap = share.part % parts_of_row * kS;
    step.row_tap = share.part / parts_of_row % rows.taps;
    step.depth_tap = share.part / parts_of_row / rows.taps;
  }
  const int32_t lane_at = lane * kVec * int32_t{sizeof(T)};
  const int32_t box_bytes = rows.box * columns.box * kBytes;
  const int32_t walked_bytes = rows.tile * columns.tile * kBytes;
  const int32_t box_at = block.image * box_bytes +
                         (block.row * rows.stride * columns.box + block.column * columns.stride +
                          first_tap * columns.dilation) *
                             kBytes +
                         lane_at;
  const int32_t walked_at = params.tile_images * box_bytes + block.image * walked_bytes +
                            (block.row * columns.tile + block.column) * kBytes + lane_at;

  auto fill = [&](int32_t item, int stage) {
    if (item >= params.items) return;
    TilePlace tile(params, item, kChannels);
    tile.first_channel = share.first_channel;
    tile.image += share.filter * params.images;
    unsigned char* const boxes = dynamic + stage * params.stage_bytes;
    unsigned char* const walked = boxes + params.tile_images * box_bytes;
    for (int32_t i = 0; i < params.tile_images; ++i) {
      const TilePlace of = tile.OfImage(i, (share.filter + 1) * params.images);
      FillBox<T, Pixel<T, kVec>>(params, of, step, 0, rows.box, boxes + i * box_bytes);
      FillWalked<T, Pixel<T, kVec>>(params, of, walked + i * walked_bytes);
    }
  };

  float sums[kR][kS][kVec] = {};
  int32_t item = share.slice;
  fill(item, 0);
  CopyAsyncCommit();
  for (int stage = 0; item < params.items; stage ^= 1, item += params.slices) {
    fill(item + params.slices, stage ^ 1);
    CopyAsyncCommit();
    CopyAsyncWait<1>();
    __syncthreads();
    const unsigned char* box = dynamic + stage * params.stage_bytes;
    float gradient[Tag::kRows][Tag::kStrip][kVec];
    LoadGradient<T, Tag>(columns.tile, box + walked_at, gradient);
    if constexpr (kGeneral) {
      // Taps past the filter's last read pixels in or past the box; their sums are not stored.
#pragma unroll
      for (int p = 0; p < Tag::kRows; ++p) {
#pragma unroll
        for (int q = 0; q < Tag::kStrip; ++q) {
#pragma unroll
          for (int s = 0; s < kS; ++s) {
            if (first_tap + s >= columns.taps) break;
            float pixel[kVec];
            const int32_t at =
                p * rows.stride * columns.box + q * columns.stride + s * columns.dilation;
            LoadLane<T>(box + box_at + at * kBytes, pixel);
#pragma unroll
            for (int v = 0; v < kVec; ++v) {
              sums[0][s][v] = fmaf(pixel[v], gradient[p][q][v], sums[0][s][v]);
            }
          }
        }
      }
    } else {
      AddToTaps<T, Tag>(columns.box, box + box_at, gradient, sums);
    }
    // The next pass overwrites this stage.
    __syncthreads();
  }

  CopyAsyncWait<0>();
  const int32_t before = (step.depth_tap * rows.taps + step.row_tap) * columns.taps + first_tap;
  StoreTaps(params, share, sums, reinterpret_cast<float*>(dynamic), before,
            kGeneral ? columns.taps - first_tap : kR * kS);
}

// kFilterRows x kFilterColumns taps at stride kStride; kFilterRows 0: any, kFilterColumns taps at a
// time.
template <Op kOp, DType kType, int kFilterRows_, int kFilterColumns_, int kStride_, int kVec_,
          int kRows_, int kStrip_, int kCtasPerSm_>
struct Wgrad {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kFilterRows = kFilterRows_, kFilterColumns = kFilterColumns_;
  static constexpr int kPartTaps = kFilterColumns_;
  static constexpr int kStride = kStride_, kVec = kVec_, kRows = kRows_, kStrip = kStrip_;
  static constexpr int kCtasPerSm = kCtasPerSm_;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchHaloWgrad<Params, WgradKernel<Tag>, Epilogue>(plan, operands, stream);
  }
};

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_WGRAD_CUH_
