// igemm_wmma: implicit GEMM on the tensor cores of every GPU since sm_80.
//
// Convolution -> GEMM (per batch, group and phase; core/implicit_gemm.h has the algebra):
//     fprop  y[(n,p), k]   = sum over (r,c) of x[gather(n,p,r), c]  w[(r,c), k]
//     dgrad  dx[(n,i), c]  = sum over (r,k) of dy[gather(n,i,r), k] w[(r,c), k]
//     wgrad  dw[(r,c), k]  = sum over (n,p) of x[gather(n,p,r), c]  dy[(n,p), k]
// The reduction is one flat index, so a tap or a channel count that does not fill a stage wastes
// nothing; strided dgrad runs phase by phase and multiplies no inserted zero. f16 and bf16 go
// through mma.sync.m16n8k16, f32 at precision "default" through m16n8k8 in TF32, all summed in
// float32.
//
// Tile: 128x256 or 256x128 outputs with 8 warps, 128x128 and 256x64 with 4, of 64x64 outputs a
// warp; 128x64 and 64x64 for small problems, 256x16 and 128x16 for few columns (device/mma_tile.cuh
// has the swizzle). Shared memory: 3 stages of (tile_m + tile_n) x 128 bytes (256x64: 4 of 64),
// 147456 bytes at 128x256, 98304 at 128x128, 73728 at 128x64, 49152 at 64x64, plus 1 to 5 KB of
// row, pixel and tap tables. Registers, 64x64: 128 accumulators, 64 fragments (two steps), 16 for
// the rows' pixels and tap bits; at most 255.
//
// Who waits for whom: cp.async fills stage s + 2 between the multiplications of stage s; before the
// last step of stage s a thread waits for its copies of stage s + 1, and one barrier says that all
// have arrived and that stage s is in registers. Addresses of a stage are looked up a stage ahead.
//
// Copies are 16 bytes where the channels allow, 8 in "half" instances; "thin" ones copy any width
// of B, "narrow" ones of both, elements of an odd count of 16-bit channels through registers. Few
// channels have kernels of their own in igemm_wmma_patch.cuh.
// A filter stored as (k, r, c) is read by the other operation's kernel: strides are parameters.
// Split-K, in all three operations: slices write float32 partial results, splitk_reduce.cu adds
// them in order.
//
// Why not nvcuda::wmma: on resident operands, 64x64 a warp, 8 warps an SM of an H200, its fragments
// load rows padded by 16 bytes without conflicts and reach 361 TF/s (unpadded 117); mma.sync with
// ldmatrix on swizzled rows reaches 620, transposed or not.
//
// Refuses: operand types other than f32, f16, bf16 or unequal; f32 above precision "default";
// outputs other than the operand type or f32; wgrad with lhs_dilation; filters whose extents (of a
// phase) add up to more than 31; more than 64 taps or channel counts that do not suit the copies,
// except in narrow instances; fprop with lhs_dilation in 8-warp tiles. After: "Implicit GEMM
// convolution with WMMA" (seeds/000).
#ifndef JAXCONV_CUDA_KERNELS_IGEMM_WMMA_CUH_
#define JAXCONV_CUDA_KERNELS_IGEMM_WMMA_CUH_

#include <string>
#include <type_traits>

#include "cuda/device/async_loaders.cuh"
#include "cuda/device/element.cuh"
#include "cuda/device/fused_epilogue.cuh"
#include "cuda/device/igemm_wmma_params.h"
#include "cuda/device/mma_tile.cuh"
#include "cuda/kernels/igemm_wmma.h"

namespace jaxconv {

template <WmmaTileId kTile>
struct WmmaTileOf;
//                        tile m, n, bytes of k, warps m, n, stages, CTAs a multiprocessor
template <>
struct WmmaTileOf<WmmaTileId::k128x256> : MmaTile<128, 256, 128, 2, 4, 3, 1> {};
template <>
struct WmmaTileOf<WmmaTileId::k256x128> : MmaTile<256, 128, 128, 4, 2, 3, 1> {};
template <>
struct WmmaTileOf<WmmaTileId::k128x128> : MmaTile<128, 128, 128, 2, 2, 3, 2> {};
template <>
struct WmmaTileOf<WmmaTileId::k256x64> : MmaTile<256, 64, 64, 4, 1, 4, 2> {};
template <>
struct WmmaTileOf<WmmaTileId::k128x64> : MmaTile<128, 64, 128, 2, 2, 3, 3> {};
template <>
struct WmmaTileOf<WmmaTileId::k64x64> : MmaTile<64, 64, 128, 2, 2, 3, 4> {};
template <>
struct WmmaTileOf<WmmaTileId::k256x16> : MmaTile<256, 16, 128, 4, 1, 3, 2> {};
template <>
struct WmmaTileOf<WmmaTileId::k128x64Half> : MmaTile<128, 64, 128, 2, 2, 3, 2> {};
template <>
struct WmmaTileOf<WmmaTileId::k256x16ThinB> : MmaTile<256, 16, 128, 4, 1, 3, 2> {};
template <>
struct WmmaTileOf<WmmaTileId::k128x64Narrow> : MmaTile<128, 64, 64, 2, 2, 3, 2> {};
template <>
struct WmmaTileOf<WmmaTileId::k128x16Narrow> : MmaTile<128, 16, 128, 4, 1, 3, 2> {};

// Bytes of one copy.
template <WmmaTileId kTile>
inline constexpr int kCopyOfA =
    kTile == WmmaTileId::k128x64Half                                           ? 8
    : kTile == WmmaTileId::k128x64Narrow || kTile == WmmaTileId::k128x16Narrow ? kAnyCopy
                                                                               : 16;
template <WmmaTileId kTile>
inline constexpr int kCopyOfB = kTile == WmmaTileId::k256x16ThinB ? kAnyCopy : kCopyOfA<kTile>;

template <Op kOp, typename T, WmmaTileId kTile, bool kPhased, class Epilogue>
__global__ void __launch_bounds__(WmmaTileOf<kTile>::kThreads, WmmaTileOf<kTile>::kMinBlocks)
    IgemmWmma(const __grid_constant__ IgemmWmmaParams params) {
  using Tile = WmmaTileOf<kTile>;
  using OperandA = OperandTile<T, Tile::kTileM, Tile::kTileKBytes, kOp == Op::kWgrad>;
  using OperandB = OperandTile<T, Tile::kTileN, Tile::kTileKBytes, kOp != Op::kDgrad>;
  using Loader =
      AsyncLoader<kOp, T, Tile, OperandA, OperandB, kCopyOfA<kTile>, kCopyOfB<kTile>, kPhased>;
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
  WmmaTile<T> tile;
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
    MmaMainloop<T, Tile, OperandA, OperandB>(
        loader, SharedAddress(stages),
        (tile.k_end - tile.k_begin + Loader::kTileK - 1) / Loader::kTileK, acc);
  }

  auto dst_row = [&](int row) -> int32_t {
    if constexpr (kOp != Op::kWgrad) return shared.dst[row];
    return tile.m_first + row < tile.rows ? tile.m_first + row : -1;
  };
  const Epilogue epilogue(params.epilogue);
  auto store = [&](auto* out) {
    StoreAccumulators<std::remove_pointer_t<decltype(out)>, Tile>(
        acc, SharedAddress(stages), out, epilogue, dst_row,
        slice * params.slice_elements + batch * gemm.out_batch + int64_t{group} * gemm.out_group,
        gemm.out_channels, tile.n_first, gemm.gemm_n, group * gemm.gemm_n, params.out_vector);
  };
  if (std::is_same_v<T, float> || params.out_is_f32) {
    store(static_cast<float*>(params.out));
  } else {
    store(static_cast<T*>(params.out));
  }
}

template <Op kOp, DType kType, WmmaTileId kTile, class Epilogue = PlainEpilogue>
Status LaunchIgemmWmmaWith(const IgemmWmmaParams& params, int64_t ctas, void* stream) {
  using T = typename ElementOf<kType>::Type;
  using Tile = WmmaTileOf<kTile>;
  constexpr int kSharedBytes = Tile::kStages * Tile::kStageBytes;
  static_assert(kStagingBytes<Tile> * Tile::kThreads / 32 <= kSharedBytes);
  auto kernel = IgemmWmma<kOp, T, kTile, false, Epilogue>;
  // Eight-warp tiles have no registers left for the taps of phases.
  if constexpr (kOp == Op::kFprop && Tile::kThreads == 128) {
    if (!params.all_taps) kernel = IgemmWmma<kOp, T, kTile, true, Epilogue>;
  }
  // More than 48 KB must be asked for. Once a device would do; it costs less than a microsecond.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess) {
    kernel<<<static_cast<unsigned>(ctas), Tile::kThreads, kSharedBytes,
             static_cast<cudaStream_t>(stream)>>>(params);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) {
    cudaGetLastError();
    return Status::Internal(std::string("igemm_wmma: ") + cudaGetErrorString(error));
  }
  return {};
}

template <Op kOp, DType kType, WmmaTileId kTile>
Status LaunchIgemmWmma(const IgemmWmmaParams& params, int64_t ctas, void* stream) {
  return LaunchIgemmWmmaWith<kOp, kType, kTile>(params, ctas, stream);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_IGEMM_WMMA_CUH_
