// igemm_simt: implicit GEMM on the FP32 FMA units, for every legal problem of rank 1 to 3.
//
// Convolution -> GEMM (per batch, group and phase; core/implicit_gemm.h has the algebra):
//     fprop  y[(n,p), k]   = sum over (r,c) of x[gather(n,p,r), c]  w[(r,c), k]
//     dgrad  dx[(n,i), c]  = sum over (r,k) of dy[gather(n,i,r), k] w[(r,c), k]
//     wgrad  dw[(r,c), k]  = sum over (n,p) of x[gather(n,p,r), c]  dy[(n,p), k]
// No matrix is built: the gather happens in the address of each load.
//
// Tile: 128x128 outputs over 8 reduction indices, 256 threads, 8x8 outputs a thread
// (device/simt_tile.cuh); 128x64 and 64x64 with 128 and 64 threads for smaller problems. The "wide"
// tiles give a thread 8x16 outputs: half the threads, fewer loads for each FMA, but only full SMs
// hide its latencies. Shared memory: two stages of 8 x (tile_m + 4 + tile_n + 4) floats, 16896
// bytes at 128x128, plus 2.7 KB of row table (fprop, dgrad) or 4 KB of reduction table. Registers,
// 8x8: 64 accumulators, 32 fragments, 8 to 16 staged, at most 128 with 256 threads and 168 else;
// 8x16: 128, 48, 16 to 24, at most 255.
//
// Who waits for whom: a stage's global loads are issued before the FMAs of the previous stage and
// stored to the other half of shared memory after seven eighths of them; the one barrier there
// tells everybody that the new stage is full and the old one read.
//
// wgrad cuts the pixels into slices, one CTA each; every slice writes its own partial result to the
// workspace and splitk_reduce.cu adds them in order. With one slice it writes the output itself.
//
// Refuses: operand types other than f32, f16, bf16 or unequal; outputs other than the operand type
// or f32; "vec" instances channels that are not multiples of 4 and wgrad with lhs_dilation; extents
// beyond 32-bit coordinates. After: "Implicit GEMM CUDA" (seeds/001); the fast division is in
// core/fast_divmod.h.
#ifndef JAXCONV_CUDA_KERNELS_IGEMM_SIMT_CUH_
#define JAXCONV_CUDA_KERNELS_IGEMM_SIMT_CUH_

#include <string>
#include <type_traits>

#include "cuda/device/element.cuh"
#include "cuda/device/epilogue.cuh"
#include "cuda/device/gather_loaders.cuh"
#include "cuda/device/igemm_params.h"
#include "cuda/device/simt_tile.cuh"
#include "cuda/kernels/igemm_simt.h"

namespace jaxconv {

//                              tile m, n, warps m, n, lanes m, n, CTAs a multiprocessor
using SimtTile128x128 = SimtTile<128, 128, 8, 4, 2, 4, 8, 2>;
using SimtTile128x128Wide = SimtTile<128, 128, 16, 2, 2, 8, 4, 2>;
using SimtTile128x64 = SimtTile<128, 64, 8, 4, 1, 4, 8, 3>;
using SimtTile128x64Wide = SimtTile<128, 64, 16, 2, 1, 8, 4, 4>;
using SimtTile64x64 = SimtTile<64, 64, 8, 2, 1, 4, 8, 6>;
using SimtTile128x32 = SimtTile<128, 32, 8, 2, 1, 8, 4, 6>;

template <Op kOp, typename T, class Tile, bool kVec>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    IgemmSimt(const __grid_constant__ IgemmParams params) {
  __shared__ SimtStage<Tile> stages[2];
  const ImplicitGemm& gemm = params.gemm;
  const T* a = static_cast<const T*>(params.a);
  const T* b = static_cast<const T*>(params.b);
  float acc[8][Tile::kThreadN] = {};

  int32_t index = blockIdx.x, n_tile, m_tile;
  params.n_tiles.Divmod(index, &index, &n_tile);
  params.m_tiles.Divmod(index, &index, &m_tile);
  const int n_first = n_tile * Tile::kTileN;

  auto store = [&](int64_t offset, int n_from, auto dst_row) {
    if (std::is_same_v<T, float> || params.out_is_f32) {
      StoreTile<Tile, kVec>(acc, static_cast<float*>(params.out) + offset, dst_row,
                            gemm.out_channels, n_from, gemm.gemm_n);
    } else {
      StoreTile<Tile, kVec>(acc, static_cast<T*>(params.out) + offset, dst_row, gemm.out_channels,
                            n_from, gemm.gemm_n);
    }
  };

  if constexpr (kOp == Op::kWgrad) {
    __shared__ ReduceTable table;
    int32_t slice, z, batch, group;
    params.slices.Divmod(index, &z, &slice);
    gemm.groups_divmod.Divmod(z, &batch, &group);
    const int32_t slice_pixels = params.blocks_per_slice * kSimtTileK;
    const int64_t first = int64_t{slice} * slice_pixels;
    const int64_t end = min(first + slice_pixels, int64_t{gemm.reduce_pixels});
    const int32_t m_first = m_tile * Tile::kTileM;
    TableLoader<T, Tile, kOp, kVec ? 4 : 1> loader(
        params, a + batch * gemm.a_batch + int64_t{group} * gemm.a_group,
        b + batch * gemm.b_batch + int64_t{group} * gemm.b_group, m_first, n_first,
        static_cast<int32_t>(min(first, end)), static_cast<int32_t>(end), stages[0], table);
    SimtMainloop<Tile>(loader, stages, acc);
    store(slice * params.slice_elements + batch * gemm.out_batch + int64_t{group} * gemm.out_group,
          n_first, [&](int row) { return m_first + row < gemm.gemm_m ? m_first + row : -1; });
  } else {
    __shared__ GatherTile<Tile> tile;
    int32_t phase, z, batch, group;
    params.batch_groups.Divmod(index, &phase, &z);
    gemm.groups_divmod.Divmod(z, &batch, &group);
    if (!InitGatherTile<Tile, T>(params, m_tile, n_first, phase,
                                 a + batch * gemm.a_batch + int64_t{group} * gemm.a_group,
                                 b + batch * gemm.b_batch + int64_t{group} * gemm.b_group,
                                 batch * gemm.out_batch + int64_t{group} * gemm.out_group, tile)) {
      return;
    }
    if constexpr (kVec) {
      VectorGatherLoader<T, Tile, kOp == Op::kDgrad> loader(params, tile, stages[0]);
      SimtMainloop<Tile>(loader, stages, acc);
    } else {
      __shared__ ReduceTable table;
      TableLoader<T, Tile, kOp, 1> loader(params, tile, stages[0], table);
      SimtMainloop<Tile>(loader, stages, acc);
    }
    // What the mainloop does not need waits in shared memory and not in registers.
    store(tile.out, tile.n_first, [&](int row) { return tile.dst_row[row]; });
  }
}

template <Op kOp, DType kType>
Status LaunchIgemmSimt(SimtTileId tile, const IgemmParams& params, int64_t ctas, void* stream) {
  using T = typename ElementOf<kType>::Type;
  auto launch = [&](auto kernel, int threads) {
    kernel<<<static_cast<unsigned>(ctas), threads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  };
  switch (tile) {
    case SimtTileId::kVec128x128:
      launch(IgemmSimt<kOp, T, SimtTile128x128, true>, SimtTile128x128::kThreads);
      break;
    case SimtTileId::kVec128x128Wide:
      launch(IgemmSimt<kOp, T, SimtTile128x128Wide, true>, SimtTile128x128Wide::kThreads);
      break;
    case SimtTileId::kVec128x64:
      launch(IgemmSimt<kOp, T, SimtTile128x64, true>, SimtTile128x64::kThreads);
      break;
    case SimtTileId::kVec128x64Wide:
      launch(IgemmSimt<kOp, T, SimtTile128x64Wide, true>, SimtTile128x64Wide::kThreads);
      break;
    case SimtTileId::kVec64x64:
      launch(IgemmSimt<kOp, T, SimtTile64x64, true>, SimtTile64x64::kThreads);
      break;
    case SimtTileId::kScalar128x64:
      launch(IgemmSimt<kOp, T, SimtTile128x64, false>, SimtTile128x64::kThreads);
      break;
    case SimtTileId::kScalar128x32:
      launch(IgemmSimt<kOp, T, SimtTile128x32, false>, SimtTile128x32::kThreads);
      break;
  }
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    return Status::Internal(std::string("igemm_simt: ") + cudaGetErrorString(error));
  }
  return {};
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_IGEMM_SIMT_CUH_
