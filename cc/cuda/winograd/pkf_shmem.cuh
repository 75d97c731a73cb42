// F(m x m, 3x3) in one kernel (seeds/004, algorithm 4, PKF-Shmem): V in shared memory, U from
// global memory straight into fragments, M in registers.
//
//     V[point][tile][c] = B^T d B        into shared memory, all channels of the group at once
//     M[point][tile][k] = V U^T          a warp's points: no barrier
//     y[tile][k]        = A^T M A        rows in registers, columns through shared memory
//
// A CTA has TB_M tiles of a group and loops over blocks of TB_N output channels, so a tile is
// transformed once for any K. Warp (j, part) has the points of column j and TB_N / parts channels;
// the sums of its alpha = m + 2 points stay in registers.
//
//     points     0  1  2 .. alpha-1     column j = warp j        V: [C / 32][point][tile][32 channels]
//         row 0  *  *  *    *                                    exchange: [j][2 rows of y][tile][TB_N]
//         row 1  *  *  *    *           row i = a loop
//           ..                                                   U: 64 bytes of a row a load, a point
//     alpha - 1  *  *  *    *                                       ahead of the products
//
// Shared memory: V 2 alpha^2 TB_M ceil32(C) bytes; the exchange 8 alpha TB_M TB_N. At C = 64
//     F(2x2)   16x32   32 + 16 KB   two CTAs an SM      F(4x4)   16x32    72 + 24 KB
//              32x32   64 + 32 KB   two                          32x16   144 + 24 KB
// TB_M is the seed's 16 or 32. There are no bank conflicts: a quarter-warp that stores V covers
// consecutive rows of 64 bytes, and so does one that loads fragments (two rows of one point). The
// exchange swaps the 64-byte halves of odd tiles' 128 bytes, so that two tiles stored together use
// all banks (rows of 64 bytes need no swap). Lanes read 8 channels each: four lanes begin with the
// low four channels, the next four lanes with the high four. Registers: sums 64, 128 (F(2x2)), 48,
// 96 (F(4x4)); plus U and V in the loop; at most 252 of 255, or 158 of 168 with 12 warps an SM
// (F(4x4) 16x32). The transform runs while no sums are live.
//
// Who waits for whom: one barrier after the transform, then two for each exchange; an exchange
// passes two of the m output rows.
//
// Refuses: V that does not fit in shared memory (pkf_plan.cc); channels of a group that are not
// multiples of 8.
#ifndef JAXCONV_CUDA_WINOGRAD_PKF_SHMEM_CUH_
#define JAXCONV_CUDA_WINOGRAD_PKF_SHMEM_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/winograd/direct_fragments.cuh"
#include "cuda/winograd/fused_tile.cuh"
#include "cuda/winograd/pkf_params.h"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {

// The lane's rows of U in a point column, as byte offsets from the first point of a point row: the
// pointer is then uniform and needs no register in each lane. Columns past the last are replaced by
// the last; their results are not stored. Channels past the last are replaced by the last eight of
// the same filter; V is zero there.
template <class Tile>
class FilterRows {
 public:
  __device__ __forceinline__ FilterRows(const Geometry& geometry, uint32_t first, int first_column)
      : last_(geometry.red - 8) {
    const int lane = Lane(), g = lane / 4;
    channel_ = min(lane % 4 * 8, last_);
#pragma unroll
    for (int b = 0; b < Tile::kBlocksN; ++b) {
      const int column = min(first_column + ChannelOfColumn(b, g), geometry.cols - 1);
      offset_[b] = first + (static_cast<uint32_t>(column) * geometry.red + channel_) * 2;
    }
  }

  // A k-block advances the offsets, not the common pointer: otherwise the sums of row and point
  // offsets would be loop-invariant, and the compiler would keep them all in registers.
  __device__ __forceinline__ void Advance() {
    const int next = min(channel_ + kBlockChannels, last_);
#pragma unroll
    for (int b = 0; b < Tile::kBlocksN; ++b) offset_[b] += (next - channel_) * 2;
    channel_ = next;
  }
  template <int kFirst>
  __device__ __forceinline__ void Load(const char* point, uint4 (&to)[Tile::kSetBlocks]) const {
#pragma unroll
    for (int b = 0; b < Tile::kSetBlocks; ++b) {
      to[b] = __ldg(reinterpret_cast<const uint4*>(point + offset_[kFirst + b]));
    }
  }

 private:
  uint32_t offset_[Tile::kBlocksN];
  int channel_, last_;
};

// Computes M for a point column and Tile::kWarpN channels. v: the address of the lane's fragment at
// the column's first point. first_filter: bytes from the start of U to that point of the group's
// first filter.
template <class Tile>
__device__ __forceinline__ void MultiplyColumn(
    const PkfParams& params, uint32_t v, uint32_t first_filter, int first_column,
    float (&acc)[Tile::kAlpha][Tile::kBlocksM][Tile::kBlocksN][4]) {
  FilterRows<Tile> rows(params.geometry, first_filter, first_column);
  const char* const filter = static_cast<const char*>(params.u);
  const int64_t row_bytes = Tile::kAlpha * params.u_point * 2;
  // A set of fragments is loaded while the previous one is multiplied.
  constexpr int kSets = Tile::kBlocksN / Tile::kSetBlocks;
  uint4 u[2][Tile::kSetBlocks];
  rows.template Load<0>(filter, u[0]);
#pragma unroll 1
  for (int left = params.geometry.red; left > 0; left -= kBlockChannels) {
    Unroll<Tile::kAlpha>([&](auto row) {
      constexpr int i = decltype(row)::value;
      uint32_t fragments[Tile::kBlocksM][2][4];
      LoadPoint<Tile>(v + i * Tile::kAlpha * Tile::kTbM * 64, fragments);
      Unroll<kSets>([&](auto set) {
        constexpr int s = decltype(set)::value, kTurn = i * kSets + s;
        // The very last load repeats the last k-block and is not used.
        constexpr int kNextRow = (s + 1 == kSets ? i + 1 : i) % Tile::kAlpha;
        if constexpr (kTurn + 1 == Tile::kAlpha * kSets) rows.Advance();
        rows.template Load<(s + 1) % kSets * Tile::kSetBlocks>(filter + kNextRow * row_bytes,
                                                               u[(kTurn + 1) % 2]);
        MultiplyPoint<Tile, s * Tile::kSetBlocks>(fragments, u[kTurn % 2], acc[i]);
      });
    });
    v += Tile::kBlockBytes;
  }
}

template <class Tag>
__global__ void __launch_bounds__(Tag::Tile::kThreads, Tag::Tile::kCtasPerSm)
    PkfShmemKernel(const __grid_constant__ PkfParams params) {
  using Tile = typename Tag::Tile;
  constexpr int kAlpha = Tile::kAlpha;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ TileOrigin origins[Tile::kTbM];
  __shared__ Scales scales;

  const Geometry& geometry = params.geometry;
  int32_t block = blockIdx.x, part, group;
  params.column_parts.Divmod(block, &block, &part);
  params.groups.Divmod(block, &block, &group);
  LocateTiles<Tile>(geometry, block * Tile::kTbM, origins);
  if (threadIdx.x < 32) FindScales(params, &scales);
  __syncthreads();
  const uint32_t exchange = SharedAddress(shared), v = exchange + Tile::kExchangeBytes;
  const int blocks = (geometry.red + kBlockChannels - 1) / kBlockChannels;
  StoreTransformed<Tile, typename Tag::T>(geometry, params.x, group, scales.input, origins, v,
                                          blocks);
  __syncthreads();

  const int end_column = min((part + 1) * params.columns_of_cta, geometry.cols);
#pragma unroll 1
  for (int column = part * params.columns_of_cta; column < end_column; column += Tile::kTbN) {
    float acc[kAlpha][Tile::kBlocksM][Tile::kBlocksN][4] = {};
    {
      const int warp = static_cast<int>(threadIdx.x) / 32, j = warp % kAlpha;
      const uint32_t filter =
          (j * static_cast<uint32_t>(params.u_point) + group * geometry.cols * geometry.red) * 2;
      MultiplyColumn<Tile>(params, v + j * Tile::kTbM * 64 + FragmentOffset<Tile>(), filter,
                           column + warp / kAlpha * Tile::kWarpN, acc);
    }
    TransformRows<Tile>(acc);
    Unroll<Tile::m / Tile::kRows>([&](auto round) {
      constexpr int kFirstRow = decltype(round)::value * Tile::kRows;
      StoreRows<Tile, kFirstRow>(acc, exchange);
      __syncthreads();
      StoreOutputs<Tile, typename Tag::T>(params, exchange, origins, kFirstRow, group, column,
                                          scales);
      __syncthreads();
    });
  }
}

template <Op kOp, DType kType, int m, int kTbM, int kWarpN, int kParts, int kSetBlocks,
          int kCtasPerSm>
struct PkfShmem {
  using Tile = FusedTile<m, kTbM, kWarpN, kParts, kSetBlocks, kCtasPerSm>;
  using T = typename ElementOf<kType>::Type;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<LaunchParams>();
    const Geometry& g = launch.geometry;
    const StagePointers at = Locate(launch, operands);
    JAXCONV_RETURN_IF_ERROR(LaunchFilterStage(launch, at, stream));
    PkfParams params;
    params.geometry = g;
    params.x = at.input;
    params.u = at.u;
    params.y = at.output;
    params.input_scale = at.input_scale;
    params.filter_scale = at.filter_scale;
    params.u_point = int64_t{g.out_channels()} * g.red;
    const int column_blocks = (g.cols + Tile::kTbN - 1) / Tile::kTbN;
    params.columns_of_cta =
        (column_blocks + launch.column_parts - 1) / launch.column_parts * Tile::kTbN;
    params.out_is_f32 = launch.out_is_f32;
    params.column_parts = FastDivmod(launch.column_parts);
    params.groups = FastDivmod(g.groups);
    LaunchConfig config;
    config.grid = static_cast<unsigned>(int64_t{launch.column_parts} * g.groups *
                                        ((g.tiles + kTbM - 1) / kTbM));
    config.threads = Tile::kThreads;
    config.shared_bytes =
        static_cast<size_t>(Tile::kExchangeBytes + FusedInputBytes(Tile::kAlpha, kTbM, g.red));
    return jaxconv::Launch<PkfShmemKernel<Tag>>(plan.kernel->name, config, stream, params);
  }
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_PKF_SHMEM_CUH_
