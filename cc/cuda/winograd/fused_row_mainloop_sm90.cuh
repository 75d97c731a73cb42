// The products of a tile of the fused row kernel: pixels from shared memory, V in registers, wgmma
// (sm_90a).
#ifndef JAXCONV_CUDA_WINOGRAD_FUSED_ROW_MAINLOOP_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_FUSED_ROW_MAINLOOP_SM90_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/winograd_transform.cuh"
#include "cuda/ptx/cluster_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"
#include "cuda/winograd/fused_row_tile_sm90.cuh"

namespace jaxconv::winograd {

// A warp's pixels for 16 positions by 16 channels: fragments of A before the transform. A
// warpgroup's points need the m + 2 inputs of a tile except the last or except the first. The m
// middle inputs are loaded in pairs for 8 positions at a time, the remaining one for 16 positions.
template <class Tile, int kWarpgroup>
struct PixelReader {
  static constexpr int m = Tile::m;
  static constexpr int kEnd = kWarpgroup == 0 ? 0 : m + 1;
  uint32_t pair_at[m / 2], end_at;

  // `stage`: the shared address of the stage; computes that of the warp's part.
  __device__ __forceinline__ explicit PixelReader(uint32_t stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    auto place = [&](int input, int channels) {
      const int position = warp * 16 + lane % 8 + input / m;
      return stage + input % m * Tile::kResidueBytes + position * 128 +
             (channels ^ position % 8) * 16;
    };
#pragma unroll
    for (int i = 0; i < m / 2; ++i) pair_at[i] = place(1 + 2 * i + lane / 16, lane / 8 % 2);
    end_at = place(kEnd, lane / 8 % 2) + lane / 16 * 1024;
  }
  __device__ __forceinline__ void Flip(uint32_t bits) {
#pragma unroll
    for (int i = 0; i < m / 2; ++i) pair_at[i] ^= bits;
    end_at ^= bits;
  }
  __device__ __forceinline__ void Move(int32_t bytes) {
#pragma unroll
    for (int i = 0; i < m / 2; ++i) pair_at[i] += bytes;
    end_at += bytes;
  }
};

// Converts pairs of a pixel's channels to float16; bfloat16 is first scaled by a power of two into
// float16's range.
template <typename T>
struct ToFloat16;
template <>
struct ToFloat16<__half> {
  __device__ __forceinline__ explicit ToFloat16(float) {}
  __device__ __forceinline__ __half2 operator()(uint32_t word) const {
    __half2 pair;
    memcpy(&pair, &word, sizeof(pair));
    return pair;
  }
};
template <>
struct ToFloat16<__nv_bfloat16> {
  __nv_bfloat162 scale;
  __device__ __forceinline__ explicit ToFloat16(float factor)
      : scale(__float2bfloat162_rn(factor)) {}
  __device__ __forceinline__ __half2 operator()(uint32_t word) const {
    __nv_bfloat162 pair;
    memcpy(&pair, &word, sizeof(pair));
    pair = __hmul2(pair, scale);
    memcpy(&word, &pair, sizeof(word));
    return __floats2half2_rn(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
  }
};

// A consumer warpgroup's accumulators: its points, 64 positions by 128 columns.
template <class Tile>
struct RowSums {
  float point[Tile::kOwnPoints][64];
};

// Frees a slot of the filter for a warpgroup: thread r signals rank r.
template <class Tile>
__device__ __forceinline__ void ReleaseSlot(const Barriers<Tile>& barriers, uint32_t slot) {
  const int32_t rank = threadIdx.x % 128;
  if (rank < kRowClusterCtas) {
    BarrierArriveInCluster(AddressInCluster(barriers.EmptyFilter(slot), rank));
  }
}

// All products of a tile. The last slot, `slot`, stays occupied by the warpgroup.
template <typename T, class Tile, int kWarpgroup>
__device__ __forceinline__ void MultiplyTile(const RowParams& params, uint32_t ring,
                                             const Barriers<Tile>& barriers,
                                             const ToFloat16<T>& to_float16,
                                             RingPlace<Tile::kStages>& stage,
                                             RingPlace<Tile::kFilterSlots>& slot,
                                             PixelReader<Tile, kWarpgroup>& pixels,
                                             RowSums<Tile>& sums) {
  constexpr int m = Tile::m;
  const int32_t blocks = params.reduction_blocks, slots = blocks * kTaps;
  const bool signals = threadIdx.x % 32 == 0;
  uint32_t pair[m / 2][4], end[4], a[Tile::kOwnPoints][4];
  auto load_pairs = [&](int offset, uint32_t bits) {
#pragma unroll
    for (int i = 0; i < m / 2; ++i) LoadMatrices((pixels.pair_at[i] ^ bits) + offset, pair[i]);
  };
  auto transform = [&](int half) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      __half2 d[m + 2], v[Tile::kOwnPoints];
      d[0] = d[m + 1] = to_float16(end[2 * half + q]);
#pragma unroll
      for (int i = 0; i < m / 2; ++i) {
        d[1 + 2 * i] = to_float16(pair[i][q]);
        d[2 + 2 * i] = to_float16(pair[i][2 + q]);
      }
      TransformInputHalf<m, kWarpgroup>(d, v);
#pragma unroll
      for (int p = 0; p < Tile::kOwnPoints; ++p)
        memcpy(&a[p][half + 2 * q], &v[p], sizeof(uint32_t));
    }
  };
  // Clears explicitly, not by the first product's scale-d: the compiler would treat the previous
  // tile's sums as live until then, and the epilogue would lack their registers.
#pragma unroll
  for (int p = 0; p < Tile::kOwnPoints; ++p) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums.point[p][i] = 0;
  }
  BarrierWait(barriers.Full(stage.slot), stage.parity);
  load_pairs(0, 0);
  LoadMatrices(pixels.end_at, end);
  int32_t r = 0, block = 0;  // of the stage
  int32_t blocks_of_stage = min(2, blocks), left = blocks_of_stage;
  for (int32_t i = 0; i < slots; ++i) {
    BarrierWait(barriers.FullFilter(slot.slot), slot.parity);
    const uint64_t b =
        CoreMatrixDescriptor<128, 512>(ring + Tile::kFilterAt + slot.slot * Tile::kSlotBytes +
                                       kWarpgroup * Tile::kOwnPoints * Tile::kPointBytes);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      transform(0);
      load_pairs(1024, k * 32);
      transform(1);
      WgmmaFence();
#pragma unroll
      for (int p = 0; p < Tile::kOwnPoints; ++p) {
        WgmmaFromRegisters(sums.point[p], a[p], b + ((p * Tile::kPointBytes + k * 256) >> 4), true);
      }
      WgmmaCommit();
      // The next pixels are loaded while these products run.
      if (k == 0) {
        load_pairs(0, 32);
        LoadMatrices(pixels.end_at ^ 32, end);
      } else {
        if (blocks_of_stage == 2) pixels.Flip(64);
        if (--left == 0) {
          __syncwarp();
          if (signals) BarrierArrive(barriers.Empty(stage.slot));
          stage.Next();
          pixels.Move(stage.slot == 0 ? -(Tile::kStages - 1) * Tile::kStageBytes
                                      : Tile::kStageBytes);
          if (++r == kTaps) r = 0, block += 2;
          left = blocks_of_stage = min(2, blocks - block);
          if (i + 1 < slots) BarrierWait(barriers.Full(stage.slot), stage.parity);
        }
        if (i + 1 < slots) {
          load_pairs(0, 0);
          LoadMatrices(pixels.end_at, end);
        }
      }
      WgmmaWait<0>();
    }
    if (i + 1 < slots) {
      ReleaseSlot(barriers, slot.slot);
      slot.Next();
    }
  }
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FUSED_ROW_MAINLOOP_SM90_CUH_
