// A warpgroup's accumulators of a SwapAbTile -> the fused epilogue -> the output (sm_90a).
//
// As in store_fused_sm90.cuh: on the fragments where the activation is to clamp, else through shared
// memory as float32.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SWAP_AB_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SWAP_AB_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/finish_staged.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// The fragments of 16 pixels -> t, rounded and clamped, words of two elements. A thread has two
// channels, g and g + 8 of its warp's sixteen, and nothing but two factors and two summands to load.
template <typename T>
struct ClampSums {
  float scale[2], bias[2];
  PairBounds<T> bounds;

  __device__ __forceinline__ ClampSums(const FusedEpilogue& epilogue, int32_t channel0,
                                       int channels)
      : bounds(epilogue.params.activation) {
    const int channel = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = channel + half * 8 < channels;
      const ChannelTerms<1> terms = epilogue.Terms<1>(inside ? channel0 + channel + half * 8 : 0);
      scale[half] = terms.scale[0];
      bias[half] = terms.bias[0];
    }
  }
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

// 32 pixels at a time: the residual, copied a step ahead in rows of 128 bytes to shared memory and
// read as fragments; t in its place, and in rows to the output. Buffers, rows and swizzle are those
// of StoreRoundedSwapAb. `pitch`: elements of a row.
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
    // The other buffer's results have been read: by whoever arrived at this barrier.
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

// The fused epilogue in general, through one buffer of 32 pixels in float32: one copy of it for all
// pixels, a uniform branch picks the accumulators. Chunk c of pixel p as above, and c >= 8 with its
// lowest bit flipped: no bank conflicts in the loads.
template <Op kOp, typename T, class Tile, int kBarrier>
__device__ __forceinline__ void StoreStagedSwapAb(const Params& params, const TilePlace& place,
                                                  const ResidueClass& of,
                                                  const typename Tile::Accumulators& acc,
                                                  uint32_t staging, const FusedEpilogue& epilogue) {
  constexpr int kPixels = 32, kWidth = 16 / sizeof(T), kLanesOfPixel = 64 / kWidth;
  constexpr int kVectors = kPixels / 4 * kLanesOfPixel / 32;
  static_assert(Tile::kTileM % kPixels == 0 && 4 * Tile::kStagingBytes >= kPixels * 256);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int g = lane / 4, t = lane % 4;
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int64_t base = place.OutputOffset(params, n_first);
  const int column = lane % kLanesOfPixel * kWidth;
  const bool inside = n_first + column < params.gemm_n;
  auto chunk_address = [&](int pixel, int chunk) {
    return staging + pixel * 256 + (chunk ^ chunk / 8 ^ pixel / 2 % 4 * 2) * 16;
  };
  // A warp finishes eight of the pixels, decoded once, a pixel a lane.
  auto pixel_of = [&](int i) { return i * (32 / kLanesOfPixel) + lane / kLanesOfPixel; };
#pragma unroll 1
  for (int p = 0; p < Tile::kTileM; p += kPixels) {
    const int32_t decoded = OutputRow<kOp>(
        params, of, place.m_tile * Tile::kTileM + p + warp * (kPixels / 4) + lane % (kPixels / 4));
    auto offset_of = [&](int i) -> int64_t {
      const int32_t m = __shfl_sync(0xffffffff, decoded, pixel_of(i));
      return m < 0 || !inside ? -1 : base + int64_t{m} * params.out_channels + column;
    };
    const StagedVectors<T, kVectors> vectors(
        epilogue, place.group * params.gemm_n + n_first + column, inside, offset_of);
    if (p > 0) NamedBarrierSync(kBarrier, 128);  // the buffer has been read
#pragma unroll
    for (int k = 0; k < Tile::kTileM; k += kPixels) {
      if (k != p) continue;
#pragma unroll
      for (int e = 0; e < kPixels / 2; ++e) {
        const int channel = warp * 16 + e / 2 % 2 * 8 + g, pixel = e / 4 * 8 + t * 2 + e % 2;
        const float value[1] = {acc.of[k / 2 + e]};
        StoreShared(chunk_address(pixel, channel / 4) + channel % 4 * 4, value);
      }
    }
    NamedBarrierSync(kBarrier, 128);
    vectors.Finish(epilogue, static_cast<T*>(params.out), offset_of, [&](int i, int q) {
      return chunk_address(warp * (kPixels / 4) + pixel_of(i), column / 4 + q);
    });
  }
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_STORE_FUSED_SWAP_AB_SM90_CUH_
