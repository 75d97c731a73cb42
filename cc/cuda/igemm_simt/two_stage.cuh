// igemm_simt: implicit GEMM on the FP32 FMA units, for every legal problem of rank 1 to 3.
//
// Convolution -> GEMM (per batch, group and stride residue class; core/implicit_gemm.h has the
// algebra):
//     fprop  y[(n,p), k]   = sum over (r,c) of x[gather(n,p,r), c]  w[(r,c), k]
//     dgrad  dx[(n,i), c]  = sum over (r,k) of dy[gather(n,i,r), k] w[(r,c), k]
//     wgrad  dw[(r,c), k]  = sum over (n,p) of x[gather(n,p,r), c]  dy[(n,p), k]
// No im2col matrix is built: each load's address does the gather.
//
// Tile: 128x128 outputs over 8 reduction indices, 256 threads, 8x8 outputs a thread
// (simt_tile.cuh); 128x64, 128x32 and 64x64 with 128 or 64 threads for smaller problems. The "wide"
// tiles give a thread 8x16 outputs: half the threads and fewer loads for each FMA, but only full
// SMs hide its latencies. Shared memory: two stages of 8 x (tile_m + 4 + tile_n + 4) floats, 16,896
// bytes at 128x128, plus 2.7 KB of row table (fprop, dgrad) and 4 KB of reduction table (scalar
// instances, wgrad). Registers, 8x8: 64 accumulators, 32 fragments, 8 to 16 staged, at most 128
// with 256 threads, otherwise 168; 8x16: 128, 48, 16 to 24, at most 255.
//
// Synchronisation: a stage's global loads are issued before the FMAs of the previous stage and
// stored to the other stage of shared memory after seven eighths of them. After the following
// barrier, the new stage is full and the old one has been read.
//
// Bound by issue slots: 88 to 92 % of the instructions are FMA, and the largest stall is register
// bank conflicts (docs/notes/igemm_simt.md).
//
// wgrad splits the pixels into split-K slices, one CTA each. Several slices write partial sums to
// the workspace, and common/splitk_reduce.cuh adds them in order; a single slice writes the output.
//
// Refuses: operand types other than f32, f16, bf16 or unequal; outputs other than the operand type
// or f32; "vec" instances: channels that are not multiples of 4 and wgrad with lhs_dilation;
// extents beyond 32-bit coordinates. After: "Implicit GEMM CUDA" (seeds/001).
#ifndef JAXCONV_CUDA_IGEMM_SIMT_TWO_STAGE_CUH_
#define JAXCONV_CUDA_IGEMM_SIMT_TWO_STAGE_CUH_

#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/splitk_reduce.cuh"
#include "cuda/igemm_simt/gather_tile.cuh"
#include "cuda/igemm_simt/params.h"
#include "cuda/igemm_simt/simt_tile.cuh"
#include "cuda/igemm_simt/store_tile.cuh"
#include "cuda/igemm_simt/table_loader.cuh"
#include "cuda/igemm_simt/vector_gather_loader.cuh"

namespace jaxconv::igemm_simt {

template <class Tag>
__global__ void __launch_bounds__(Tag::Tile::kThreads, Tag::Tile::kMinBlocks)
    TwoStageKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  using Tile = typename Tag::Tile;
  constexpr Op kOp = Tag::kOp;
  constexpr bool kVec = Tag::kVec;
  __shared__ SimtStage<Tile> stages[2];
  const ImplicitGemm& gemm = params.gemm;
  const T* a = static_cast<const T*>(params.a);
  const T* b = static_cast<const T*>(params.b);
  float acc[8][Tile::kThreadN] = {};

  int32_t index = blockIdx.x, n_tile, m_tile;
  params.n_tiles.Divmod(index, &index, &n_tile);
  params.m_tiles.Divmod(index, &index, &m_tile);
  const int n_first = n_tile * Tile::kTileN;

  // `base`: the offset of the tile's batch, group and slice in the output; `rows`: the rows of the
  // GEMM.
  auto store_as = [&](auto* out, int64_t base, int32_t group, int n_from, int32_t rows,
                      auto dst_row) {
    using Out = std::remove_pointer_t<decltype(out)>;
    const auto epilogue =
        MakeEpilogue<typename Tag::Epilogue>(params.epilogue, params.slice_elements > 0);
    const int channel_first = group * gemm.gemm_n;
    if constexpr (!Tag::Epilogue::kPlain) {
      if (std::is_same_v<Out, T> && !epilogue.partial) {
        StoreFusedTile<Tile, kVec>(acc, out, epilogue.Whole(), dst_row, base, gemm.out_channels,
                                   n_from, gemm.gemm_n, channel_first);
        return;
      }
    }
    StoreTile<Tile, kVec>(acc, out + base, dst_row, gemm.out_channels, n_from, gemm.gemm_n);
    epilogue.FinishTile(m_tile * Tile::kTileM, min((m_tile + 1) * Tile::kTileM, rows),
                        channel_first + n_from,
                        channel_first + min(n_from + Tile::kTileN, gemm.gemm_n));
  };
  auto store = [&](int64_t base, int32_t group, int n_from, int32_t rows, auto dst_row) {
    if (std::is_same_v<T, float> || params.out_is_f32) {
      store_as(static_cast<float*>(params.out), base, group, n_from, rows, dst_row);
    } else {
      store_as(static_cast<T*>(params.out), base, group, n_from, rows, dst_row);
    }
  };

  if constexpr (kOp == Op::kWgrad) {
    __shared__ ReduceTable table;
    int32_t slice, z, batch, group;
    params.slices.Divmod(index, &z, &slice);
    gemm.groups_divmod.Divmod(z, &batch, &group);
    const int32_t slice_pixels = params.blocks_per_slice * kTileK;
    const int64_t first = int64_t{slice} * slice_pixels;
    const int64_t end = min(first + slice_pixels, int64_t{gemm.reduce_pixels});
    const int32_t m_first = m_tile * Tile::kTileM;
    TableLoader<T, Tile, kOp, kVec ? 4 : 1> loader(
        params, a + batch * gemm.a_batch + int64_t{group} * gemm.a_group,
        b + batch * gemm.b_batch + int64_t{group} * gemm.b_group, m_first, n_first,
        static_cast<int32_t>(min(first, end)), static_cast<int32_t>(end), stages[0], table);
    SimtMainloop<Tile>(loader, stages, acc);
    store(slice * params.slice_elements + batch * gemm.out_batch + int64_t{group} * gemm.out_group,
          group, n_first, gemm.gemm_m,
          [&](int row) { return m_first + row < gemm.gemm_m ? m_first + row : -1; });
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
    // Values that the mainloop does not need stay in shared memory instead of registers.
    store(tile.out, group, tile.n_first, ImplicitGemm::Rows(gemm.images, tile.phase),
          [&](int row) { return tile.dst_row[row]; });
  }
}

template <Op kOp_, DType kType, int kTileM, int kTileN, int kThreadN, int kWarpsM, int kWarpsN,
          int kLanesM, int kLanesN, int kCtasPerSm, bool kVec_>
struct TwoStage {
  static constexpr Op kOp = kOp_;
  static constexpr bool kVec = kVec_;
  using T = typename ElementOf<kType>::Type;
  using Tile = SimtTile<kTileM, kTileN, kThreadN, kWarpsM, kWarpsN, kLanesM, kLanesN, kCtasPerSm>;
  using Epilogue = PlainEpilogue;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchSlices<Tag, LaunchParams>(plan, operands, /*shared_bytes=*/0, stream,
                                           [&](const LaunchConfig& config, const Params& params) {
                                             return jaxconv::Launch<TwoStageKernel<Tag>>(
                                                 plan.kernel->name, config, stream, params);
                                           });
  }
};

}  // namespace jaxconv::igemm_simt

#endif  // JAXCONV_CUDA_IGEMM_SIMT_TWO_STAGE_CUH_
