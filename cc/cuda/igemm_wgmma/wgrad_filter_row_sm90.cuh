// igemm_wgmma, wgrad in rows: the taps of a filter row share one load of x (sm_90a).
//
// The operands of wgrad change places: wgmma's rows are 64 output channels (A = dy), its columns
// three neighbouring taps of a filter row times 64 channels (B = x). Both lie as the copy engine
// leaves them, a line of 64 channels for each pixel. Of an operand wider than 64 columns the
// descriptor says how far on the next 64 begin: here one tap's distance, `dilation` lines, so that
// the three taps are the same buffer read three times, each one pixel further on.
//
//     lines of x   p-1  p  p+1 ... p+126 p+127 p+128     a step's pixels and the taps' span
//     tap 0       [---------------------]
//     tap 1            [---------------------]
//     tap 2                 [----------------------]
//
// The pixels are those of a walk in which every image row is followed by columns of zeros, as many
// as the wider side of the padding: what lies before a row's first pixel and after its last are
// then zeros of the walk itself. dy is walked alike, and its zeros there silence what x holds. Inf
// and NaN of x they do not silence: within `padding` pixels of a row's ends these reach all taps of
// the filter rows that they touch.
//
//     producer warp   one thread: of every step a box of dy and a box of x, 33 KB
//     math warpgroup  64 of K x (3 taps x 64 channels), 96 accumulators a thread
//
// A tile is a unit (a chunk of three taps, a filter row, 64 channels) and 64 of K. A step is 128
// pixels: 64 would keep the tensor cores busy for less time than the issuing thread needs. Split-K:
// of S slices, slice i takes steps i, i + S, ..., so that CTAs running at the same time want
// neighbouring image rows, which L2 then reads once; the slices' sums are added in order.
//
// Refused, with a reason: batched filters (a neighbour's Inf and NaN must not reach a gradient), a
// stride along the last axis, filters of one tap there, taps that reach over more than
// kMaxWgmmaSpan pixels.
#ifndef JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_WGRAD_SM90_CUH_
#define JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_WGRAD_SM90_CUH_

#include <algorithm>

#include "cuda/device/element.cuh"
#include "cuda/device/igemm_wgmma_params.h"
#include "cuda/device/wgmma_tile_sm90.cuh"
#include "cuda/kernels/igemm_wgmma.h"
#include "cuda/kernels/igemm_wgmma_sm90.cuh"
#include "cuda/kernels/overlapping_launch.cuh"
#include "cuda/kernels/tensor_map.h"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tensor_copy_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv {

struct WgradRowsTile {
  static constexpr int kStages = 5, kSlotsB = 0, kResident = 0;
  static constexpr int kColumns = kWgradRowTaps * 64;
  static constexpr int kThreads = 256;
  static constexpr int kBytesDy = kWgradRowsPixels * 128;
  static constexpr int kBytesX = (kWgradRowsPixels + kMaxWgmmaSpan) * 128;
  static constexpr int kStageBytes = kBytesDy + kBytesX;
  static constexpr int kStagingAt = kStages * kStageBytes;
  static constexpr int kStagingBytes = 2048;  // of a warp
  // And the way from the dynamic segment's start to a multiple of 1024.
  static constexpr int kSharedBytes = kStagingAt + 4 * kStagingBytes + 1024;
  static_assert(kSharedBytes + 1024 <= 232448, "227 KB a CTA, barriers among them");
  static_assert(kStageBytes % 1024 == 0, "the swizzle's pattern starts with every slot");
};

struct WgradRowsMaps {
  CUtensorMap x, dy;
};

// A tile's columns: a chunk of taps of a filter row, and 64 channels.
struct WgradRowsUnit {
  int32_t chunk, t1, t2, slab;

  __device__ __forceinline__ WgradRowsUnit(const WgmmaPhase& phase, int32_t index) {
    const int32_t chunks = (phase.taps[0] + kWgradRowTaps - 1) / kWgradRowTaps;
    chunk = index % chunks, index /= chunks;
    t1 = index % phase.taps[1], index /= phase.taps[1];
    t2 = index % phase.taps[2];
    slab = index / phase.taps[2];
  }
};

// A place of the walk as the copy engine wants it.
struct WgradRowsPixel {
  int32_t x, y, z, image;

  __device__ __forceinline__ WgradRowsPixel(const WgmmaPhase& phase, int32_t index) {
    phase.count[0].Divmod(index, &index, &x);
    phase.count[1].Divmod(index, &index, &y);
    phase.count[2].Divmod(index, &image, &z);
  }
};

__device__ __forceinline__ void CopyIm2col(int32_t rank, uint32_t shared, const CUtensorMap* map,
                                           uint32_t barrier, int32_t c, int32_t x, int32_t y,
                                           int32_t z, int32_t image, uint16_t off1, uint16_t off2) {
  switch (rank) {
    case 1:
      CopyIm2col1d(shared, map, barrier, c, x, image, 0);
      break;
    case 2:
      CopyIm2col2d(shared, map, barrier, c, x, y, image, 0, off1);
      break;
    default:
      CopyIm2col3d(shared, map, barrier, c, x, y, z, image, 0, off1, off2);
  }
}

// The thread that issues the copies.
__device__ __forceinline__ void ProduceWgradRows(const IgemmWgmmaParams& params,
                                                 const WgradRowsMaps& maps, uint32_t ring,
                                                 const WgmmaBarriers<WgradRowsTile>& barriers) {
  using Tile = WgradRowsTile;
  const WgmmaPhase& phase = params.phase[0];
  const int32_t image_pixels = static_cast<int32_t>(
      phase.count[0].divisor * phase.count[1].divisor * phase.count[2].divisor);
  const int32_t span = (min(phase.taps[0], kWgradRowTaps) - 1) * phase.offset_step[0];
  const uint32_t bytes = Tile::kBytesDy + (kWgradRowsPixels + span) * 128;
  const int32_t slices = params.slices.divisor;
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const WgmmaTilePlace place(params, index);
    const WgradRowsUnit unit(phase, place.m_tile);
    const int32_t k = place.group * params.b_group + place.n_tile * 64;
    const int32_t channel = place.group * params.a_group + unit.slab * 64;
    const uint16_t off1 = phase.offset0[1] + unit.t1 * phase.offset_step[1];
    const uint16_t off2 = phase.offset0[2] + unit.t2 * phase.offset_step[2];
    // From a pixel of dy to the chunk's first tap, an image further on so that no index is
    // negative.
    const int32_t ahead =
        image_pixels + phase.offset0[0] + unit.chunk * kWgradRowTaps * phase.offset_step[0];
    for (int32_t step = place.slice; step < phase.steps; step += slices) {
      const WgradRowsPixel dy(phase, step * kWgradRowsPixels);
      const WgradRowsPixel x(phase, step * kWgradRowsPixels + ahead);
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, bytes);
      CopyIm2col(params.rank, shared, &maps.dy, barrier, k, dy.x, dy.y, dy.z, dy.image, 0, 0);
      CopyIm2col(params.rank, shared + Tile::kBytesDy, &maps.x, barrier, channel, x.x,
                 phase.lower[1] + x.y * params.src_step[1],
                 phase.lower[2] + x.z * params.src_step[2], x.image - 1, off1, off2);
      stage.Next();
    }
  }
}

// The accumulators -> the output, which has K fastest: in float32 eight neighbours of K of four
// channels at a time, which are whole sectors of memory; in 16 bits transposed in shared memory, 64
// channels by 16 of K of a warp.
template <typename T>
__device__ __forceinline__ void StoreWgradRows(const IgemmWgmmaParams& params,
                                               const WgmmaTilePlace& place,
                                               const float (&acc)[WgradRowsTile::kColumns / 2],
                                               uint32_t staging) {
  const WgmmaPhase& phase = params.phase[0];
  const WgradRowsUnit unit(phase, place.m_tile);
  const int lane = threadIdx.x % 32;
  const int taps = min(kWgradRowTaps, phase.taps[0] - unit.chunk * kWgradRowTaps);
  const int channels = min(64, params.row_channels - unit.slab * 64);
  const int32_t k = place.n_tile * 64 + threadIdx.x / 32 % 4 * 16;
  if (k >= params.gemm_n) return;
  const int32_t tap =
      (unit.t2 * phase.taps[1] + unit.t1) * phase.taps[0] + unit.chunk * kWgradRowTaps;
  int64_t at = place.slice * params.slice_elements + int64_t{place.group} * params.out_group + k +
               (int64_t{tap} * params.row_channels + unit.slab * 64) * params.out_channels;
#pragma unroll
  for (int t = 0; t < kWgradRowTaps; ++t) {
    if (t >= taps) break;
    const float* chunk = &acc[t * 32];
    if (params.out_is_f32) {
      const int g = lane / 4;
      float* column = static_cast<float*>(params.out) + at + lane % 4 * 2 * params.out_channels + g;
      const bool inside0 = k + g < params.gemm_n, inside8 = k + 8 + g < params.gemm_n;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j * 8 >= channels) break;
        if (inside0) column[0] = chunk[4 * j];
        if (inside0) column[params.out_channels] = chunk[4 * j + 1];
        if (inside8) column[8] = chunk[4 * j + 2];
        if (inside8) column[params.out_channels + 8] = chunk[4 * j + 3];
        column += int64_t{8} * params.out_channels;
      }
    } else {
      // Line c of 32 bytes, its halves exchanged where bit 2 of c is set: no bank conflicts.
      auto half_address = [&](int c, int half) {
        return staging + c * 32 + (half ^ (c / 4 % 2)) * 16;
      };
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        StoreMatricesTransposed(half_address(8 * (j + lane / 16) + lane % 8, lane / 8 % 2),
                                PackPair<T>(chunk[4 * j], chunk[4 * j + 1]),
                                PackPair<T>(chunk[4 * j + 2], chunk[4 * j + 3]),
                                PackPair<T>(chunk[4 * j + 4], chunk[4 * j + 5]),
                                PackPair<T>(chunk[4 * j + 6], chunk[4 * j + 7]));
      }
      __syncwarp();
      const int half = lane % 2;
      T* out = static_cast<T*>(params.out) + at + half * 8;
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int c = p * 16 + lane / 2;
        float words[4];
        LoadShared<0>(half_address(c, half), words);
        if (c < channels && k + half * 8 < params.gemm_n) {
          *reinterpret_cast<float4*>(out + int64_t{c} * params.out_channels) =
              make_float4(words[0], words[1], words[2], words[3]);
        }
      }
    }
    at += int64_t{params.row_channels} * params.out_channels;
  }
}

// The math warpgroup's way through the tiles. Its instructions take 96 clocks each: descriptors
// need not be made in uniform registers.
template <typename T>
__device__ __forceinline__ void ConsumeWgradRows(const IgemmWgmmaParams& params, uint32_t ring,
                                                 const WgmmaBarriers<WgradRowsTile>& barriers) {
  using Tile = WgradRowsTile;
  const WgmmaPhase& phase = params.phase[0];
  const uint32_t staging = ring + Tile::kStagingAt + (threadIdx.x / 32 - 4) * Tile::kStagingBytes;
  const uint32_t tap_bytes = phase.offset_step[0] * 128;
  const bool signals = threadIdx.x % 128 == 0;
  auto release = [&](uint32_t barrier) {
    if (signals) BarrierArrive(barrier);
  };
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const WgmmaTilePlace place(params, index);
    float acc[Tile::kColumns / 2];
    uint32_t last = 0;
    bool started = false;
#pragma unroll 1
    for (int32_t step = place.slice; step < phase.steps; step += params.slices.divisor) {
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      const uint64_t dy = MnMajorDescriptor<8192>(shared);
      const uint64_t x = MnMajorDescriptor(shared + Tile::kBytesDy, tap_bytes);
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kWgradRowsPixels / 16; ++k) {
        Wgmma<Tile::kColumns, T, true, true>(acc, dy + k * (2048 >> 4), x + k * (2048 >> 4),
                                             started || k > 0);
      }
      WgmmaCommit();
      WgmmaWait<1>();
      if (started) release(barriers.Empty(last));
      started = true;
      last = stage.slot;
      stage.Next();
    }
    WgmmaWait<0>();
    release(barriers.Empty(last));
    StoreWgradRows<T>(params, place, acc, staging);
  }
}

template <typename T>
__global__ void __launch_bounds__(WgradRowsTile::kThreads, 1)
    WgmmaWgradRows(const __grid_constant__ IgemmWgmmaParams params,
                   const __grid_constant__ WgradRowsMaps maps) {
  using Tile = WgradRowsTile;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[WgmmaBarriers<Tile>::kCount];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const WgmmaBarriers<Tile> barriers{SharedAddress(barrier_words)};
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::kStages; ++s) {
      BarrierInit(barriers.Full(s), 1);
      BarrierInit(barriers.Empty(s), 1);
    }
    BarrierInitFence();
    PrefetchTensorMap(&maps.x);
    PrefetchTensorMap(&maps.dy);
  }
  __syncthreads();
  // 256 threads of 255 registers fit: nothing to move from the producer to the math.
  if (__shfl_sync(0xffffffff, threadIdx.x / 128, 0) == 0) {
    if (threadIdx.x == 0) ProduceWgradRows(params, maps, ring, barriers);
  } else {
    ConsumeWgradRows<T>(params, ring, barriers);
  }
}

inline Status EncodeWgradRowsMaps(const IgemmWgmmaParams& params, const WgmmaOperands& operands,
                                  DType dtype, WgradRowsMaps* maps) {
  const WgmmaPhase& phase = params.phase[0];
  DenseTensor x;
  x.dtype = dtype;
  x.address = operands.a;
  x.rank = params.rank + 2;
  x.extent[0] = operands.a_channels;
  for (int axis = 0; axis < params.rank; ++axis) x.extent[axis + 1] = operands.a_extent[axis];
  x.extent[params.rank + 1] = operands.a_images;
  const int32_t span = (std::min<int32_t>(phase.taps[0], kWgradRowTaps) - 1) * phase.offset_step[0];
  JAXCONV_RETURN_IF_ERROR(EncodeIm2colMap(x, phase.lower, operands.a_upper[0], params.src_step,
                                          kWgradRowsPixels + span, &maps->x));
  DenseTensor dy = x;
  dy.address = operands.b;
  dy.extent[0] = operands.b_columns;
  for (int axis = 0; axis < params.rank; ++axis) dy.extent[axis + 1] = operands.b_extent[axis];
  const int32_t lower[3] = {}, upper[3] = {operands.b_upper}, step[3] = {1, 1, 1};
  return EncodeIm2colMap(dy, lower, upper, step, kWgradRowsPixels, &maps->dy);
}

template <DType kType>
Status LaunchWgmmaWgradRows(const IgemmWgmmaParams& params, const WgmmaOperands& operands,
                            void* stream) {
  using T = typename ElementOf<kType>::Type;
  WgradRowsMaps maps{};
  JAXCONV_RETURN_IF_ERROR(EncodeWgradRowsMaps(params, operands, kType, &maps));
  int sm_count = 0;
  JAXCONV_RETURN_IF_ERROR(CountMultiprocessors(&sm_count));
  OverlappingLaunch launch;
  launch.grid = std::min(params.tiles, sm_count);
  launch.threads = WgradRowsTile::kThreads;
  launch.shared_bytes = WgradRowsTile::kSharedBytes;
  launch.overlaps = false;
  return Launch(WgmmaWgradRows<T>, launch, stream, params, maps);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_WGRAD_SM90_CUH_
