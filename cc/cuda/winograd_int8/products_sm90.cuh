// The products of the Winograd domain on wgmma, persistent (sm_90a):
//
//     M[point][tile, k] = float16( u_scale[point][k] * sum over c of V[point][tile, c] U[point][k, c] )
//
// A CTA computes 128 x 128 of M at a time, with C in blocks of 128, in pingpong
// (common/turns_gemm_sm90.cuh): one consumer scales, rounds and stores while the other multiplies.
// A tile needs 64 bytes for every cycle of the tensor cores; L2 delivers to an SM about 45. The two
// CTAs of a cluster have neighbouring rows, so each multicasts half of U: 48 bytes a cycle. Columns
// are the fastest digit of a tile's index, then rows, then points. The tiles in flight therefore
// belong to few points, whose V and U are read from DRAM once.
//
// A stage is 128 rows of V and of U by 128 channels, 16 KB each, with the swizzle of 128 bytes. TMA
// fills in zeros past the last tile and channel. Past a point's last output channel it reads the
// next point's rows of U; those columns are not stored. Shared memory: 6 stages, 192 KB. Registers
// of a consumer: 128 accumulators.
//
// The box of U brings 32 rows in the order 0 1 8 9 16 17 24 25 2 3 ..., so that a thread, which
// holds columns 8 j + 2 t and the next, has the eight neighbouring channels 8 t .. 8 t + 7 and
// stores 16 bytes.
#ifndef JAXCONV_CUDA_WINOGRAD_INT8_PRODUCTS_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_INT8_PRODUCTS_SM90_CUH_

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "core/status.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/requantize_words.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/common/turns_gemm_sm90.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"
#include "cuda/winograd_int8/params.h"

namespace jaxconv::winograd_int8 {

struct ProductsTile {
  static constexpr int kRows = kProductsRows;  // of V, and of U
  static constexpr int kChannels = kProductsChannels;
  static constexpr int kThreads = 3 * 128;
  static constexpr int kStages = 6, kFilterSlots = 0, kStationary = 0;
  static constexpr int kOperandBytes = kRows * kChannels, kStageBytes = 2 * kOperandBytes;
  // 1024 more to align the ring.
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;
};

struct ProductsMaps {
  CUtensorMap v, u;  // (c, tile, point); (c, 2 rows, 4 steps of 8 rows, 4 steps of 2, 32 rows)
};

// The start of a tile of M.
struct ProductsPlace {
  int32_t column, row, point;
  __device__ __forceinline__ ProductsPlace(const ProductsParams& params, int32_t index,
                                           int32_t rank) {
    params.n_tiles.Divmod(index, &index, &column);
    params.m_tiles.Divmod(index, &point, &row);
    column *= ProductsTile::kRows;
    row = (row * kProductsCtas + rank) * ProductsTile::kRows;
  }
};

// A CTA's loads, for turns_gemm_sm90.cuh.
struct ProductsLoads {
  const ProductsParams& params;
  const ProductsMaps& maps;
  const int32_t rank;
  const uint32_t v_at, u_at;
  int32_t row, point, block;

  __device__ __forceinline__ ProductsLoads(const ProductsParams& params, const ProductsMaps& maps,
                                           int32_t rank, uint32_t ring)
      : params(params),
        maps(maps),
        rank(rank),
        v_at(ring),
        u_at(ring + ProductsTile::kOperandBytes +
             rank * (ProductsTile::kOperandBytes / kProductsCtas)) {}

  __device__ __forceinline__ void Begin(int32_t tile) {
    constexpr int kBlocks = ProductsTile::kRows / 32 / kProductsCtas;  // of U, multicast to both
    const ProductsPlace place(params, tile, rank);
    row = place.row;
    point = place.point;
    block = (place.point * params.columns + place.column) / 32 + rank * kBlocks;
  }
  __device__ __forceinline__ void Load(int32_t k_block, uint32_t at, uint32_t barrier) const {
    const int32_t channel = k_block * ProductsTile::kChannels;
    CopyTile3d(v_at + at, &maps.v, barrier, channel, row, point);
    CopyTile5dToCluster(u_at + at, &maps.u, barrier, channel, 0, 0, 0, block,
                        (1 << kProductsCtas) - 1);
  }
};

// Stores the accumulators of 64 rows to M; `row`: the thread's first row.
__device__ __forceinline__ void StoreProducts(const ProductsParams& params,
                                              const ProductsPlace& place, int32_t row,
                                              const int32_t (&acc)[64]) {
  const int32_t column = place.column + Lane() % 4 * 8;
  const float* const scales = params.u_scale + int64_t{place.point} * params.columns + column;
  __half* const to = static_cast<__half*>(params.m) + place.point * params.m_point +
                     int64_t{row} * params.columns + column;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    if (column + group * 32 >= params.columns) break;
    float scale[8];
    requantize_internal::LoadFloats(scales + group * 32, scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= params.rows) continue;
      __half2 pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t* sums = &acc[group * 16 + j * 4 + half * 2];
        pairs[j] = __floats2half2_rn(static_cast<float>(sums[0]) * scale[2 * j],
                                     static_cast<float>(sums[1]) * scale[2 * j + 1]);
      }
      uint4 words;
      memcpy(&words, pairs, sizeof(words));
      *reinterpret_cast<uint4*>(to + half * 8 * params.columns + group * 32) = words;
    }
  }
}

struct ProductsGemm {
  using Tile = ProductsTile;
  using Params = ProductsParams;
  using Maps = ProductsMaps;
  using Loads = ProductsLoads;
  using Sums = int32_t[2][64];

  __device__ static __forceinline__ void Prefetch(const Maps& maps) {
    PrefetchTensorMap(&maps.v);
    PrefetchTensorMap(&maps.u);
  }
  __device__ static __forceinline__ void Multiply(Sums& sums, uint32_t v, bool accumulate) {
    const uint64_t a[2] = {KMajorDescriptor(v), KMajorDescriptor(v + 64 * Tile::kChannels)};
    const uint64_t b = KMajorDescriptor(v + Tile::kOperandBytes);
#pragma unroll
    for (int k = 0; k < Tile::kChannels / 32; ++k) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        WgmmaInt8(int8_t{}, int8_t{}, sums[block], a[block] + k * 2, b + k * 2,
                  accumulate || k > 0);
      }
    }
  }

  struct Stores {
    const Params& params;

    __device__ __forceinline__ explicit Stores(const Params& params) : params(params) {}
    __device__ __forceinline__ void Store(int32_t tile, int32_t rank, const Sums& sums) const {
      const ProductsPlace place(params, tile, rank);
      const int32_t row = place.row + threadIdx.x / 32 % 4 * 16 + Lane() / 4;
      StoreProducts(params, place, row, sums[0]);
      StoreProducts(params, place, row + 64, sums[1]);
    }
  };
};

template <class Tag>
__global__ void __launch_bounds__(ProductsTile::kThreads, 1)
    ProductsKernel(const __grid_constant__ ProductsParams params,
                   const __grid_constant__ ProductsMaps maps) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[Barriers<ProductsTile>::kCount];
  RunTurnsGemm<ProductsGemm, /*kWaits=*/false>(params, maps, dynamic, barrier_words);
}

// v, u: V and U in the workspace.
template <class Tag>
Status LaunchProducts(const char* name, const ProductsParams& params, const int8_t* v,
                      const int8_t* u, int32_t channels, int32_t ctas, void* stream) {
  using Tile = ProductsTile;
  const int64_t c = channels, points = params.points;
  ProductsMaps maps;
  const DenseTensor of_v = {DType::kS8, 3, v, {c, params.rows, points}, {1, c, params.rows * c}};
  const int32_t v_box[3] = {Tile::kChannels, Tile::kRows, 1};
  JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(of_v, v_box, &maps.v));
  const DenseTensor of_u = {
      DType::kS8, 5, u, {c, 2, 4, 4, points * params.columns / 32}, {1, c, 8 * c, 2 * c, 32 * c}};
  const int32_t u_box[5] = {Tile::kChannels, 2, 4, 4, Tile::kRows / 32 / kProductsCtas};
  JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(of_u, u_box, &maps.u));
  LaunchConfig config;
  config.grid = static_cast<unsigned>(ctas);
  config.threads = Tile::kThreads;
  config.shared_bytes = Tile::kSharedBytes;
  config.cluster = kProductsCtas;
  return Launch<ProductsKernel<Tag>>(name, config, stream, params, maps);
}

}  // namespace jaxconv::winograd_int8

#endif  // JAXCONV_CUDA_WINOGRAD_INT8_PRODUCTS_SM90_CUH_
