// The stores of fprop: the positions of a tile's pixels in y, and the forms of storing a warp's
// accumulators.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_STORE_PIXELS_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_STORE_PIXELS_CUH_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/finish_staged.cuh"
#include "cuda/few_channels/halo_loader.cuh"
#include "cuda/few_channels/params.h"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::few_channels {

// Row of y of a tile's block of 16 pixels; column, in the tile, of the pixel that row `row` of the
// block's fragments has.
__device__ __forceinline__ int32_t RowOfBlock(const Params& params, const PixelTile& tile,
                                              int32_t block) {
  return tile.row + (block >> params.log2_across);
}
template <typename T>
__device__ __forceinline__ int32_t ColumnInTile(const Params& params, int32_t block, int32_t row) {
  const int32_t across = block & ((1 << params.log2_across) - 1);
  if constexpr (sizeof(T) == 2) return across * 16 + row;
  return SpreadPixel<3>(across * 2 + row / 8, row % 8, params.log2_spread);
}

// Stores the accumulators of a warp to y: two blocks of 16 neighbouring pixels, 64 channels. They
// are rounded and then pass through shared memory, so that each store has 16 bytes.
template <typename T>
__device__ __forceinline__ void StorePixels(const Params& params, const PixelTile& tile,
                                            const float (&acc)[2][8][4], uint32_t staging, T* y,
                                            int n_first) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // Chunk c of row r is stored at c ^ r % 8.
  const uint32_t store = staging + g * 128 + (g * 16 + t * 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        T pair[2] = {FromFloat<T>(acc[i][j][upper * 2]), FromFloat<T>(acc[i][j][upper * 2 + 1])};
        uint32_t word;
        memcpy(&word, pair, sizeof(word));
        StoreWord((store ^ (j * 16)) + upper * 1024, word);
      }
    }
    __syncwarp();
    const int32_t block = threadIdx.x / 32 * 2 + i, down = block >> params.log2_across;
    const int32_t p = tile.row + down;
    const int32_t q_first = tile.column + (block - (down << params.log2_across)) * 16;
    if (p >= params.rows.out) continue;
    T* row = y + (int64_t{tile.image} * params.rows.out + p) * params.columns.out * params.k;
    if (params.k_vector) {
#pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        const int pixel = pass * 4 + lane / 8, chunk = lane % 8;
        const int32_t q = q_first + pixel, n = n_first + chunk * 8;
        const uint4 value = LoadChunk(staging + pixel * 128 + (chunk ^ pixel % 8) * 16);
        if (q < params.columns.out && n < params.k) {
          *reinterpret_cast<uint4*>(row + int64_t{q} * params.k + n) = value;
        }
      }
    } else {
      const int columns = min(64, params.k - n_first);
#pragma unroll 1
      for (int pixel = 0; pixel < 16 && q_first + pixel < params.columns.out; ++pixel) {
        for (int n = lane; n < columns; n += 32) {
          const uint32_t word =
              LoadWord(staging + pixel * 128 + (n / 8 ^ pixel % 8) * 16 + n % 8 / 2 * 4);
          const auto half = static_cast<unsigned short>(n % 2 == 0 ? word : word >> 16);
          reinterpret_cast<unsigned short*>(
              row)[int64_t{q_first + pixel} * params.k + n_first + n] = half;
        }
      }
    }
  }
}

// The channel of the first of a lane's two sums in block j, relative to the warp's first channel.
// In float32 blocks j and j + 1 have four neighbouring channels (FilterTile).
template <typename T>
__device__ __forceinline__ int32_t ChannelOfSums(int j, int lane) {
  return sizeof(T) == 2 ? j * 8 + lane % 4 * 2 : j / 2 * 16 + lane % 4 * 4 + j % 2 * 2;
}

// The same for float32, directly from registers: four lanes store 64 bytes of a pixel.
template <int kBlocksM, int kBlocksN>
__device__ __forceinline__ void StorePixels(const Params& params, const PixelTile& tile,
                                            const float (&acc)[kBlocksM][kBlocksN][4],
                                            int first_block, float* y, int n_first) {
  const int lane = Lane();
  const int32_t n = n_first + lane % 4 * 4;
  const bool whole = params.k_vector && n_first + kBlocksN * 8 <= params.k;
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) {
    const int32_t p = RowOfBlock(params, tile, first_block + i);
    if (p >= params.rows.out) continue;
    const int64_t row = (int64_t{tile.image} * params.rows.out + p) * params.columns.out;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int32_t q =
          tile.column + ColumnInTile<float>(params, first_block + i, upper * 8 + lane / 4);
      if (q >= params.columns.out) continue;
      float* const to = y + (row + q) * params.k + n;
#pragma unroll
      for (int j = 0; j < kBlocksN; j += 2) {
        if (!whole && n + j * 8 >= params.k) break;
        const float (&first)[4] = acc[i][j], (&second)[4] = acc[i][j + 1];
        const float quad[4] = {first[upper * 2], first[upper * 2 + 1], second[upper * 2],
                               second[upper * 2 + 1]};
        if (params.k_vector) {
          StoreQuad(to + j * 8, quad);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (n + j * 8 + e < params.k) to[j * 8 + e] = quad[e];
          }
        }
      }
    }
  }
}

// Stores 32 channels of 16 pixels of a warp to shared memory.
template <typename T, class Rows>
__device__ __forceinline__ void StageSums(const Rows& rows, int lane, const float (*sums)[4]) {
  if constexpr (sizeof(T) == 2) {
    rows.Store(lane, sums[0]);
  } else {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const float quad[4] = {sums[j][upper * 2], sums[j][upper * 2 + 1], sums[j + 1][upper * 2],
                               sums[j + 1][upper * 2 + 1]};
        StoreShared(rows.Quad(upper * 8 + lane / 4, j * 2 + lane % 4), quad);
      }
    }
  }
}

// The same with the fused epilogue: the sums pass through shared memory in float32, 16 pixels by 32
// channels at a time.
template <typename T, int kBlocksM, int kBlocksN>
__device__ __forceinline__ void StoreFusedPixels(const Params& params, const PixelTile& tile,
                                                 const float (&acc)[kBlocksM][kBlocksN][4],
                                                 int first_block, uint32_t staging, T* y,
                                                 const FusedEpilogue& epilogue, int64_t base,
                                                 int n_first) {
  constexpr int kColumns = 32;
  static_assert(kStagingBytes >= 16 * kColumns * 4);
  using Rows = StagedRows<T, kColumns>;
  const Rows rows{staging};
  const int lane = Lane();
#pragma unroll 1
  for (int i = 0; i < kBlocksM; ++i) {
    const int32_t block = first_block + i;
    const int32_t p = RowOfBlock(params, tile, block);
    // For 16-bit elements the first column of the block, for float32 that of the tile.
    const int32_t q_first = tile.column + (sizeof(T) == 2 ? ColumnInTile<T>(params, block, 0) : 0);
    const int32_t first = (tile.image * params.rows.out + p) * params.columns.out + q_first;
    // The number of pixels from there on; 0 below the image.
    const int32_t pixels = p < params.rows.out ? params.columns.out - q_first : 0;
    // The pixel in the batch's images of a row of the block, or -1.
    auto pixel_of = [&](int row) -> int32_t {
      const int32_t pixel = sizeof(T) == 2 ? row : ColumnInTile<T>(params, block, row);
      return pixel < pixels ? first + pixel : -1;
    };
#pragma unroll 1
    for (int c = 0; c < kBlocksN * 8; c += kColumns) {
      auto stage = [&] {
        __syncwarp();
#pragma unroll
        for (int b = 0; b < kBlocksM; ++b) {
#pragma unroll
          for (int k = 0; k < kBlocksN * 8; k += kColumns) {
            if (b == i && k == c) StageSums<T>(rows, lane, &acc[b][k / 8]);
          }
        }
        __syncwarp();
      };
      if (params.k_vector) {
        const int32_t n = n_first + c + Rows::Column(lane);
        const bool inside = n < params.k;
        auto offset_of = [&](int v) -> int64_t {
          const int32_t pixel = pixel_of(Rows::Row(lane, v));
          if (!inside || pixel < 0) return -1;
          return base + int64_t{pixel} * params.k + n;
        };
        const StagedVectors<T, Rows::kVectors, false, 1> vectors(epilogue, n, inside, offset_of);
        stage();
        vectors.Finish(epilogue, y, offset_of, [&](int v, int q) {
          return rows.Quad(Rows::Row(lane, v), Rows::Column(lane) / 4 + q);
        });
      } else {
        stage();
        const int32_t n = n_first + c + lane;
#pragma unroll 1
        for (int row = 0; row < 16 && n < params.k; ++row) {
          const int32_t pixel = pixel_of(row);
          if (pixel < 0) continue;
          const int64_t at = base + int64_t{pixel} * params.k + n;
          const float sum = __uint_as_float(LoadWord(rows.Quad(row, lane / 4) + lane % 4 * 4));
          y[at] = FromFloat<T>(
              epilogue.template operator()<T>(sum, OutputPlace{at, pixel, n, /*inside=*/true}));
        }
      }
    }
  }
}

// Applies an epilogue of scale, bias and a clamp (Clamps) to the accumulators, which are then
// stored like a plain tile, with half the bytes through shared memory. For even K.
template <typename T, int kBlocksM, int kBlocksN>
__device__ __forceinline__ void ClampPixels(const Params& params, const FusedEpilogue& epilogue,
                                            int n_first, float (&acc)[kBlocksM][kBlocksN][4]) {
  const float lower = epilogue.params.activation == Activation::kNone ? -INFINITY : 0.0f;
  const float upper = epilogue.params.activation == Activation::kRelu6 ? 6.0f : INFINITY;
#pragma unroll
  for (int j = 0; j < kBlocksN; ++j) {
    const int32_t n = n_first + ChannelOfSums<T>(j, threadIdx.x);
    const ChannelTerms<2> terms = epilogue.Terms<2>(n < params.k ? n : 0);
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = fmaf(acc[i][j][e], terms.scale[e % 2], terms.bias[e % 2]);
        acc[i][j][e] = MinNan(MaxNan(sum, lower), upper);
      }
    }
  }
}

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_STORE_PIXELS_CUH_
