// igemm_wmma: implicit GEMM on the tensor cores of every GPU since sm_80.
//
// Convolution -> GEMM (per batch, group and stride residue class; core/implicit_gemm.h has the
// algebra):
//     fprop  y[(n,p), k]   = sum over (r,c) of x[gather(n,p,r), c]  w[(r,c), k]
//     dgrad  dx[(n,i), c]  = sum over (r,k) of dy[gather(n,i,r), k] w[(r,c), k]
//     wgrad  dw[(r,c), k]  = sum over (n,p) of x[gather(n,p,r), c]  dy[(n,p), k]
// The reduction is one flat index, so a tap or a channel count that does not fill a stage wastes
// nothing; strided dgrad processes each residue class separately and multiplies no inserted zeros.
// f16 and bf16 use mma.sync.m16n8k16; f32 uses m16n8k8 in TF32 at precision "default", or three of
// them at any precision (3xtf32 instances, split_mainloop.cuh). All sums are float32.
//
// Tile: 128x256 or 256x128 outputs with 8 warps, 128x128 and 256x64 with 4, of 64x64 outputs a warp
// (3xtf32: of 64x32); 128x64 and 64x64 for small problems, 256x16 and 128x16 for few output
// channels (common/mma_tile.cuh has the swizzle). Shared memory: 3 stages of (tile_m + tile_n) x
// 128 bytes (256x64: 4 of 64), 147,456 bytes at 128x256, 98,304 at 128x128, 73,728 at 128x64,
// 49,152 at 64x64, plus 1 to 5 KB of row, pixel and tap tables. Registers, 64x64 a warp: 128
// accumulators, 64 fragments (two mma steps), 16 for the rows' pixels and tap masks; at most 255.
//
// Synchronisation: cp.async fills stage s + 2 between the MMAs of stage s. Before the last step of
// stage s a thread waits for its copies of stage s + 1. After the following barrier, all copies
// have arrived and stage s is in registers. Addresses are computed one stage ahead.
//
// Bound by mma.sync, whose throughput on Hopper is two thirds of wgmma's, and by shared memory: at
// that throughput, warp tiles of 64x64 read 85 of 128 bytes a cycle, and the copies write 32 to 43
// more.
//
// Copies have 16 bytes if the channels allow, 8 in align8 instances; b_align2 copies B, and align2
// both operands, at any width, with single 16-bit elements through registers. The other operation's
// kernel reads a filter stored as (k, r, c), because strides are parameters. Split-K, in all three
// operations: slices write float32 partial results, and common/splitk_reduce.cuh adds them in
// order.
//
// Why not nvcuda::wmma: docs/notes/igemm_wmma.md.
//
// Refuses: operand types other than f32, f16, bf16 or unequal; f32 above precision "default",
// except in 3xtf32 instances; outputs other than the operand type or f32; wgrad with lhs_dilation;
// filters whose extents (of a residue class) add up to more than 31; more than 64 taps, or channel
// counts that do not suit the copies, except in align2 instances; fprop with lhs_dilation in 8-warp
// tiles. After: "Implicit GEMM convolution with WMMA" (seeds/000).
#ifndef JAXCONV_CUDA_IGEMM_WMMA_MULTISTAGE_CUH_
#define JAXCONV_CUDA_IGEMM_WMMA_MULTISTAGE_CUH_

#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/splitk_reduce.cuh"
#include "cuda/igemm_wmma/async_loader.cuh"
#include "cuda/igemm_wmma/gather_pixel.cuh"
#include "cuda/igemm_wmma/params.h"
#include "cuda/igemm_wmma/split_mainloop.cuh"
#include "cuda/igemm_wmma/store_accumulators.cuh"

namespace jaxconv::igemm_wmma {

// kDilated: fprop with lhs_dilation, where each residue class has its own taps.
template <class Tag, bool kDilated>
__global__ void __launch_bounds__(Tag::Tile::kThreads, Tag::Tile::kMinBlocks)
    MultistageKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  using Tile = typename Tag::Tile;
  constexpr Op kOp = Tag::kOp;
  using OperandA = OperandTile<T, Tile::kTileM, Tile::kTileKBytes, kOp == Op::kWgrad>;
  using OperandB = OperandTile<T, Tile::kTileN, Tile::kTileKBytes, kOp != Op::kDgrad>;
  using Loader = AsyncLoader<kOp, T, Tile, OperandA, OperandB, Tag::kCopyA, Tag::kCopyB, kDilated>;
  extern __shared__ __align__(1024) unsigned char stages[];
  __shared__ typename Loader::Shared shared;
  const ImplicitGemm& gemm = params.gemm;

  int32_t index = blockIdx.x, n_tile, m_tile, slice, z, batch, group;
  params.n_tiles.Divmod(index, &index, &n_tile);
  params.m_tiles.Divmod(index, &index, &m_tile);
  params.slices.Divmod(index, &index, &slice);
  params.batch_groups.Divmod(index, &index, &z);
  gemm.groups_divmod.Divmod(z, &batch, &group);
  if (threadIdx.x < 3) shared.phase[threadIdx.x] = gemm.PhaseOfAxis(index, threadIdx.x);
  __syncthreads();
  GemmTile<T> tile;
  tile.rows = kOp == Op::kWgrad ? gemm.gemm_m : ImplicitGemm::Rows(gemm.images, shared.phase);
  tile.m_first = m_tile * Tile::kTileM;
  tile.n_first = n_tile * Tile::kTileN;
  if (tile.m_first >= tile.rows) return;
  const int32_t reduction = kOp == Op::kWgrad
                                ? gemm.reduce_pixels
                                : ImplicitGemm::TapCount(shared.phase) * gemm.reduce_channels;
  const int32_t slice_length = params.blocks_per_slice * Loader::kTileK;
  tile.k_begin = static_cast<int32_t>(min(int64_t{slice} * slice_length, int64_t{reduction}));
  tile.k_end = static_cast<int32_t>(min(int64_t{tile.k_begin} + slice_length, int64_t{reduction}));
  tile.a = static_cast<const T*>(params.a) + batch * gemm.a_batch + int64_t{group} * gemm.a_group;
  tile.b = static_cast<const T*>(params.b) + batch * gemm.b_batch + int64_t{group} * gemm.b_group;

  float acc[Tile::kBlocksM][Tile::kBlocksN][4] = {};
  {
    Loader loader(params, tile, shared);
    const int blocks = (tile.k_end - tile.k_begin + Loader::kTileK - 1) / Loader::kTileK;
    if constexpr (Tag::kThreeTf32) {
      SplitMainloop<Tile, OperandA, OperandB>(loader, SharedAddress(stages), blocks, acc);
    } else {
      MmaMainloop<T, Tile, OperandA, OperandB>(loader, SharedAddress(stages), blocks, acc);
    }
  }

  auto dst_row = [&](int row) -> int32_t {
    if constexpr (kOp != Op::kWgrad) return shared.dst[row];
    return tile.m_first + row < tile.rows ? tile.m_first + row : -1;
  };
  const int channel_first = group * gemm.gemm_n;
  const auto epilogue =
      MakeEpilogue<typename Tag::Epilogue>(params.epilogue, params.slice_elements > 0);
  auto store = [&](auto* out) {
    const int64_t base =
        slice * params.slice_elements + batch * gemm.out_batch + int64_t{group} * gemm.out_group;
    using Out = std::remove_pointer_t<decltype(out)>;
    if constexpr (!Tag::Epilogue::kPlain) {
      if (std::is_same_v<Out, T> && !epilogue.partial) {
        StoreFusedAccumulators<Out, Tile>(acc, SharedAddress(stages), out, epilogue.Whole(),
                                          dst_row, base, gemm.out_channels, tile.n_first,
                                          gemm.gemm_n, channel_first, params.out_vector);
        return;
      }
    }
    StoreAccumulators<Out, Tile>(acc, SharedAddress(stages), out, PlainEpilogue(params.epilogue),
                                 dst_row, base, gemm.out_channels, tile.n_first, gemm.gemm_n,
                                 channel_first, params.out_vector);
  };
  if (std::is_same_v<T, float> || params.out_is_f32) {
    store(static_cast<float*>(params.out));
  } else {
    store(static_cast<T*>(params.out));
  }
  epilogue.FinishTile(tile.m_first, min(tile.m_first + Tile::kTileM, tile.rows),
                      channel_first + tile.n_first,
                      channel_first + min(tile.n_first + Tile::kTileN, gemm.gemm_n));
}

template <Op kOp_, DType kType, int kTileM, int kTileN, int kTileKBytes, int kWarpsM, int kWarpsN,
          int kStages, int kCtasPerSm, int kCopyBytesA, int kCopyBytesB>
struct Multistage {
  static constexpr Op kOp = kOp_;
  static constexpr int kCopyA = kCopyBytesA, kCopyB = kCopyBytesB;
  using T = typename ElementOf<kType>::Type;
  using Tile = MmaTile<kTileM, kTileN, kTileKBytes, kWarpsM, kWarpsN, kStages, kCtasPerSm>;
  using Epilogue = PlainEpilogue;
  static constexpr bool kThreeTf32 = false;
  static constexpr int kSharedBytes = kStages * Tile::kStageBytes;
  static_assert(kStagingBytes<Tile> * Tile::kThreads / 32 <= kSharedBytes);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchSlices<Tag, LaunchParams>(plan, operands, kSharedBytes, stream,
                                           [&](const LaunchConfig& config, const Params& params) {
                                             return LaunchKernel<Tag>(plan.kernel->name, config,
                                                                      stream, params);
                                           });
  }

 private:
  template <class Tag>
  static Status LaunchKernel(const char* name, const LaunchConfig& config, void* stream,
                             const Params& params) {
    // Eight-warp tiles lack registers for the taps of residue classes, so the plan refuses them.
    if constexpr (kOp == Op::kFprop && Tile::kThreads == 128) {
      if (!params.all_taps) {
        return jaxconv::Launch<MultistageKernel<Tag, true>>(name, config, stream, params);
      }
    }
    return jaxconv::Launch<MultistageKernel<Tag, false>>(name, config, stream, params);
  }
};

// Float32 operands as three TF32 products.
template <Op kOp, DType kType, int... kArguments>
struct Multistage3xTf32 : Multistage<kOp, kType, kArguments...> {
  static_assert(kType == DType::kF32);
  static constexpr bool kThreeTf32 = true;
};

}  // namespace jaxconv::igemm_wmma

#endif  // JAXCONV_CUDA_IGEMM_WMMA_MULTISTAGE_CUH_
