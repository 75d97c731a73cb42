// A warpgroup's accumulators of a SwapAbTile -> the fused epilogue -> the output (sm_90a).
//
// As in store_fused_sm90.cuh, the epilogue works on the fragments: straight code if the activation
// is a clamp, otherwise a loop over one copy of the code.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SWAP_AB_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SWAP_AB_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/pick_sums.cuh"
#include "cuda/igemm_wgmma/fused_turns_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// A thread's scale and bias for a tile: it has two channels, g and g + 8 of its warp's sixteen.
// They are loaded before the tile is multiplied, or once if all tiles have the same channels.
template <class Epilogue>
struct SwapAbTerms {
  float scale[2], bias[2];

  __device__ __forceinline__ void Load(const Params& params, const TilePlace& place) {
    const FusedEpilogue epilogue(params.epilogue);
    const int channel = place.n_tile * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = channel + half * 8 < params.gemm_n;
      const ChannelTerms<1> terms =
          epilogue.Terms<1>(inside ? place.group * params.gemm_n + channel + half * 8 : 0);
      scale[half] = terms.scale[0];
      bias[half] = terms.bias[0];
    }
  }
};
template <>
struct SwapAbTerms<PlainEpilogue> {
  __device__ __forceinline__ void Load(const Params&, const TilePlace&) {}
};

// Computes t for the fragments of 16 pixels, rounds and clamps it, and packs words of two elements.
template <typename T>
struct ClampSums {
  const float (&scale)[2], (&bias)[2];
  const PairBounds<T> bounds;

  template <class Terms>
  __device__ __forceinline__ ClampSums(const EpilogueParams& params, const Terms& terms)
      : scale(terms.scale), bias(terms.bias), bounds(params.activation) {}
  // `residual`: fragments of a residual to add, or nothing.
  template <typename... Residual>
  __device__ __forceinline__ void Round(const float* sums, uint32_t (&words)[4],
                                        const Residual&... residual) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float* pair = sums + q * 2;
      float t[2] = {fmaf(pair[0], scale[q % 2], bias[q % 2]),
                    fmaf(pair[1], scale[q % 2], bias[q % 2])};
      (Neighbours<T, 2>{residual[q]}.AddTo(t), ...);
      words[q] = bounds.Clamp(PackPair<T>(t[0], t[1]));
    }
  }
};

// Stores 32 pixels at a time. The residual is copied to shared memory in rows of 128 bytes, one
// turn ahead, and read as fragments; the result replaces it and goes to the output in rows.
// Buffers, rows and swizzle are those of StoreRoundedSwapAb. `pitch`: elements of a row.
template <int kBarrier, typename T, class Tile, typename PixelRow>
__device__ __forceinline__ void StoreWithResidualSwapAb(const ClampSums<T>& clamp,
                                                        const typename Tile::Accumulators& acc,
                                                        uint32_t staging, T* out, const T* residual,
                                                        int32_t pitch, PixelRow row, int channels) {
  constexpr int kPixels = Tile::kTileM;
  static_assert(kPixels % 32 == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t matrices =
      staging + (lane / 16 * 8 + lane % 8) * 128 + (((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16);
  const int line = warp * 4 + lane / 8;
  const uint32_t vector = staging + line * 128 + ((lane % 8) ^ (line % 8)) * 16;
  const int column = lane % 8 * 8;
  const bool inside = column < channels;
  auto copy_residual = [&](int p) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t from = row(p / 16 + h, lane / 8);
      const bool valid = inside && from >= 0;
      CopyAsync<16>(vector + p / 32 % 2 * 4096 + h * 2048,
                    residual + (valid ? int64_t{from} * pitch + column : 0), valid);
    }
    CopyAsyncCommit();
  };
  copy_residual(0);
#pragma unroll
  for (int p = 0; p < kPixels; p += 32) {
    const uint32_t buffer = p / 32 % 2 * 4096;
    CopyAsyncWait<0>();
    NamedBarrierSync(kBarrier, 128);
    // All threads that arrived at this barrier have read the other buffer's results.
    if (p + 32 < kPixels) copy_residual(p + 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t added[4], words[4];
      LoadMatricesTransposed(matrices + buffer + h * 2048, added);
      clamp.Round(acc.of + (p / 16 + h) * 8, words, added);
      StoreMatricesTransposed(matrices + buffer + h * 2048, words[0], words[1], words[2], words[3]);
    }
    NamedBarrierSync(kBarrier, 128);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t to = row(p / 16 + h, lane / 8);
      const uint4 chunk = LoadChunk(vector + buffer + h * 2048);
      if (inside && to >= 0) *reinterpret_cast<uint4*>(out + int64_t{to} * pitch + column) = chunk;
    }
  }
}

// Stores through any fused epilogue, in a loop of 32 pixels a turn that picks the sums by uniform
// branches; a second result, the pre-activation t, takes a turn of its own. Buffers, rows and
// swizzle are those of StoreRoundedSwapAb.
template <Op kOp, typename T, class Tile, int kBarrier, class Terms>
__device__ __forceinline__ void StoreActivatedSwapAb(const Params& params, const TilePlace& place,
                                                     const ResidueClass& of,
                                                     const typename Tile::Accumulators& acc,
                                                     uint32_t staging, const Terms& terms) {
  static_assert(Tile::kTileM % 32 == 0 && Tile::kStagingBytes >= 2048);
  const EpilogueParams& with = params.epilogue;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int channels = params.gemm_n - n_first;
  const uint32_t matrices =
      staging + (lane / 16 * 8 + lane % 8) * 128 + (((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16);
  const int line = warp * 4 + lane / 8;
  const uint32_t vector = staging + line * 128 + ((lane % 8) ^ (line % 8)) * 16;
  const int column = lane % 8 * 8;
  const int64_t base = place.OutputOffset(params, n_first) + column;
  uint32_t buffer = 0;
#pragma unroll 1
  for (FusedTurns turns(with, Tile::kTileM / 32); turns.More(); turns.Next()) {
    const int p = turns.Part() * 32;
    const bool activates = turns.Activates();
    // A warp stores four of every 16 pixels; each lane decodes one pixel, once.
    const int32_t decoded = OutputRow<kOp>(
        params, of, place.m_tile * Tile::kTileM + p + lane / 4 % 2 * 16 + warp * 4 + lane % 4);
    int64_t offset[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t row = __shfl_sync(0xffffffff, decoded, h * 4 + lane / 8);
      offset[h] = row < 0 || column >= channels ? -1 : int64_t{row} * params.out_channels + base;
    }
    if (with.residual != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool valid = offset[h] >= 0;
        CopyAsync<16>(vector + buffer + h * 2048,
                      static_cast<const T*>(with.residual) + (valid ? offset[h] : 0), valid);
      }
      CopyAsyncCommit();
    }
    float t[16];
    PickSums<0, Tile::kTileM / 32>(p / 32, [&](int i, int e) { return acc.of[i * 16 + e]; }, t);
#pragma unroll
    for (int e = 0; e < 16; ++e) t[e] = fmaf(t[e], terms.scale[e / 2 % 2], terms.bias[e / 2 % 2]);
    if (with.residual != nullptr) {
      CopyAsyncWait<0>();
      NamedBarrierSync(kBarrier, 128);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t added[4];
        LoadMatricesTransposed(matrices + buffer + h * 2048, added);
        AddFragments<T>(added, t + h * 8);
      }
    }
    if (activates) Activate(with.activation, with.negative_slope, t);
    // Overwrites the residual's matrices, which the warp has just read.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* v = t + h * 8;
      StoreMatricesTransposed(matrices + buffer + h * 2048, PackPair<T>(v[0], v[1]),
                              PackPair<T>(v[2], v[3]), PackPair<T>(v[4], v[5]),
                              PackPair<T>(v[6], v[7]));
    }
    NamedBarrierSync(kBarrier, 128);
    T* const out = static_cast<T*>(activates ? params.out : with.pre);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 chunk = LoadChunk(vector + buffer + h * 2048);
      if (offset[h] >= 0) *reinterpret_cast<uint4*>(out + offset[h]) = chunk;
    }
    buffer ^= 4096;
  }
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SWAP_AB_SM90_CUH_
