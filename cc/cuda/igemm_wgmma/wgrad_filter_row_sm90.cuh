// igemm_wgmma, wgrad filter-row: the taps of a filter row share one load of x (sm_90a).
//
// The operands of wgrad are swapped: wgmma's rows are 64 output channels (A = dy), its columns
// three neighbouring taps of a filter row times 64 channels (B = x). Both are MN-major as TMA loads
// them, a row of 64 channels for each pixel. A descriptor of an operand wider than 64 columns says
// how far on the next 64 begin: here one tap's distance, `dilation` rows, so that the three taps
// are the same buffer read three times, each one pixel further on.
//
//     rows of x    p-1  p  p+1 ... p+126 p+127 p+128     a k-block's pixels and the taps' span
//     tap 0       [---------------------]
//     tap 1            [---------------------]
//     tap 2                 [----------------------]
//
// The pixel index runs over image rows that are each followed by max(pad_lo, pad_hi) columns of
// zeros, so the pixels before a row's first and after its last are zeros. dy is padded the same
// way, so products in the padding are zero, except where x is Inf or NaN: 0 * Inf = NaN reaches all
// taps of the filter rows that touch such an x within `padding` pixels of a row's ends.
//
//     producer, one warp    one thread: of every k-block a box of dy and a box of x, 33 KB
//     consumer warpgroup    64 of K x (3 taps x 64 channels), 96 accumulators a thread
//
// A tile is a unit (three taps, a filter row, 64 channels) and 64 of K. A k-block is 128 pixels: 64
// would occupy the tensor cores for less time than the producer needs. Split-K: with S slices,
// slice i takes k-blocks i, i + S, ..., so that concurrent CTAs read neighbouring image rows, which
// cross from DRAM to L2 once; the slices' sums are added in order. Shared memory: 5 stages of 33
// KB, 8 KB of staging. Registers: 148 a thread. Full(s), Empty(s): as in cooperative_sm90.cuh.
//
// Refused, with a reason: batched filters (a neighbour's Inf and NaN must not reach a gradient), a
// stride along the last axis, filters of one tap there, taps that reach over more than kMaxSpan
// pixels.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_FILTER_ROW_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_FILTER_ROW_SM90_CUH_

#include <algorithm>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/igemm_wgmma/launch_sm90.cuh"
#include "cuda/igemm_wgmma/store_tile_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

template <int kStages_>
struct WgradFilterRowTile {
  static constexpr int kStages = kStages_, kFilterSlots = 0, kStationary = 0;
  static constexpr int kColumns = kWgradRowTaps * 64;
  static constexpr int kTileM = kColumns, kTileN = 64;  // filter rows, output channels
  static constexpr int kThreads = 256;
  static constexpr int kBytesDy = kWgradRowPixels * 128;
  static constexpr int kBytesX = (kWgradRowPixels + kMaxSpan) * 128;
  static constexpr int kStageBytes = kBytesDy + kBytesX;
  static constexpr int kStagingAt = kStages * kStageBytes;
  static constexpr int kStagingBytes = 2048;  // of a warp
  // 1024 more to align the ring.
  static constexpr int kSharedBytes = kStagingAt + 4 * kStagingBytes + 1024;
  static_assert(kSharedBytes + 1024 <= 232448, "227 KB a CTA, barriers among them");
  static_assert(kStageBytes % 1024 == 0, "the swizzle's pattern starts with every slot");
};

struct WgradFilterRowMaps {
  CUtensorMap x, dy;
};

// A tile's columns: several taps of a filter row times 64 channels.
struct FilterRowUnit {
  int32_t chunk, t1, t2, channel_block;  // chunk: kWgradRowTaps taps each

  __device__ __forceinline__ FilterRowUnit(const ResidueClass& of, int32_t index) {
    const int32_t chunks = (of.taps[0] + kWgradRowTaps - 1) / kWgradRowTaps;
    chunk = index % chunks, index /= chunks;
    t1 = index % of.taps[1], index /= of.taps[1];
    t2 = index % of.taps[2];
    channel_block = index / of.taps[2];
  }
};

// A pixel of the padded rows as TMA coordinates.
struct WalkPlace {
  int32_t x, y, z, image;

  __device__ __forceinline__ WalkPlace(const ResidueClass& of, int32_t index) {
    of.count[0].Divmod(index, &index, &x);
    of.count[1].Divmod(index, &index, &y);
    of.count[2].Divmod(index, &image, &z);
  }
};

__device__ __forceinline__ void LoadWalk(int32_t rank, uint32_t shared, const CUtensorMap* map,
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

// The producer, one thread.
template <class Tile>
__device__ __forceinline__ void ProduceWgradFilterRows(const Params& params,
                                                       const WgradFilterRowMaps& maps,
                                                       uint32_t ring,
                                                       const Barriers<Tile>& barriers) {
  const ResidueClass& of = params.residue_class[0];
  const int32_t image_pixels =
      static_cast<int32_t>(of.count[0].divisor * of.count[1].divisor * of.count[2].divisor);
  const int32_t span = (min(of.taps[0], kWgradRowTaps) - 1) * of.offset_step[0];
  const uint32_t bytes = Tile::kBytesDy + (kWgradRowPixels + span) * 128;
  const int32_t slices = params.slices.divisor;
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const FilterRowUnit unit(of, place.m_tile);
    const int32_t k = place.group * params.b_group + place.n_tile * 64;
    const int32_t channel = place.group * params.a_group + unit.channel_block * 64;
    const uint16_t off1 = of.offset0[1] + unit.t1 * of.offset_step[1];
    const uint16_t off2 = of.offset0[2] + unit.t2 * of.offset_step[2];
    // The distance from a pixel of dy to the chunk's first tap, plus one image so that no index is
    // negative.
    const int32_t ahead =
        image_pixels + of.offset0[0] + unit.chunk * kWgradRowTaps * of.offset_step[0];
    for (int32_t k_block = place.slice; k_block < of.k_blocks; k_block += slices) {
      const WalkPlace dy(of, k_block * kWgradRowPixels);
      const WalkPlace x(of, k_block * kWgradRowPixels + ahead);
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, bytes);
      LoadWalk(params.rank, shared, &maps.dy, barrier, k, dy.x, dy.y, dy.z, dy.image, 0, 0);
      LoadWalk(params.rank, shared + Tile::kBytesDy, &maps.x, barrier, channel, x.x,
               of.lower[1] + x.y * params.src_step[1], of.lower[2] + x.z * params.src_step[2],
               x.image - 1, off1, off2);
      stage.Next();
    }
  }
}

// Stores the accumulators to the output, whose fastest axis is K: float32 as eight neighbours of K
// for four channels at a time, which are whole sectors; 16-bit results transposed in shared memory,
// a warp's block of 64 channels by 16 of K.
template <typename T, class Tile, class Epilogue>
__device__ __forceinline__ void StoreWgradFilterRow(const Params& params, const TilePlace& place,
                                                    float (&acc)[Tile::kColumns / 2],
                                                    uint32_t staging, const Epilogue& epilogue) {
  const ResidueClass& of = params.residue_class[0];
  const FilterRowUnit unit(of, place.m_tile);
  const int lane = threadIdx.x % 32;
  const int taps = min(kWgradRowTaps, of.taps[0] - unit.chunk * kWgradRowTaps);
  const int channels = min(64, params.row_channels - unit.channel_block * 64);
  const int32_t k = place.n_tile * 64 + threadIdx.x / 32 % 4 * 16;
  if (k >= params.gemm_n) return;
  const int32_t tap = (unit.t2 * of.taps[1] + unit.t1) * of.taps[0] + unit.chunk * kWgradRowTaps;
  int64_t at = place.slice * params.slice_elements + int64_t{place.group} * params.out_group + k +
               (int64_t{tap} * params.row_channels + unit.channel_block * 64) * params.out_channels;
#pragma unroll
  for (int t = 0; t < kWgradRowTaps; ++t) {
    if (t >= taps) break;
    float* chunk = &acc[t * 32];
    if constexpr (!Epilogue::kPlain) {
      // Element i: channel c of the block, k + n of the output channels.
      const int32_t first_row = (tap + t) * params.row_channels + unit.channel_block * 64;
      auto finish = [&](auto* out) {
        using Out = std::remove_pointer_t<decltype(out)>;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int c = i / 4 * 8 + lane % 4 * 2 + i % 2, n = lane / 4 + i / 2 % 2 * 8;
          chunk[i] = epilogue.template operator()<Out>(
              chunk[i], OutputPlace{at + int64_t{c} * params.out_channels + n, first_row + c,
                                    place.group * params.gemm_n + k + n,
                                    c < channels && k + n < params.gemm_n});
        }
      };
      if (params.out_is_f32) {
        finish(static_cast<float*>(params.out));
      } else {
        finish(static_cast<T*>(params.out));
      }
    }
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
      // Row c has 32 bytes; its halves are swapped where bit 2 of c is set, against bank conflicts.
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

// The consumer warpgroup. An instruction takes 96 cycles, long enough to build descriptors outside
// the uniform registers.
template <typename T, class Tile, class Epilogue>
__device__ __forceinline__ void ConsumeWgradFilterRows(const Params& params, uint32_t ring,
                                                       const Barriers<Tile>& barriers) {
  const ResidueClass& of = params.residue_class[0];
  const uint32_t staging = ring + Tile::kStagingAt + (threadIdx.x / 32 - 4) * Tile::kStagingBytes;
  const uint32_t tap_bytes = of.offset_step[0] * 128;
  const Release release;
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    float acc[Tile::kColumns / 2];
    uint32_t last = 0;
    bool started = false;
#pragma unroll 1
    for (int32_t k_block = place.slice; k_block < of.k_blocks; k_block += params.slices.divisor) {
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      const uint64_t dy = MnMajorDescriptor<8192>(shared);
      const uint64_t x = MnMajorDescriptor(shared + Tile::kBytesDy, tap_bytes);
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kWgradRowPixels / 16; ++k) {
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
    const auto epilogue = MakeEpilogue<Epilogue>(params.epilogue, params.slice_elements > 0);
    StoreWgradFilterRow<T, Tile>(params, place, acc, staging, epilogue);
    FinishTile<Tile>(params, place, of, epilogue);
  }
}

template <class Tag>
__global__ void __launch_bounds__(Tag::kThreads, 1)
    WgradFilterRowKernel(const __grid_constant__ Params params,
                         const __grid_constant__ WgradFilterRowMaps maps) {
  using Tile = typename Tag::Tile;
  using T = typename ElementOf<Tag::kType>::Type;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[Barriers<Tile>::kCount];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const Barriers<Tile> barriers{SharedAddress(barrier_words)};
  if (threadIdx.x == 0) {
    barriers.Init(1);
    PrefetchTensorMap(&maps.x);
    PrefetchTensorMap(&maps.dy);
  }
  __syncthreads();
  // 256 threads with 255 registers each fit, so the producer need not give registers to the
  // consumer.
  if (__shfl_sync(0xffffffff, threadIdx.x / 128, 0) == 0) {
    if (threadIdx.x == 0) ProduceWgradFilterRows(params, maps, ring, barriers);
  } else {
    ConsumeWgradFilterRows<T, Tile, typename Tag::Epilogue>(params, ring, barriers);
  }
}

// Launches with tensor maps of x and dy along the walk; a k-block is kPixels of it.
template <auto kKernel, class Tag, int kPixels>
Status LaunchFilterRowBoxes(const Plan& plan, const Operands& operands, void* stream,
                            bool overlaps) {
  return LaunchWithMaps<kKernel, Tag, WgradFilterRowMaps>(
      plan, operands, stream, overlaps,
      [](const LaunchParams& launch, const Params& params, const void* a, const void* b,
         WgradFilterRowMaps* maps) {
        const ResidueClass& of = params.residue_class[0];
        DenseTensor x;
        x.dtype = Tag::kType;
        x.address = a;
        x.rank = params.rank + 2;
        x.extent[0] = launch.a_channels;
        for (int axis = 0; axis < params.rank; ++axis) {
          x.extent[axis + 1] = launch.a_extent[axis];
        }
        x.extent[params.rank + 1] = launch.a_images;
        const int32_t span = (std::min<int32_t>(of.taps[0], kWgradRowTaps) - 1) * of.offset_step[0];
        JAXCONV_RETURN_IF_ERROR(EncodeIm2colMap(x, of.lower, launch.a_upper[0], params.src_step,
                                                kPixels + span, &maps->x));
        DenseTensor dy = x;
        dy.address = b;
        dy.extent[0] = launch.b_columns;
        for (int axis = 0; axis < params.rank; ++axis) {
          dy.extent[axis + 1] = launch.b_extent[axis];
        }
        const int32_t lower[3] = {}, upper[3] = {launch.b_upper}, step[3] = {1, 1, 1};
        return EncodeIm2colMap(dy, lower, upper, step, kPixels, &maps->dy);
      });
}

template <Op kOp, DType kType_, int kStages>
struct WgradFilterRow : WgradFilterRowTile<kStages> {
  static_assert(kOp == Op::kWgrad);
  static constexpr DType kType = kType_;
  using Tile = WgradFilterRowTile<kStages>;
  using Epilogue = PlainEpilogue;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchFilterRowBoxes<WgradFilterRowKernel<Tag>, Tag, kWgradRowPixels>(
        plan, operands, stream, /*overlaps=*/false);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_FILTER_ROW_SM90_CUH_
