// The products of the Winograd domain on the tensor cores of every GPU since sm_80:
//
//     M[point][tile, k] = sum over c of V[point][tile, c] U[point][k, c]     for each group
//
// (m + 2)^2 GEMMs (times groups) of gemm_m = tiles of a chunk, gemm_n = output channels of a group
// and gemm_k = channels of a group of the input, in one launch. Both operands are K-major, copied
// 16 bytes at a time and read by ldmatrix. mma.sync.m16n8k16 multiplies float16 with float32 sums.
//
//            c ->                                   CTA: 128 x 128 of M, 64 of c a stage
//     V  [ 128 tiles x 64 ] \                       4 warps of 64 x 64
//                             >  M [128 x 128]      3 stages
//     U  [ 128 k     x 64 ] /
//
// Shared memory: 3 stages of (tile_m + tile_n) x 128 bytes, 98,304 at 128x128 (two CTAs an SM),
// 49,152 at 64x64 (four). Registers: 128 accumulators (32 at 64x64) and 64 fragments, at most 255.
// Synchronisation: common/mma_tile.cuh, one barrier a stage. CTA order: blocks of k fastest, then
// blocks of tiles, so that neighbours share V; then groups and points.
//
// Accumulators go to M from registers: four lanes write the 32 bytes of a sector, so every sector
// is whole. Rows past the last tile and columns past the last channel are neither copied nor
// stored; the reduction may have any multiple of 8 channels.
#ifndef JAXCONV_CUDA_WINOGRAD_BATCHED_GEMM_CUH_
#define JAXCONV_CUDA_WINOGRAD_BATCHED_GEMM_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "core/fast_divmod.h"
#include "core/status.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {

struct GemmParams {
  const __half* v = nullptr;
  const __half* u = nullptr;
  float* m = nullptr;
  int32_t rows = 0, red = 0, cols = 0;            // of a group's GEMM
  int32_t v_row = 0, m_row = 0;                   // elements: the channels of all groups
  int64_t v_point = 0, u_point = 0, m_point = 0;  // elements from a point to the next
  FastDivmod n_tiles, m_tiles, groups;
};

// Copies rows of a K-major matrix to shared memory, for MmaMainloop.
template <class Tile, class Operand>
class RowCopier {
 public:
  static constexpr int kRowsOfPass = Tile::kThreads / Operand::kChunks;
  static constexpr int kPasses = Operand::kRows / kRowsOfPass;
  static_assert(kRowsOfPass % 8 == 0 && kPasses * kRowsOfPass == Operand::kRows);

  // `matrix`: row 0 of the tile at the start of the reduction; `rows`: the number of rows.
  __device__ __forceinline__ RowCopier(const __half* matrix, int32_t row_stride, int32_t rows)
      : source_(matrix + int64_t{Row()} * row_stride + Chunk() * 8),
        pass_bytes_(kRowsOfPass * row_stride * int64_t{sizeof(__half)}),
        offset_(Operand::Offset(Row(), Chunk())) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      inside_ |= static_cast<uint32_t>(Row() + pass * kRowsOfPass < rows) << pass;
    }
  }

  __device__ static int Row() { return threadIdx.x / Operand::kChunks; }
  __device__ static int Chunk() { return threadIdx.x % Operand::kChunks; }

  // `valid`: the chunk lies before the end of the reduction.
  template <int kPass>
  __device__ __forceinline__ void Copy(uint32_t shared, bool valid) const {
    const auto* source = reinterpret_cast<const char*>(source_) + kPass * pass_bytes_;
    CopyAsync<16>(shared + offset_ + kPass * kRowsOfPass * Operand::kRowBytes, source,
                  valid && (inside_ >> kPass & 1) != 0);
  }
  __device__ __forceinline__ void Advance() { source_ += Operand::kTileK; }

 private:
  const __half* source_;
  int64_t pass_bytes_;
  uint32_t offset_, inside_ = 0;
};

// The loader of MmaMainloop (common/mma_tile.cuh).
template <class Tile, class OperandA, class OperandB>
class GemmLoader {
 public:
  using CopierA = RowCopier<Tile, OperandA>;
  using CopierB = RowCopier<Tile, OperandB>;

  __device__ __forceinline__ GemmLoader(CopierA a, CopierB b, int32_t reduction)
      : a_(a), b_(b), left_(reduction - CopierA::Chunk() * 8) {}

  __device__ __forceinline__ void Prepare() {}
  template <int kPart, int kParts>
  __device__ __forceinline__ void IssuePart(uint32_t slot) {
    const bool valid = left_ > 0;
    constexpr int kAll = CopierA::kPasses + CopierB::kPasses;
    constexpr int kFirst = kAll * kPart / kParts, kCount = kAll * (kPart + 1) / kParts - kFirst;
    Unroll<kCount>([&](auto index) {
      constexpr int pass = kFirst + decltype(index)::value;
      if constexpr (pass < CopierA::kPasses) {
        a_.template Copy<pass>(slot, valid);
      } else {
        b_.template Copy<pass - CopierA::kPasses>(slot + Tile::kBytesOfA, valid);
      }
    });
  }
  __device__ __forceinline__ void Advance() {
    a_.Advance();
    b_.Advance();
    left_ -= OperandA::kTileK;
  }
  __device__ __forceinline__ void Finish(uint32_t) {}

 private:
  CopierA a_;
  CopierB b_;
  int32_t left_;  // elements of the reduction from this thread's chunk on
};

template <class Tag>
__global__ void __launch_bounds__(Tag::Tile::kThreads, Tag::Tile::kMinBlocks)
    BatchedGemmKernel(const __grid_constant__ GemmParams params) {
  using Tile = typename Tag::Tile;
  using OperandA = OperandTile<__half, Tile::kTileM, Tile::kTileKBytes, false>;
  using OperandB = OperandTile<__half, Tile::kTileN, Tile::kTileKBytes, false>;
  using Loader = GemmLoader<Tile, OperandA, OperandB>;
  extern __shared__ __align__(1024) unsigned char stages[];

  int32_t index, n_tile, m_tile, group, point;
  params.n_tiles.Divmod(blockIdx.x, &index, &n_tile);
  params.m_tiles.Divmod(index, &index, &m_tile);
  params.groups.Divmod(index, &point, &group);
  const int32_t row_first = m_tile * Tile::kTileM, col_first = n_tile * Tile::kTileN;

  float acc[Tile::kBlocksM][Tile::kBlocksN][4] = {};
  {
    Loader loader(
        {params.v + point * params.v_point + int64_t{row_first} * params.v_row + group * params.red,
         params.v_row, params.rows - row_first},
        {params.u + point * params.u_point +
             (int64_t{group} * params.cols + col_first) * params.red,
         params.red, params.cols - col_first},
        params.red);
    MmaMainloop<__half, Tile, OperandA, OperandB>(
        loader, SharedAddress(stages), (params.red + OperandA::kTileK - 1) / OperandA::kTileK, acc);
  }
  const int lane = threadIdx.x % 32;
  const int32_t row = row_first + Tile::WarpM() + lane / 4;
  const int32_t col = col_first + Tile::WarpN() + lane % 4 * 2;
  float* to =
      params.m + point * params.m_point + int64_t{row} * params.m_row + group * params.cols + col;
#pragma unroll
  for (int i = 0; i < Tile::kBlocksM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + i * 16 + half * 8 < params.rows) {
#pragma unroll
        for (int j = 0; j < Tile::kBlocksN; ++j) {
          if (col + j * 8 < params.cols) {
            *reinterpret_cast<float2*>(to + j * 8) =
                make_float2(acc[i][j][half * 2], acc[i][j][half * 2 + 1]);
          }
        }
      }
      to += int64_t{8} * params.m_row;
    }
  }
}

// Enqueues the products of a chunk.
template <class Tag>
Status LaunchBatchedGemm(const char* name, const Products& products, void* stream) {
  using Tile = typename Tag::Tile;
  const Geometry& g = products.geometry;
  GemmParams params;
  params.v = static_cast<const __half*>(products.v);
  params.u = static_cast<const __half*>(products.u);
  params.m = products.m;
  params.rows = products.tiles;
  params.red = g.red;
  params.cols = g.cols;
  params.v_row = g.in_channels();
  params.m_row = g.out_channels();
  params.v_point = products.v_point;
  params.u_point = products.u_point;
  params.m_point = products.m_point;
  const int64_t n_tiles = (g.cols + Tile::kTileN - 1) / Tile::kTileN;
  const int64_t m_tiles = (products.tiles + Tile::kTileM - 1) / Tile::kTileM;
  params.n_tiles = FastDivmod(n_tiles);
  params.m_tiles = FastDivmod(m_tiles);
  params.groups = FastDivmod(g.groups);
  LaunchConfig config;
  config.grid = static_cast<unsigned>(n_tiles * m_tiles * g.groups * products.points);
  config.threads = Tile::kThreads;
  config.shared_bytes = Tile::kStages * Tile::kStageBytes;
  return Launch<BatchedGemmKernel<Tag>>(name, config, stream, params);
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_BATCHED_GEMM_CUH_
