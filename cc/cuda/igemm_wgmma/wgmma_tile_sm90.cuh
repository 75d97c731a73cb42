// The shape of a warpgroup-cooperative tile, its mainloop over one stage, and the way of its
// accumulators to memory.
#ifndef JAXCONV_CUDA_DEVICE_WGMMA_TILE_SM90_CUH_
#define JAXCONV_CUDA_DEVICE_WGMMA_TILE_SM90_CUH_

#include <cstdint>
#include <cstring>

#include "cuda/device/element.cuh"
#include "cuda/device/fused_epilogue.cuh"
#include "cuda/device/igemm_wgmma_params.h"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv {

// Shared memory and registers of a CTA that multiplies kTileM pixels by kTileN channels.
//
// kSlotsB = 0: a stage holds the activations and the filter of one step. Otherwise, "rows": the
// activations of a whole filter row, kTileM pixels and kSpan more of the padded image, are loaded
// once and read by every tap of the row, one pixel further on (kStages slots); the filter has
// kSlotsB slots of its own. kResident (rows too, unless kOneTap): so many steps of the filter's
// columns stay in shared memory for the kernel's life instead.
//
// kStagingBytes of shared memory, of a math warp, are where results are brought into order on their
// way out: 2048 do for 16-bit results that are only rounded, 4096 for all. float32 results of
// pingpong tiles of float32 operands, and where there are less than 4096, need none.
template <int kWarpgroups_, bool kPingpong_, int kTileM_, int kTileN_, int kStages_, int kSlotsB_,
          int kResident_, int kStagingBytes_, bool kOneTap_ = false>
struct WgmmaLayout {
  static constexpr bool kMma = false;  // mma.sync instead (mma_wgrad_tile_sm90.cuh)
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr bool kPingpong = kPingpong_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_;
  static constexpr int kStages = kStages_;
  static constexpr int kSlotsB = kSlotsB_, kResident = kResident_;
  static constexpr bool kOneTap = kOneTap_;
  static constexpr bool kRows = !kOneTap_ && (kSlotsB > 0 || kResident > 0);
  static constexpr bool kFilterApart = kRows || kResident > 0;  // not in the activations' stages
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kPixels = kTileM + (kRows ? kMaxWgmmaSpan : 0);  // of a load
  static constexpr int kBytesA = kPixels * 128;
  static constexpr int kBytesB = kTileN * 128;
  static constexpr int kStageBytes = kBytesA + (kFilterApart ? 0 : kBytesB);
  static constexpr int kFilterAt = kStages * kStageBytes;
  static constexpr int kStagingAt = kFilterAt + (kResident > 0 ? kResident : kSlotsB) * kBytesB;
  static constexpr int kStagingBytes = kStagingBytes_;
  // And the way from the dynamic segment's start to a multiple of 1024.
  static constexpr int kSharedBytes = kStagingAt + kWarpgroups * 4 * kStagingBytes + 1024;
  static_assert(kSharedBytes + 1024 <= 232448, "227 KB a CTA, barriers among them");
  static_assert(kBytesA % 1024 == 0, "the swizzle's pattern starts with every slot");
  // 65536 registers among the warpgroups; the producer needs few.
  static constexpr int kAccumulators = kTileM * kTileN / (kPingpong ? 1 : kWarpgroups) / 128;
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : kAccumulators > 160 ? 24 : 40;
  static constexpr int kMathRegisters = kWarpgroups == 3 ? 160 : kAccumulators > 160 ? 240 : 232;
};

// kWarpgroups math warpgroups of kBlocks x 64 rows by kN0 + kN1 columns (two instructions where one
// cannot be so wide). Cooperative: the warpgroups stand one above the other in one tile. Pingpong:
// each has a tile of its own, and they take turns at the tensor cores, so that one stores while the
// other multiplies.
template <int kWarpgroups_, bool kPingpong_, int kBlocks_, int kN0_, int kN1_, int kStages_,
          int kSlotsB_ = 0, int kResident_ = 0, int kStagingBytes_ = 4096, bool kOneTap_ = false>
struct WgmmaTile
    : WgmmaLayout<kWarpgroups_, kPingpong_, (kPingpong_ ? 1 : kWarpgroups_) * kBlocks_ * 64,
                  kN0_ + kN1_, kStages_, kSlotsB_, kResident_, kStagingBytes_, kOneTap_> {
  static constexpr bool kColumns = false;
  static constexpr bool kWholeRows = false;  // stored as such, where a step or two is all there is
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kN0 = kN0_, kN1 = kN1_;
  // From one warpgroup's part of a cooperative tile to the next.
  static constexpr int kOwnPixels = kPingpong_ ? 0 : kBlocks * 64;

  struct Accumulators {
    float first[kBlocks][kN0 / 2];
    float second[kBlocks][kN1 > 0 ? kN1 / 2 : 1];
  };

  // One stage: 128 bytes of the reduction. `a`: of this warpgroup; `b`: the whole tile's.
  template <typename T, bool kMnMajorA, bool kMnMajorB>
  static __device__ __forceinline__ void Multiply(Accumulators& acc, uint32_t a, uint32_t b,
                                                  bool accumulate) {
    const uint64_t desc_a = kMnMajorA ? MnMajorDescriptor<8192>(a) : KMajorDescriptor(a);
    const uint64_t desc_b = kMnMajorB ? MnMajorDescriptor<8192>(b) : KMajorDescriptor(b);
    // From one instruction's 32 bytes of the reduction to the next.
    constexpr int kStepA = (kMnMajorA ? 2048 : 32) >> 4;
    constexpr int kStepB = (kMnMajorB ? 2048 : 32) >> 4;
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const uint64_t block_a = desc_a + k * kStepA + i * (8192 >> 4);
        const int add = accumulate || k > 0;
        Wgmma<kN0, T, kMnMajorA, kMnMajorB>(acc.first[i], block_a, desc_b + k * kStepB, add);
        if constexpr (kN1 > 0) {
          Wgmma<kN1, T, kMnMajorA, kMnMajorB>(acc.second[i], block_a,
                                              desc_b + k * kStepB + kN0 * (128 >> 4), add);
        }
      }
    }
    WgmmaCommit();
  }
};

template <typename T>
__device__ __forceinline__ uint32_t PackPair(float first, float second);
template <>
__device__ __forceinline__ uint32_t PackPair<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
template <>
__device__ __forceinline__ uint32_t PackPair<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

// Sixteen rows by 128 bytes of a warp -> output of type T, nothing added: rounded at once, laid
// down in 2 KB, 16-bit ones by stmatrix, so that neither way conflicts (chunk c of row r at c ^ r %
// 8, or in float32 at c ^ 2 (r % 4)), stored as 16 bytes a lane, eight lanes a row. dst[p] is the
// output offset of row 4 p + lane / 8 with this lane's columns, or negative.
template <typename T>
__device__ __forceinline__ void StoreRounded(const float* acc, uint32_t staging, T* out,
                                             const int64_t (&dst)[4], bool inside) {
  const int lane = Lane();
  auto chunk_address = [&](int row, int chunk) {
    return staging + row * 128 + (chunk ^ (sizeof(T) == 2 ? row % 8 : row % 4 * 2)) * 16;
  };
  if constexpr (sizeof(T) == 2) {
    const int row = lane % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      StoreMatrices(chunk_address(row, j + lane / 16), PackPair<T>(acc[4 * j], acc[4 * j + 1]),
                    PackPair<T>(acc[4 * j + 2], acc[4 * j + 3]),
                    PackPair<T>(acc[4 * j + 4], acc[4 * j + 5]),
                    PackPair<T>(acc[4 * j + 6], acc[4 * j + 7]));
    }
  } else {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t at = chunk_address(g, 2 * j + t / 2) + t % 2 * 8;
      StorePair(at, acc[4 * j], acc[4 * j + 1]);
      StorePair(at + 8 * 128, acc[4 * j + 2], acc[4 * j + 3]);
    }
  }
  __syncwarp();
  uint4 chunk[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    LoadShared<0>(chunk_address(p * 4 + lane / 8, lane % 8), reinterpret_cast<float*>(&chunk[p]));
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    if (inside && dst[p] >= 0) *reinterpret_cast<uint4*>(out + dst[p]) = chunk[p];
  }
}

// Sixteen rows of 256 columns -> 16-bit output, nothing added, like StoreRounded but in whole rows:
// a store of a warp is one piece of 512 bytes, which memory takes up to 5 % faster than four pieces
// of 128. Through 4 KB, eight rows at a time. `row_offset(r)`: output offset of row r's column 0,
// or negative.
template <typename T, typename RowOffset>
__device__ __forceinline__ void StoreRoundedRows(const float (&acc)[128], uint32_t staging, T* out,
                                                 RowOffset row_offset, int columns) {
  const int lane = threadIdx.x % 32;
  auto chunk_address = [&](int row, int chunk) {
    return staging + row * 512 + (chunk ^ row % 8) * 16;
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      const float* d = acc + 4 * j + 2 * half;
      StoreMatrices(chunk_address(lane % 8, j + lane / 8), PackPair<T>(d[0], d[1]),
                    PackPair<T>(d[4], d[5]), PackPair<T>(d[8], d[9]), PackPair<T>(d[12], d[13]));
    }
    __syncwarp();
    uint4 chunk[8];
#pragma unroll
    for (int row = 0; row < 8; ++row) chunk[row] = LoadChunk(chunk_address(row, lane));
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      const int64_t offset = row_offset(half * 8 + row);
      if (offset >= 0 && lane * 8 < columns) {
        *reinterpret_cast<uint4*>(out + offset + lane * 8) = chunk[row];
      }
    }
  }
}

// Sixteen rows by 64 columns in float32 through 4 KB, with an epilogue, for outputs of either
// width. `row_offset(r)`: output offset of row r's column 0, or negative.
template <typename Out, class Epilogue, typename RowOffset>
__device__ __forceinline__ void StoreFinished(const float* acc, uint32_t staging, Out* out,
                                              const Epilogue& epilogue, RowOffset row_offset,
                                              int columns, int channel0) {
  constexpr int kWidth = 16 / sizeof(Out);
  constexpr int kLanesOfRow = 64 / kWidth;
  constexpr int kRowsOfPass = 32 / kLanesOfRow;
  const int lane = Lane();
  const int g = lane / 4, t = lane % 4;
  auto chunk_address = [&](int row, int chunk) {
    return staging + row * 256 + (chunk ^ (row % 4 * 2)) * 16;
  };
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t at = chunk_address(g, 2 * j + t / 2) + t % 2 * 8;
    StorePair(at, acc[4 * j], acc[4 * j + 1]);
    StorePair(at + 8 * 256, acc[4 * j + 2], acc[4 * j + 3]);
  }
  __syncwarp();
  const int column = lane % kLanesOfRow * kWidth;
#pragma unroll
  for (int p = 0; p < 16 / kRowsOfPass; ++p) {
    const int row = p * kRowsOfPass + lane / kLanesOfRow;
    float values[kWidth];
#pragma unroll
    for (int q = 0; q < kWidth / 4; ++q) {
      LoadShared<0>(chunk_address(row, column / 4 + q), &values[q * 4]);
    }
    const int64_t offset = row_offset(row);
    if (offset < 0 || column >= columns) continue;
    Out elements[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      elements[e] = FromFloat<Out>(epilogue.template operator()<Out>(values[e], offset + column + e,
                                                                     channel0 + column + e, true));
    }
    uint4 packed;
    memcpy(&packed, elements, sizeof(packed));
    *reinterpret_cast<uint4*>(out + offset + column) = packed;
  }
}

// Float32 results straight from the fragments: a store of a warp is eight rows of four lanes with
// 32 bytes, a whole sector, and costs the other warpgroup's operands no shared memory. `upper`,
// `lower`: output offsets of rows lane / 4 and lane / 4 + 8 at column 0, or negative.
template <class Epilogue>
__device__ __forceinline__ void StoreFragments(const float* acc, float* out,
                                               const Epilogue& epilogue, int64_t upper,
                                               int64_t lower, int columns, int channel0) {
  const int lane = Lane();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int column = 8 * j + lane % 4 * 2;
    if (column >= columns) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = half == 0 ? upper : lower;
      if (row < 0) continue;
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        pair[e] = epilogue.template operator()<float>(acc[4 * j + 2 * half + e], row + column + e,
                                                      channel0 + column + e, true);
      }
      *reinterpret_cast<float2*>(out + row + column) = make_float2(pair[0], pair[1]);
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_DEVICE_WGMMA_TILE_SM90_CUH_
