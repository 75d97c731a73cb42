// The products of the Winograd domain without a barrier (seeds/004, algorithm 3).
//
//     M[i, j][tiles, cols] = V[i, j][tiles, reduction] U[i, j][cols, reduction]^T
//
// one GEMM for each point (i, j) and group. A CTA has alpha = m + 2 warps and a block of TB_M tiles
// and TB_N output channels; warp j has the points of column j and loops over their rows i:
//
//     i = 0        warp 0: point (0, 0)   warp 1: point (0, 1)   ...   warp alpha - 1
//     i = 1        warp 0: point (1, 0)   warp 1: point (1, 1)   ...
//
// No two warps share an operand, so no data passes through shared memory and no warp waits for
// another. A warp loads its fragments from global memory, 16 bytes a lane (direct_fragments.cuh).
// The fragments of the next k-block of 32 channels, across points too, are in flight while those of
// this one are multiplied. In the seed the loop over channels encloses the loop over rows, with the
// sums of all rows in registers; here it is the inner loop, because M goes to memory point by
// point.
//
// TB_M x TB_N consists of the seed's WMMA shape 16x16x16, two m16n8k16: one block of 16 tiles, two
// of 8 channels. A k-block of TB_M x TB_N loads (TB_M + TB_N) * 64 bytes for TB_M TB_N / 128
// instructions.
//
// The instance named pkf_llc (the seed's PKF-LLC-32, after its TB_M) processes chunks of tiles whose
// V and M fit in L2 (products_plan.cc); the one named sync_free processes all tiles at once.
//
// Shared memory: none, so that all of it serves as L1. For C = K = 64, U of F(2x2) (131 KB) stays
// in L1 and V streams. Registers of the two sets of fragments and the sums: 160 at 32x64, with
// addresses at most 234. Two CTAs share an SM.
//
// Refuses: reductions and columns of a group that are not multiples of 8, and blocks of V or U of
// 2^31 elements.
#ifndef JAXCONV_CUDA_WINOGRAD_SYNC_FREE_CUH_
#define JAXCONV_CUDA_WINOGRAD_SYNC_FREE_CUH_

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/winograd/direct_fragments.cuh"
#include "cuda/winograd/four_stage.cuh"
#include "cuda/winograd/products_params.h"

namespace jaxconv::winograd {

// A lane's four consecutive channels come from two neighbouring blocks of B.
template <int kTbM_, int kTbN_>
struct WmmaTile {
  static constexpr int kTbM = kTbM_, kTbN = kTbN_;
  static_assert(kTbM % 16 == 0 && kTbN % 16 == 0);
  static constexpr int kBlocksA = kTbM / 16, kBlocksB = kTbN / 8;

  struct Fragments {
    uint4 a[kBlocksA][2], b[kBlocksB];
  };
};

// The lane's rows of both operands, as offsets from the first row of the CTA's block.
template <class Tile>
struct RowOffsets {
  int32_t a[Tile::kBlocksA][2], b[Tile::kBlocksB];

  // Rows past the last are replaced by the last; their results are not stored.
  __device__ __forceinline__ RowOffsets(const ProductsParams& params, int tiles, int columns) {
    const int g = threadIdx.x % 32 / 4;
    auto tile = [&](int row) { return min(row, tiles - 1) * params.v_row; };
    auto column = [&](int row) { return min(row, columns - 1) * params.reduction; };
#pragma unroll
    for (int i = 0; i < Tile::kBlocksA; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[i][half] = tile(i * 16 + half * 8 + g);
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kBlocksB; ++i) b[i] = column(ChannelOfColumn(i, g));
  }
};

template <class Tile>
__device__ __forceinline__ void LoadFragments(const RowOffsets<Tile>& rows, const __half* a,
                                              const __half* b, bool inside,
                                              typename Tile::Fragments& to) {
#pragma unroll
  for (int i = 0; i < Tile::kBlocksA; ++i) {
    to.a[i][0] = LoadEightChannels(a + rows.a[i][0], inside);
    to.a[i][1] = LoadEightChannels(a + rows.a[i][1], inside);
  }
#pragma unroll
  for (int i = 0; i < Tile::kBlocksB; ++i) to.b[i] = LoadEightChannels(b + rows.b[i], inside);
}

// Alternates between the blocks of a WMMA shape for each k16, so that no two consecutive
// instructions add to the same sums.
template <class Tile>
__device__ __forceinline__ void MultiplyFragments(const typename Tile::Fragments& from,
                                                  float (&acc)[Tile::kBlocksA][Tile::kBlocksB][4]) {
  auto multiply = [&](auto half) {
#pragma unroll
    for (int i = 0; i < Tile::kBlocksA; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kBlocksB; ++j) {
        MultiplyHalf<decltype(half)::value>(from.a[i], from.b[j], acc[i][j]);
      }
    }
  };
  multiply(std::integral_constant<int, 0>());
  multiply(std::integral_constant<int, 1>());
}

// Stores the sums of a point to M, four channels at a time, and clears them.
template <class Tile>
__device__ __forceinline__ void StoreProducts(const ProductsParams& params, float* m, int tiles,
                                              int columns,
                                              float (&acc)[Tile::kBlocksA][Tile::kBlocksB][4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  auto store = [&](int tile, int column, float x, float y, float z, float w) {
    if (tile >= tiles || column >= columns) return;
    *reinterpret_cast<float4*>(m + int64_t{tile} * params.m_row + column) = make_float4(x, y, z, w);
  };
#pragma unroll
  for (int i = 0; i < Tile::kBlocksA; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kBlocksB; j += 2) {
      const float (&low)[4] = acc[i][j], (&high)[4] = acc[i][j + 1];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        store(i * 16 + e * 8 + g, j * 8 + t * 4, low[e * 2], low[e * 2 + 1], high[e * 2],
              high[e * 2 + 1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Tile::kBlocksA; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kBlocksB; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][j][e] = 0;
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(Tag::kAlpha * 32, 2)
    SyncFreeKernel(const __grid_constant__ ProductsParams params) {
  using Tile = typename Tag::ProductTile;
  constexpr int kAlpha = Tag::kAlpha;
  int32_t block = blockIdx.x, column_block, group;
  params.column_blocks.Divmod(block, &block, &column_block);
  params.groups.Divmod(block, &block, &group);
  const int first_tile = block * Tile::kTbM, first_column = column_block * Tile::kTbN;
  const int tiles = params.tiles - first_tile, columns = params.cols - first_column;
  const int j = threadIdx.x / 32, eight = threadIdx.x % 4 * 8;

  const __half* v = static_cast<const __half*>(params.v) + j * params.v_point +
                    int64_t{first_tile} * params.v_row + group * params.reduction + eight;
  const __half* u = static_cast<const __half*>(params.u) + j * params.u_point +
                    (int64_t{group} * params.cols + first_column) * params.reduction + eight;
  float* m = params.m + j * params.m_point + int64_t{first_tile} * params.m_row +
             int64_t{group} * params.cols + first_column;
  const RowOffsets<Tile> rows(params, tiles, columns);

  // The next load: channel `k` of the reduction, at the point of v and u.
  int k = 0;
  auto load = [&](typename Tile::Fragments& to) {
    const bool inside = k + eight < params.reduction;
    const __half *const b = u + k, *const a = v + k;
    LoadFragments<Tile>(rows, a, b, inside, to);
    k += kBlockChannels;
    if (k >= params.reduction) {
      k = 0;
      v += kAlpha * params.v_point;
      u += kAlpha * params.u_point;
    }
  };
  float acc[Tile::kBlocksA][Tile::kBlocksB][4] = {};
  int blocks_left = (params.reduction + kBlockChannels - 1) / kBlockChannels;
  const int blocks = blocks_left;
  auto multiply = [&](const typename Tile::Fragments& from) {
    MultiplyFragments<Tile>(from, acc);
    if (--blocks_left > 0) return;
    blocks_left = blocks;
    StoreProducts<Tile>(params, m, tiles, columns, acc);
    m += kAlpha * params.m_point;
  };
  // Two k-blocks a pass, so that the two sets of fragments need no copies between registers. alpha
  // is even.
  typename Tile::Fragments even, odd;
  load(even);
#pragma unroll 1
  for (int left = kAlpha * blocks; left > 0; left -= 2) {
    load(odd);
    multiply(even);
    if (left > 2) load(even);
    multiply(odd);
  }
}

template <Op kOp, DType kType, int m, int kTbM, int kTbN>
struct SyncFree {
  static constexpr int kAlpha = m + 2;
  using ProductTile = WmmaTile<kTbM, kTbN>;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return RunFourStage(plan, operands, stream, [&](const Products& products) {
      const ProductsParams params = DescribeProducts(products, kTbM, kTbN);
      LaunchConfig config;
      config.grid = static_cast<unsigned>(params.ctas);
      config.threads = kAlpha * 32;
      return jaxconv::Launch<SyncFreeKernel<Tag>>(plan.kernel->name, config, stream, params);
    });
  }
};

// The same kernels, launched chunk by chunk (products_plan.h).
template <Op kOp, DType kType, int m, int kTbM, int kTbN>
using PkfLlc = SyncFree<kOp, kType, m, kTbM, kTbN>;

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_SYNC_FREE_CUH_
