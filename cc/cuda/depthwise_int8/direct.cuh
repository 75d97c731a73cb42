// depthwise_int8: one filter for each channel, x of s8 or u8, on the integer pipe (sm_80).
//
//     y[p, k] = requantise(sum over taps of x[p stride + tap dilation - pad, k] w[k, tap])
//
// There is no reduction over channels, so neither tensor cores nor dp4a apply: operands are widened
// and multiplied one by one. The layer is still bound by memory (3x3: 9 products an output).
//
// A lane has 8 neighbouring channels and a strip of kStrip outputs of a row; common/requantize.cuh
// stores its results as 8 bytes. A warp has 4 strips of 64 channels, a tile 32 strips,
// strips_across of them side by side:
//
//     box 0 | box 1 | taps      box: box rows x box columns x 64 bytes; taps: [row][column][64 channels]
//
// A CTA processes consecutive items. The next item's box is copied (cp.async) while this one is
// computed, with two barriers an item. Registers hold three taps of a filter row, and each pixel of
// their window is loaded and widened once; kStride 0 (any stride and dilation) loads a pixel for
// each tap. The epilogue's code exists once, and a loop moves the sums through it: more copies
// would spill.
//
// Shared memory for 3x3, 16 x 14 outputs: 2 x 18 x 16 x 64 = 37 KB, taps 576 B. Registers: 56 sums,
// 24 taps, 8 for a pixel; 128 in all, two CTAs an SM.
//
// Refused, with a reason (plan.cc): K != C, channels that are not multiples of 16, nchw32, dilated
// inputs, boxes beyond the shared memory.
#ifndef JAXCONV_CUDA_DEPTHWISE_INT8_DIRECT_CUH_
#define JAXCONV_CUDA_DEPTHWISE_INT8_DIRECT_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/requantize.cuh"
#include "cuda/depthwise_int8/params.h"
#include "cuda/ptx/cp_async.cuh"

namespace jaxconv::depthwise_int8 {

// A pixel of a box.
struct BytePixel {
  static constexpr int kBytes = kChannels, kChunks = kBytes / 16, kChunkChannels = 16;
  __device__ static int32_t Offset(int32_t i, int chunk) { return i * kBytes + chunk * 16; }
};

// kStride: the stride along the columns, without dilation; 0: any stride and dilation.
template <Op kOp, DType kType, int kStride_, int kCtasPerSm_>
struct Direct {
  using T = std::conditional_t<kType == DType::kU8, uint8_t, int8_t>;
  static constexpr int kStride = kStride_, kCtasPerSm = kCtasPerSm_;
  static_assert(kOp == Op::kFprop);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// Eight channels as integers.
template <typename T>
__device__ __forceinline__ void Widen(const unsigned char* from, int32_t (&value)[8]) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    value[e] = static_cast<T>((e < 4 ? words.x : words.y) >> (e % 4 * 8));
  }
}

__device__ __forceinline__ void MultiplyAdd(const int32_t (&x)[8], const int32_t (&w)[8],
                                            int32_t (&sum)[8]) {
  // The sums wrap around.
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    sum[e] =
        static_cast<int32_t>(static_cast<uint32_t>(sum[e]) + static_cast<uint32_t>(x[e] * w[e]));
  }
}

// Adds the taps of one filter row. pixels: the lane's first pixel in the corresponding box row.
template <class Tag>
__device__ __forceinline__ void AddFilterRow(const Params& params, const unsigned char* pixels,
                                             const unsigned char* taps,
                                             int32_t (&sums)[kStrip][8]) {
  using T = typename Tag::T;
  constexpr int kStride = Tag::kStride, kTaps = kTapsAtATime;
  const Axis& columns = params.axis[2];
  if constexpr (kStride == 0) {
#pragma unroll 1
    for (int32_t s = 0; s < columns.taps; ++s) {
      int32_t w[8];
      Widen<int8_t>(taps + s * kChannels, w);
#pragma unroll
      for (int q = 0; q < kStrip; ++q) {
        int32_t x[8];
        Widen<T>(pixels + (q * columns.stride + s * columns.dilation) * BytePixel::kBytes, x);
        MultiplyAdd(x, w, sums[q]);
      }
    }
  } else {
    // The last taps may be zeros, which multiply the bytes after the row.
#pragma unroll 1
    for (int32_t first = 0; first < columns.taps; first += kTaps) {
      int32_t w[kTaps][8];
#pragma unroll
      for (int s = 0; s < kTaps; ++s) Widen<int8_t>(taps + (first + s) * kChannels, w[s]);
      const unsigned char* from = pixels + first * BytePixel::kBytes;
#pragma unroll
      for (int c = 0; c < (kStrip - 1) * kStride + kTaps; ++c) {
        int32_t x[8];
        Widen<T>(from + c * BytePixel::kBytes, x);
#pragma unroll
        for (int s = 0; s < kTaps; ++s) {
          const int q = (c - s) / kStride;
          if (c < s || q >= kStrip || q * kStride + s != c) continue;
          MultiplyAdd(x, w[s], sums[q]);
        }
      }
    }
  }
}

// Copies the packed filter's rows of a tile and a depth tap to [row][column, padded with
// zeros][channel].
__device__ __forceinline__ void FillTaps(const Params& params, int32_t first_channel,
                                         int32_t depth_tap, unsigned char* taps) {
  const int32_t rows = params.axis[1].taps, columns = params.axis[2].taps;
  const auto* filter =
      static_cast<const unsigned char*>(params.filter) + depth_tap * rows * columns;
  for (int32_t i = threadIdx.x; i < rows * params.row_taps * kChannels; i += kThreads) {
    const int32_t channel = first_channel + i % kChannels, tap = i / kChannels;
    const int32_t row = tap / params.row_taps, column = tap % params.row_taps;
    const int64_t at = int64_t{channel} * params.filter_row + row * columns + column;
    taps[i] = channel < params.channels && column < columns ? filter[at] : 0;
  }
}

// Stores kOutputs outputs of a strip from q on; the first `count` exist.
template <RequantizePath kPath, int kOutputs, typename Sums>
__device__ __forceinline__ void StoreOutputs(const RequantizeParams& params, int32_t first,
                                             int32_t q, int32_t count, int32_t channel, bool inside,
                                             const Sums& sums) {
  OutputPixel outputs[kOutputs];
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    outputs[i] = OutputPixel(params, first + q + i, q + i < min(count, kStrip));
  }
  Residual<kOutputs> residual;
  if constexpr (HasResidual(kPath)) LoadResidual(params, outputs, channel, inside, &residual);
  RequantizeEight<kPath>(params, outputs, channel, inside, GlobalTerms{params}, residual, sums);
}

// Stores the first `count` outputs of a strip, kAtOnce at a time, and clears the sums.
template <int kAtOnce>
__device__ __forceinline__ void StoreStrip(const RequantizeParams& params, int32_t first,
                                           int32_t count, int32_t channel, int32_t channels,
                                           int32_t (&sums)[kStrip][8]) {
  const bool inside = channel < channels;
  ForRequantizePath(params, [&](auto path) {
    constexpr RequantizePath kPath = decltype(path)::value;
    constexpr int kOutputs = kPath == RequantizePath::kGeneral ? 1 : kAtOnce;  // more would spill
    // One copy of the code: the sums move through it.
#pragma unroll 1
    for (int32_t q = 0; q < kStrip; q += kOutputs) {
      StoreOutputs<kPath, kOutputs>(params, first, q, count, channel, inside,
                                    [&](int i, int e) { return sums[i][e]; });
#pragma unroll
      for (int i = 0; i < kStrip; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          sums[i][e] = i + kOutputs < kStrip ? sums[(i + kOutputs) % kStrip][e] : 0;
        }
      }
    }
  });
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    DirectKernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  unsigned char* const taps = dynamic + params.taps_offset;
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  constexpr int kLanes = kChannels / 8;
  const int strip = threadIdx.x / kLanes;
  const int32_t strip_row = strip / params.strips_across;
  const int32_t strip_column = strip % params.strips_across * kStrip;
  const int32_t lane_channel = threadIdx.x % kLanes * 8;
  const int32_t first_pixel = strip_row * rows.stride * columns.box + strip_column * columns.stride;

  int32_t held = -1;
  auto fill = [&](const Cursor& cursor, int stage) {
    if (!cursor.Done()) {
      FillBox<typename Tag::T, BytePixel>(params, TilePlace(params, cursor.item, kChannels),
                                          cursor.step, 0, rows.box,
                                          dynamic + stage * params.stage_bytes);
    }
    CopyAsyncCommit();
  };
  Cursor at(params);
  fill(at, 0);
  int32_t sums[kStrip][8] = {};
  for (int stage = 0; !at.Done(); stage ^= 1) {
    Cursor next = at;
    next.Next(params, 1);
    fill(next, stage ^ 1);
    CopyAsyncWait<1>();
    const TilePlace tile(params, at.item, kChannels);
    const int32_t wanted = tile.first_channel / kChannels * params.axis[0].taps + at.step.depth_tap;
    if (wanted != held) FillTaps(params, tile.first_channel, at.step.depth_tap, taps);
    held = wanted;
    __syncthreads();
    const unsigned char* pixels =
        dynamic + stage * params.stage_bytes + first_pixel * BytePixel::kBytes + lane_channel;
#pragma unroll 1
    for (int32_t r = 0; r < rows.taps; ++r) {
      AddFilterRow<Tag>(params, pixels + r * rows.dilation * columns.box * BytePixel::kBytes,
                        taps + r * params.row_taps * kChannels + lane_channel, sums);
    }
    if (next.item != at.item) {
      const int32_t row = tile.row + strip_row, column = tile.column + strip_column;
      const int32_t line =
          ((tile.image * params.axis[0].out + tile.depth) * rows.out + row) * columns.out;
      StoreStrip<Tag::kStride == 0 ? 1 : 2>(
          params.requantize, line + column, row < rows.out ? columns.out - column : 0,
          tile.first_channel + lane_channel, params.channels, sums);
    }
    // The next pass overwrites this stage and may overwrite the taps.
    __syncthreads();
    at = next;
  }
}

template <Op kOp, DType kType, int kStride_, int kCtasPerSm_>
template <class Tag>
Status Direct<kOp, kType, kStride_, kCtasPerSm_>::Launch(const Plan& plan, const Operands& operands,
                                                         void* stream) {
  Params params = plan.As<LaunchParams>().kernel;
  params.gathered = operands.lhs;
  params.filter = operands.rhs;
  BindRequantize(operands, &params.requantize);
  return LaunchHalo<DirectKernel<Tag>>(plan, params, stream);
}

}  // namespace jaxconv::depthwise_int8

#endif  // JAXCONV_CUDA_DEPTHWISE_INT8_DIRECT_CUH_
