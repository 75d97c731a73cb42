// The parts of pkf_shmem.cuh, which keeps V in shared memory and M in registers: tile positions,
// the input transform, the products of a point, and the output transform.
#ifndef JAXCONV_CUDA_WINOGRAD_FUSED_TILE_CUH_
#define JAXCONV_CUDA_WINOGRAD_FUSED_TILE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/winograd_transform.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/winograd/amax.cuh"
#include "cuda/winograd/direct_fragments.cuh"
#include "cuda/winograd/element_pair.cuh"
#include "cuda/winograd/pkf_params.h"

namespace jaxconv::winograd {

// A CTA's TB_M tiles and TB_N = kParts * kWarpN output channels. kSetBlocks: n-blocks of U in one
// set of loads.
template <int m_, int kTbM_, int kWarpN_, int kParts_, int kSetBlocks_, int kCtasPerSm_>
struct FusedTile {
  static constexpr int m = m_, kAlpha = m + 2, kPoints = kAlpha * kAlpha;
  static constexpr int kTbM = kTbM_, kWarpN = kWarpN_, kTbN = kWarpN * kParts_;
  static constexpr int kRows = kExchangeRows;
  static constexpr int kThreads = 32 * kAlpha * kParts_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kBlocksM = kTbM / 16, kBlocksN = kWarpN / 8;
  static constexpr int kSetBlocks = kSetBlocks_;
  static constexpr int kBlockBytes = FusedInputBytes(kAlpha, kTbM, 1);  // V of 32 channels
  static constexpr int kExchangeBytes = ExchangeBytes(kAlpha, kTbM, kTbN);
  static_assert(kTbM % 16 == 0 && kWarpN % 16 == 0 && kTbN % 16 == 0 && m % kRows == 0);
};

// The origin of a tile's inputs and outputs; for a tile past the last, outside the tensors.
struct TileOrigin {
  int64_t x;  // elements to the image's first
  int64_t y;  // to the tile's first
  int32_t in_h, in_w, out_h, out_w;
};
static_assert(sizeof(TileOrigin) == 32);

template <class Tile>
__device__ __forceinline__ void LocateTiles(const Geometry& geometry, int first,
                                            TileOrigin (&origins)[Tile::kTbM]) {
  for (int i = threadIdx.x; i < Tile::kTbM; i += Tile::kThreads) {
    TileOrigin origin = {0, 0, geometry.in_h, geometry.in_w, geometry.out_h, geometry.out_w};
    if (first + i < geometry.tiles) {
      const TilePlace place = geometry.Place(first + i);
      origin.out_h = place.row * Tile::m;
      origin.out_w = place.column * Tile::m;
      origin.in_h = origin.out_h - geometry.pad_h;
      origin.in_w = origin.out_w - geometry.pad_w;
      origin.x = int64_t{place.image} * geometry.in_h * geometry.in_w * geometry.in_channels();
      origin.y =
          ((int64_t{place.image} * geometry.out_h + origin.out_h) * geometry.out_w + origin.out_w) *
          geometry.out_channels();
    }
    origins[i] = origin;
  }
}

// The powers of two that scale bfloat16 operands (amax.cuh), in shared memory.
struct Scales {
  float input, undo_first, undo_second;  // undo_*: applied to the result, in this order (Unscale)
};

// Called by one warp.
__device__ __forceinline__ void FindScales(const PkfParams& params, Scales* scales) {
  const float input = WarpScale(params.input_scale), filter = WarpScale(params.filter_scale);
  const Unscale unscale(input, filter);
  if (threadIdx.x % 32 == 0) *scales = {input, unscale.first, unscale.second};
}

// V in shared memory. A k-block of a point has one row of 64 bytes for each tile, read by ldmatrix.
// The channels of a row have the order of direct_fragments.cuh: channels 8 t + 2 h and 8 t + 2 h +
// 1 are word t of chunk h.
template <class Tile>
using InputOperand = OperandTile<__half, Tile::kTbM, kBlockChannels * 2, false>;

// Two elements in a word, rounded.
template <typename T>
__device__ __forceinline__ uint32_t PackPair(float low, float high) {
  uint32_t word;
  StorePairTo(reinterpret_cast<T*>(&word), low, high);
  return word;
}

// The inputs of a tile in registers: a thread transforms kWords words (pairs of channels) at a
// time.
template <class Tile>
struct InputTask {
  static constexpr int kAlpha = Tile::kAlpha;
  static constexpr int kWords = Tile::m == 2 ? 2 : 1;
  static constexpr int kOfBlock = kBlockChannels / 2 / kWords;  // tasks of a k-block and a tile
  static constexpr int kOfTiles = kOfBlock * Tile::kTbM;        // of a k-block
  uint32_t word[kAlpha][kAlpha][kWords];

  // Outside the image and past the last channel it loads the nearest element and replaces it by
  // zero: a branch for every pixel would cost more than the loads.
  template <typename T>
  __device__ __forceinline__ void Load(const Geometry& geometry, const void* x, int group,
                                       const TileOrigin& origin, int channel) {
    const uint32_t inside = channel < geometry.red ? ~uint32_t{0} : 0;
    const T* image = static_cast<const T*>(x) + origin.x + group * geometry.red +
                     min(channel, geometry.red - 2 * kWords);
    uint32_t columns[kAlpha];
    int32_t offsets[kAlpha];
#pragma unroll
    for (int j = 0; j < kAlpha; ++j) {
      const int column = origin.in_w + j, nearest = min(max(column, 0), geometry.in_w - 1);
      columns[j] = column == nearest ? inside : 0;
      offsets[j] = nearest * geometry.in_channels();
    }
#pragma unroll
    for (int i = 0; i < kAlpha; ++i) {
      const int row = origin.in_h + i, nearest = min(max(row, 0), geometry.in_h - 1);
      const uint32_t mask = row == nearest ? ~uint32_t{0} : 0;
      const T* from = image + int64_t{nearest} * (geometry.in_w * geometry.in_channels());
#pragma unroll
      for (int j = 0; j < kAlpha; ++j) {
        if constexpr (kWords == 2) {
          const uint2 pair = __ldg(reinterpret_cast<const uint2*>(from + offsets[j]));
          word[i][j][0] = pair.x & mask & columns[j];
          word[i][j][1] = pair.y & mask & columns[j];
        } else {
          word[i][j][0] =
              __ldg(reinterpret_cast<const uint32_t*>(from + offsets[j])) & mask & columns[j];
        }
      }
    }
  }

  // Stores V of the tile. `shared`: the address of the first word at point 0.
  template <typename T>
  __device__ __forceinline__ void Store(float scale, uint32_t shared) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float low[kAlpha][kAlpha], high[kAlpha][kAlpha];
#pragma unroll
      for (int i = 0; i < kAlpha; ++i) {
#pragma unroll
        for (int j = 0; j < kAlpha; ++j) {
          low[i][j] = ElementOfPair<T, 0>(word[i][j][w]);
          high[i][j] = ElementOfPair<T, 1>(word[i][j][w]);
          if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            low[i][j] *= scale;
            high[i][j] *= scale;
          }
        }
      }
      TransformInputTile<Tile::m>(low);
      TransformInputTile<Tile::m>(high);
#pragma unroll
      for (int i = 0; i < kAlpha; ++i) {
#pragma unroll
        for (int j = 0; j < kAlpha; ++j) {
          // The second word is in the neighbouring chunk.
          StoreWord((shared ^ w * 16) + (i * kAlpha + j) * Tile::kTbM * 64,
                    PackPair<__half>(low[i][j], high[i][j]));
        }
      }
    }
  }
};

// Computes V for all the CTA's tiles and `blocks` k-blocks of channels. Consecutive threads have
// consecutive channels of a tile.
template <class Tile, typename T>
__device__ __forceinline__ void StoreTransformed(const Geometry& geometry, const void* x, int group,
                                                 float scale,
                                                 const TileOrigin (&origins)[Tile::kTbM],
                                                 uint32_t v, int blocks) {
  using Task = InputTask<Tile>;
#pragma unroll 1
  for (int i = threadIdx.x; i < blocks * Task::kOfTiles; i += Tile::kThreads) {
    const int block = i / Task::kOfTiles, tile = i % Task::kOfTiles / Task::kOfBlock;
    const int pair = i % Task::kOfBlock * Task::kWords;
    Task task;
    task.template Load<T>(geometry, x, group, origins[tile], block * kBlockChannels + pair * 2);
    task.template Store<T>(scale, v + block * Tile::kBlockBytes +
                                      InputOperand<Tile>::Offset(tile, pair % 4) + pair / 4 * 4);
  }
}

// The address from which a lane's ldmatrix reads V of a point's first 16 tiles.
template <class Tile>
__device__ __forceinline__ uint32_t FragmentOffset() {
  const int lane = Lane();
  return InputOperand<Tile>::Offset(lane % 16, lane / 16);
}

// Reads V of a point and a k-block.
template <class Tile>
__device__ __forceinline__ void LoadPoint(uint32_t v, uint32_t (&fragments)[Tile::kBlocksM][2][4]) {
#pragma unroll
  for (int i = 0; i < Tile::kBlocksM; ++i) {
    LoadMatrices(v + i * 16 * 64, fragments[i][0]);
    LoadMatrices((v ^ 32) + i * 16 * 64, fragments[i][1]);
  }
}

// acc += V U^T over a k-block of a point, for n-blocks kFirst and following.
template <class Tile, int kFirst, int kCount>
__device__ __forceinline__ void MultiplyPoint(const uint32_t (&v)[Tile::kBlocksM][2][4],
                                              const uint4 (&u)[kCount],
                                              float (&acc)[Tile::kBlocksM][Tile::kBlocksN][4]) {
#pragma unroll
  for (int i = 0; i < Tile::kBlocksM; ++i) {
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      MultiplyAdd<__half>(acc[i][kFirst + b], v[i][0], u[b].x, u[b].y);
    }
  }
#pragma unroll
  for (int i = 0; i < Tile::kBlocksM; ++i) {
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      MultiplyAdd<__half>(acc[i][kFirst + b], v[i][1], u[b].z, u[b].w);
    }
  }
}

// A chunk of four channels of a tile in the exchange.
template <class Tile>
__device__ __forceinline__ uint32_t ExchangeOffset(int j, int row, int tile, int chunk) {
  const int swap = Tile::kTbN >= 32 ? tile % 2 * 4 : 0;
  return ((j * Tile::kRows + row) * Tile::kTbM + tile) * Tile::kTbN * 4 + (chunk ^ swap) * 16;
}

// A^T M of a point column, in place: m of its alpha rows remain.
template <class Tile>
__device__ __forceinline__ void TransformRows(
    float (&acc)[Tile::kAlpha][Tile::kBlocksM][Tile::kBlocksN][4]) {
#pragma unroll
  for (int i = 0; i < Tile::kBlocksM; ++i) {
#pragma unroll
    for (int b = 0; b < Tile::kBlocksN; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float column[Tile::kAlpha], rows[Tile::m];
#pragma unroll
        for (int a = 0; a < Tile::kAlpha; ++a) column[a] = acc[a][i][b][e];
        TransformOutput<Tile::m>(column, rows);
#pragma unroll
        for (int p = 0; p < Tile::m; ++p) acc[p][i][b][e] = rows[p];
      }
    }
  }
}

// Stores rows kFirstRow and following of a transformed column j to the exchange.
template <class Tile, int kFirstRow>
__device__ __forceinline__ void StoreRows(
    const float (&acc)[Tile::kAlpha][Tile::kBlocksM][Tile::kBlocksN][4], uint32_t exchange) {
  const int g = Lane() / 4, t = Lane() % 4, warp = threadIdx.x / 32;
  const int j = warp % Tile::kAlpha, warp_column = warp / Tile::kAlpha * Tile::kWarpN;
  // An offset of 16 channels uses separate address bits; the swap may set one of them.
  const uint32_t to = exchange + ExchangeOffset<Tile>(j, 0, g, warp_column / 4 + t);
#pragma unroll
  for (int p = 0; p < Tile::kRows; ++p) {
#pragma unroll
    for (int i = 0; i < Tile::kBlocksM; ++i) {
#pragma unroll
      for (int b = 0; b < Tile::kBlocksN; b += 2) {
        const float (&low)[4] = acc[kFirstRow + p][i][b], (&high)[4] = acc[kFirstRow + p][i][b + 1];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float four[4] = {low[half * 2], low[half * 2 + 1], high[half * 2],
                                 high[half * 2 + 1]};
          StoreShared((to ^ b / 2 * 64) + (p * Tile::kTbM + i * 16 + half * 8) * Tile::kTbN * 4,
                      four);
        }
      }
    }
  }
}

// Computes (A^T M) A from the exchange and stores it to y: a task is 8 channels of m outputs.
template <class Tile, typename T>
__device__ __forceinline__ void StoreOutputs(const PkfParams& params, uint32_t exchange,
                                             const TileOrigin (&origins)[Tile::kTbM], int first_row,
                                             int group, int first_column, const Scales& scales) {
  constexpr int kEights = Tile::kTbN / 8, kTasks = kEights * Tile::kTbM * Tile::kRows;
  const Geometry& geometry = params.geometry;
#pragma unroll 1
  for (int task = threadIdx.x; task < kTasks; task += Tile::kThreads) {
    const int eight = task % kEights, tile = task / kEights % Tile::kTbM;
    const int row = task / kEights / Tile::kTbM;
    const TileOrigin& origin = origins[tile];
    const int p = first_row + row, column = first_column + eight * 8;
    if (origin.out_h + p >= geometry.out_h || column >= geometry.cols) continue;
    // Selects the four channels that this lane reads first.
    const int upper = task / 4 % 2;
    float y[2][4][Tile::m];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t from =
          exchange + ExchangeOffset<Tile>(0, row, tile, eight * 2 + (half ^ upper));
      float columns[4][Tile::kAlpha];
#pragma unroll
      for (int j = 0; j < Tile::kAlpha; ++j) {
        const uint4 four = LoadChunk(from + j * Tile::kRows * Tile::kTbM * Tile::kTbN * 4);
        columns[0][j] = __uint_as_float(four.x);
        columns[1][j] = __uint_as_float(four.y);
        columns[2][j] = __uint_as_float(four.z);
        columns[3][j] = __uint_as_float(four.w);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        TransformOutput<Tile::m>(columns[e], y[half][e]);
#pragma unroll
        for (int q = 0; q < Tile::m; ++q) {
          y[half][e][q] = y[half][e][q] * scales.undo_first * scales.undo_second;
        }
      }
    }
    const int64_t first = origin.y + int64_t{p} * geometry.out_w * geometry.out_channels() +
                          group * geometry.cols + column;
#pragma unroll
    for (int q = 0; q < Tile::m; ++q) {
      if (origin.out_w + q >= geometry.out_w) break;
      const int64_t at = first + q * geometry.out_channels();
      if (params.out_is_f32) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          *reinterpret_cast<float4*>(static_cast<float*>(params.y) + at + (half ^ upper) * 4) =
              make_float4(y[half][0][q], y[half][1][q], y[half][2][q], y[half][3][q]);
        }
      } else {
        uint2 four[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          four[half] = make_uint2(PackPair<T>(y[half][0][q], y[half][1][q]),
                                  PackPair<T>(y[half][2][q], y[half][3][q]));
        }
        const uint2 low = upper != 0 ? four[1] : four[0], high = upper != 0 ? four[0] : four[1];
        *reinterpret_cast<uint4*>(static_cast<T*>(params.y) + at) =
            make_uint4(low.x, low.y, high.x, high.y);
      }
    }
  }
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FUSED_TILE_CUH_
