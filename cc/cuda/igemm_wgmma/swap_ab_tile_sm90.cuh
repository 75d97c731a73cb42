// A tile with the operands swapped: the filter is A, the pixels are B (sm_90a). For few output
// channels.
//
// With 64 channels as columns, m64n64k16 reads 2 KB of pixels and 2 KB of the filter in 32 cycles,
// and needs a descriptor every 32 cycles. With the filter's 64 channels as rows and up to 256
// pixels as columns, an instruction lasts 128 cycles and reads 2 + 8 KB. The result is transposed:
// rows are channels, and stmatrix transposes it back on its way to rows of channels.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_SWAP_AB_TILE_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_SWAP_AB_TILE_SM90_CUH_

#include <cstdint>
#include <cstring>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_wgmma/store_fused_swap_ab_sm90.cuh"
#include "cuda/igemm_wgmma/store_tile_sm90.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/igemm_wgmma/wgmma_tile_sm90.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// Two consumer warpgroups in pingpong, each with a tile of 64 channels by kTileM pixels. TileLayout
// explains the other parameters.
template <int kTileM_, int kStages_, bool kFilterRow_ = false, int kFilterSlots_ = 0,
          int kStationary_ = 0, int kStagingBytes_ = 2048>
struct SwapAbTile : TileLayout<2, true, kTileM_, 64, kStages_, kFilterRow_, kFilterSlots_,
                               kStationary_, kStagingBytes_> {
  static constexpr bool kSwapAb = true;

  struct Accumulators {
    float of[kTileM_ / 2];
  };

  // One k-block. `a`: the pixels; `b`: the filter.
  template <typename T, bool kMnMajorA, bool kMnMajorB>
  static __device__ __forceinline__ void Multiply(Accumulators& acc, uint32_t a, uint32_t b,
                                                  bool accumulate) {
    static_assert(!kMnMajorA, "a row of pixels runs along the reduction");
    const uint64_t pixels = KMajorDescriptor(a);
    const uint64_t filter = kMnMajorB ? MnMajorDescriptor<8192>(b) : KMajorDescriptor(b);
    constexpr int kStepFilter = (kMnMajorB ? 2048 : 32) >> 4;
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Wgmma<kTileM_, T, kMnMajorB, false>(acc.of, filter + k * kStepFilter, pixels + k * (32 >> 4),
                                          accumulate || k > 0);
    }
    WgmmaCommit();
  }
};

// Rounds the accumulators of pixels 16 i to 16 i + 15 to words of two elements.
template <typename T, int kCount>
struct RoundSums {
  const float (&acc)[kCount];
  __device__ __forceinline__ void operator()(int i, uint32_t (&words)[4]) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      words[q] = PackPair<T>(acc[i * 8 + q * 2], acc[i * 8 + q * 2 + 1]);
    }
  }
};

// Stores a warpgroup's accumulators as 16-bit output: rounds them, stages 32 pixels of 128 bytes by
// stmatrix (chunk c of pixel p at c ^ p % 8, against bank conflicts), and stores 16 bytes a lane,
// eight lanes a pixel. Two buffers of 4 KB alternate, so that one barrier a buffer is enough.
// `round(i, words)`: the fragments of pixels 16 i to 16 i + 15, two elements a word; `row(i, p)`:
// the output row of pixel p among this warp's four of these, or negative; `out`: the address of row
// 0, this tile's first channel; `pitch`: bytes of a row; `count(first, vector, stored)`: gets every
// vector.
template <int kBarrier, int kPixels, typename T, typename Round, typename PixelRow, typename Count>
__device__ __forceinline__ void StoreRoundedSwapAb(const Round& round, uint32_t staging, T* out,
                                                   uint32_t pitch, PixelRow row, int channels,
                                                   Count&& count) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t store =
      staging + (lane / 16 * 8 + lane % 8) * 128 + (((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16);
  const int line = warp * 4 + lane / 8;
  const uint32_t load = staging + line * 128 + ((lane % 8) ^ (line % 8)) * 16;
  const bool inside = lane % 8 * 8 < channels;
  char* const first = reinterpret_cast<char*>(out + lane % 8 * 8);
#pragma unroll
  for (int p = 0; p < kPixels; p += 32) {
    const uint32_t buffer = p / 32 % 2 * 4096;
    constexpr int kHalves = 2;
    int32_t to[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves && p + h * 16 < kPixels; ++h) {
      uint32_t words[4];
      round(p / 16 + h, words);
      StoreMatricesTransposed(store + buffer + h * 2048, words[0], words[1], words[2], words[3]);
      to[h] = row(p / 16 + h, lane / 8);
    }
    NamedBarrierSync(kBarrier, 128);
    uint4 chunk[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves && p + h * 16 < kPixels; ++h) {
      LoadShared<0>(load + buffer + h * 2048, reinterpret_cast<float*>(&chunk[h]));
    }
#pragma unroll
    for (int h = 0; h < kHalves && p + h * 16 < kPixels; ++h) {
      if (inside && to[h] >= 0) {
        *reinterpret_cast<uint4*>(first + uint64_t{static_cast<uint32_t>(to[h])} * pitch) =
            chunk[h];
      }
    }
#pragma unroll
    for (int h = 0; h < kHalves && p + h * 16 < kPixels; ++h) {
      count(p == 0 && h == 0, chunk[h], to[h] >= 0);
    }
  }
}

// The same by TMA, which is faster and leaves the warps free: the whole tile is staged with the
// tensor map's swizzle and stored as boxes of kStoredPixels. `map`: (channels, rows).
inline constexpr int kStoredPixels = 64;

template <int kBarrier, int kPixels, typename Round>
__device__ __forceinline__ void StoreSwapAbBoxes(const Round& round, uint32_t staging,
                                                 const CUtensorMap* map, int32_t channel,
                                                 int32_t row) {
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);
  if (warp == 0 && ElectOne()) WaitForStoresToRead();
  NamedBarrierSync(kBarrier, 128);
  const uint32_t store =
      staging + (lane / 16 * 8 + lane % 8) * 128 + (((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16);
#pragma unroll
  for (int p = 0; p < kPixels; p += 16) {
    uint32_t words[4];
    round(p / 16, words);
    StoreMatricesTransposed(store + p * 128, words[0], words[1], words[2], words[3]);
  }
  FenceForCopies();
  NamedBarrierSync(kBarrier, 128);
  if (warp == 0 && ElectOne()) {
#pragma unroll
    for (int p = 0; p < kPixels; p += kStoredPixels) {
      StoreTile2d(map, staging + p * 128, channel, row + p);
    }
    CommitStores();
  }
}

// The same in float32 through two buffers of 16 pixels, with an epilogue, for 16-bit and 32-bit
// outputs. Chunk c of pixel p lies at c ^ 2 (p / 2 % 4): no bank conflicts in the stores. `row(i,
// p)` as above; `out`: the address of row 0 and this tile's first channel, `channel0` of the
// output; `offset`: the output offset of that element; `pitch`: elements of a row.
template <int kBarrier, typename Out, int kCount, class Epilogue, typename PixelPlaceOf>
__device__ __forceinline__ void StoreFinishedSwapAb(const float (&acc)[kCount], uint32_t staging,
                                                    Out* out, const Epilogue& epilogue,
                                                    PixelPlaceOf pixel_place, int channels,
                                                    int channel0) {
  constexpr int kWidth = 16 / sizeof(Out);
  constexpr int kLanesOfPixel = 64 / kWidth, kPixelsOfPass = 32 / kLanesOfPixel;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int g = lane / 4, t = lane % 4;
  auto chunk_address = [&](int pixel, int chunk) {
    return staging + pixel * 256 + (chunk ^ (pixel / 2 % 4 * 2)) * 16;
  };
  const int column = lane % kLanesOfPixel * kWidth;
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    const uint32_t buffer = i % 2 * 4096;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int channel = warp * 16 + e / 2 % 2 * 8 + g, pixel = e / 4 * 8 + t * 2 + e % 2;
      const float value[1] = {acc[i * 8 + e]};
      StoreShared(chunk_address(pixel, channel / 4) + channel % 4 * 4 + buffer, value);
    }
    NamedBarrierSync(kBarrier, 128);
#pragma unroll
    for (int p = 0; p < 4; p += kPixelsOfPass) {
      const int pixel = p + lane / kLanesOfPixel;
      const RowPlace at = pixel_place(i, pixel);
      float values[kWidth];
#pragma unroll
      for (int q = 0; q < kWidth / 4; ++q) {
        LoadShared<0>(chunk_address(warp * 4 + pixel, column / 4 + q) + buffer, &values[q * 4]);
      }
      if (at.offset < 0 || column >= channels) continue;
      Out elements[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        elements[e] = FromFloat<Out>(epilogue.template operator()<Out>(
            values[e],
            OutputPlace{at.offset + column + e, at.row, channel0 + column + e, /*inside=*/true}));
      }
      uint4 packed;
      memcpy(&packed, elements, sizeof(packed));
      *reinterpret_cast<uint4*>(out + at.offset + column) = packed;
    }
  }
}

struct NothingCounted {
  __device__ __forceinline__ void operator()(bool, const uint4&, bool) const {}
};

// The output rows of a tile's pixels. A warp stores four of every 16 pixels. Each lane decodes one
// pixel, once, and shuffles distribute the rows.
template <Op kOp, class Tile>
struct SwapAbRows {
  static constexpr int kDecoded = (Tile::kTileM / 16 + 7) / 8;
  int32_t decoded[kDecoded];

  __device__ __forceinline__ SwapAbRows(const Params& params, const ResidueClass& of,
                                        const TilePlace& place) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int i = 0; i < kDecoded; ++i) {
      decoded[i] = OutputRow<kOp>(
          params, of, place.m_tile * Tile::kTileM + (i * 8 + lane / 4) * 16 + warp * 4 + lane % 4);
    }
  }
  __device__ __forceinline__ int32_t operator()(int sixteen, int pixel) const {
    return __shfl_sync(0xffffffff, decoded[sixteen / 8], sixteen % 8 * 4 + pixel);
  }
};

// Stores a warpgroup's finished tile. `staging`: the warpgroup's staging; `terms`: the tile's
// SwapAbTerms.
template <Op kOp, typename T, class Tile, int kWarpgroup, class Epilogue, class Terms>
__device__ __forceinline__ void StoreSwapAbTile(const Params& params, const TilePlace& place,
                                                const ResidueClass& of,
                                                const typename Tile::Accumulators& acc,
                                                uint32_t staging, const Epilogue& epilogue,
                                                const Terms& terms) {
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int channels = params.gemm_n - n_first;
  const int64_t base = place.OutputOffset(params, n_first);
  const SwapAbRows<kOp, Tile> row(params, of, place);
  // The previous tile's staging has been read: the warpgroup's threads have synchronised since, at
  // their turn.
  constexpr int kBarrier = 3 + kWarpgroup;
  const int channel0 = place.group * params.gemm_n + n_first;
  auto store_rounded = [&](const auto& round) {
    StoreRoundedSwapAb<kBarrier, Tile::kTileM>(round, staging, static_cast<T*>(params.out) + base,
                                               params.out_channels * sizeof(T), row, channels,
                                               NothingCounted{});
  };
  if constexpr (!Epilogue::kPlain) {
    if (!epilogue.partial) {
      const FusedEpilogue& whole = epilogue.Whole();
      if (!Clamps(whole.params)) {
        StoreActivatedSwapAb<kOp, T, Tile, kBarrier>(params, place, of, acc, staging, terms);
      } else if (whole.params.residual == nullptr) {
        const ClampSums<T> clamp(params.epilogue, terms);
        store_rounded([&](int i, uint32_t (&words)[4]) { clamp.Round(acc.of + i * 8, words); });
      } else {
        StoreWithResidualSwapAb<kBarrier, T, Tile>(
            ClampSums<T>(params.epilogue, terms), acc, staging, static_cast<T*>(params.out) + base,
            static_cast<const T*>(whole.params.residual) + base, params.out_channels, row,
            channels);
      }
      FinishTile<Tile>(params, place, of, epilogue);
      return;
    }
  } else if (!params.out_is_f32) {
    store_rounded(RoundSums<T, Tile::kTileM / 2>{acc.of});
    return;
  }
  auto pixel_offset = [&](int sixteen, int pixel) -> RowPlace {
    const int32_t m = row(sixteen, pixel);
    return {m < 0 ? -1 : base + int64_t{m} * params.out_channels, m};
  };
  if (params.out_is_f32) {
    StoreFinishedSwapAb<kBarrier>(acc.of, staging, static_cast<float*>(params.out),
                                  PlainEpilogue(params.epilogue), pixel_offset, channels, channel0);
  }
  FinishTile<Tile>(params, place, of, epilogue);
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_SWAP_AB_TILE_SM90_CUH_
