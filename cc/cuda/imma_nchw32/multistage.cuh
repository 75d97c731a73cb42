// imma_nchw32: implicit GEMM of 8-bit operands on the tensor cores of every GPU since sm_80.
//
//     y[(n,p), k] = requantise(sum over l of x[gather(n,p,l)] w[k, l])
//
// rows are output pixels, columns output channels of a group, and l runs along the packed filter's
// row: over (r, s, c) in nhwc, over (c / 32, r, s, c % 32) in nchw32. The layouts differ in strides
// and in the order of two loops (params.h); one kernel serves both. x is s8 or u8, w s8, sums are
// int32, by mma.sync.m16n8k32. The reduction is flat, so a tap or a channel count that does not
// fill a k-block wastes nothing. The taps' offsets come from a table in the parameter block.
//
// Tile: up to 128x256 outputs, 64x64 of them a warp, k-blocks of 64 or 128 bytes
// (common/mma_tile.cuh has the swizzle). Shared memory: 3 or 4 stages of (tile_m + tile_n)
// k-blocks, 147,456 bytes at 128x256x128, 98,304 at 128x128x128, 49,152 at 128x64x64, and 8 bytes a
// row for the pixels. Registers, 64x64 a warp: 128 sums, 64 for fragments (two mma steps), 2 for
// each row that a thread copies; at most 255.
//
// Synchronisation: MmaMainloop of common/mma_tile.cuh. The epilogue needs none: the copy to shared
// memory permutes the filter's rows so that a thread holds 8 neighbouring channels of a pixel,
// which it requantises and stores as 8 bytes (8-bit results); a quad stores a block of 32 channels,
// and in nchw32 a warp stores 256 contiguous bytes.
//
// Refuses: channels of a group that are not multiples of 32, except x of 4 channels (copies of 4
// bytes); windows of more than 256 taps, or of more than 31 tap coordinates on padded axes;
// lhs_dilation; several batches. After: "TensorCore convolution operators in MegEngine"
// (seeds/003).
#ifndef JAXCONV_CUDA_IMMA_NCHW32_MULTISTAGE_CUH_
#define JAXCONV_CUDA_IMMA_NCHW32_MULTISTAGE_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/requantize.cuh"
#include "cuda/imma_nchw32/loaders.cuh"
#include "cuda/imma_nchw32/params.h"
#include "cuda/ptx/lane.cuh"

namespace jaxconv::imma_nchw32 {

// Stores the warp's sums and destroys them.
template <class Tile>
__device__ __forceinline__ void StoreTile(const RequantizeParams& params,
                                          int32_t (&acc)[Tile::kBlocksM][Tile::kBlocksN][4],
                                          int32_t m_first, int32_t m_end, int32_t channel_first,
                                          int32_t channel_end) {
  constexpr int kBlocks = Tile::kBlocksN / 4;  // of 32 channels
  // The lane is recomputed each time; otherwise the compiler would keep all addresses of the tile
  // at once.
  auto pixels_of = [&](int block, auto& pixels) {
    const int32_t row = m_first + Tile::WarpM() + Lane() / 4;
#pragma unroll
    for (int r = 0; r < std::extent_v<std::remove_reference_t<decltype(pixels)>>; ++r) {
      const int32_t m = row + block * 16 + r * 8;
      pixels[r] = OutputPixel(params, m, m < m_end);
    }
  };
  auto channel_of = [&](int block) {
    return channel_first + Tile::WarpN() + block * 32 + Lane() % 4 * 8;
  };
  ForRequantizePath(params, [&](auto path) {
    constexpr RequantizePath kPath = decltype(path)::value;
    if constexpr (kPath == RequantizePath::kGeneral) {
      // One copy of the code: the sums move through it, 16 at a time.
      int32_t (&sums)[Tile::kBlocksM * kBlocks * 16] =
          reinterpret_cast<int32_t (&)[Tile::kBlocksM * kBlocks * 16]>(acc);
      const Residual<2> none{};
#pragma unroll 1
      for (int i = 0; i < Tile::kBlocksM * kBlocks; ++i) {
        const int32_t channel = channel_of(i % kBlocks);
        OutputPixel pixels[2];
        pixels_of(i / kBlocks, pixels);
        RequantizeEight<kPath>(params, pixels, channel, channel < channel_end, GlobalTerms{params},
                               none, [&](int r, int e) { return sums[e / 2 * 4 + r * 2 + e % 2]; });
#pragma unroll
        for (int s = 0; s + 16 < Tile::kBlocksM * kBlocks * 16; ++s) sums[s] = sums[s + 16];
      }
    } else {
      constexpr int kPixels = 4;  // pixels of this thread at a time
#pragma unroll
      for (int i = 0; i < Tile::kBlocksM; i += kPixels / 2) {
        // This branch keeps the compiler from moving code across it, which would spill registers.
        if (m_first + Tile::WarpM() + i * 16 >= m_end) break;
        OutputPixel pixels[kPixels];
        pixels_of(i, pixels);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const int32_t channel = channel_of(block);
          const bool inside = channel < channel_end;
          Residual<kPixels> residual;
          if constexpr (HasResidual(kPath)) {
            LoadResidual(params, pixels, channel, inside, &residual);
          }
          RequantizeEight<kPath>(
              params, pixels, channel, inside, GlobalTerms{params}, residual,
              [&](int r, int e) { return acc[i + r / 2][block * 4 + e / 2][r % 2 * 2 + e % 2]; });
        }
      }
    }
  });
}

template <class Tag>
__global__ void __launch_bounds__(Tag::Tile::kThreads, Tag::Tile::kMinBlocks)
    MultistageKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  using Tile = typename Tag::Tile;
  using OperandA = OperandTile<T, Tile::kTileM, Tile::kTileKBytes, false>;
  using OperandB = OperandTile<T, Tile::kTileN, Tile::kTileKBytes, false>;
  using LoaderA = GatherLoader<Tile, OperandA, Tag::kCopyA>;
  using LoaderB = FilterLoader<Tile, OperandB>;
  extern __shared__ __align__(1024) unsigned char stages[];
  __shared__ GatherPixel table[Tile::kTileM];

  int32_t index = blockIdx.x, n_tile, group;
  params.n_tiles.Divmod(index, &index, &n_tile);
  params.groups.Divmod(index, &index, &group);
  const int32_t m_first = index * Tile::kTileM, n_first = n_tile * Tile::kTileN;
  for (int r = threadIdx.x; r < Tile::kTileM; r += Tile::kThreads) {
    table[r] = LocatePixel(params, m_first + r);
  }
  __syncthreads();

  int32_t acc[Tile::kBlocksM][Tile::kBlocksN][4] = {};
  {
    Loader<Tile, LoaderA, LoaderB> loader{LoaderA(params, group, table),
                                          LoaderB(params, group, n_first)};
    MmaMainloop<T, Tile, OperandA, OperandB>(loader, SharedAddress(stages), params.k_blocks, acc);
  }
  const int32_t channel_first = group * params.channels;
  StoreTile<Tile>(params.epilogue, acc, m_first, params.rows, channel_first + n_first,
                  channel_first + params.channels);
}

// kCopyBytes: 16, or 4 if x has 4 channels.
template <Op kOp, DType kType, int kTileM, int kTileN, int kTileKBytes, int kWarpsM, int kWarpsN,
          int kStages, int kCtasPerSm, int kCopyBytes>
struct Multistage {
  static constexpr int kCopyA = kCopyBytes;
  using T = std::conditional_t<kType == DType::kU8, uint8_t, int8_t>;
  using Tile = MmaTile<kTileM, kTileN, kTileKBytes, kWarpsM, kWarpsN, kStages, kCtasPerSm>;
  static_assert(kOp == Op::kFprop && Tile::kWarpN % 32 == 0);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<LaunchParams>();
    Params params = launch.kernel;
    params.x = operands.lhs;
    params.w = operands.rhs;
    BindRequantize(operands, &params.epilogue);
    LaunchConfig config;
    config.grid = static_cast<unsigned>(launch.ctas);
    config.threads = Tile::kThreads;
    config.shared_bytes = kStages * Tile::kStageBytes;
    return jaxconv::Launch<MultistageKernel<Tag>>(plan.kernel->name, config, stream, params);
  }
};

}  // namespace jaxconv::imma_nchw32

#endif  // JAXCONV_CUDA_IMMA_NCHW32_MULTISTAGE_CUH_
