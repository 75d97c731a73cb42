// few_channels, wgrad: dw[(r,s,c), k] = sum over (n, p, q) of x[n, p stride + r, q stride + s, c]
// dy[(n,p,q), k], for input channels too few for asynchronous copies.
//
// GEMM: rows are (r, s, c), the reduction runs over pixels, columns are output channels. For 16-bit
// elements a word of a fragment of A is a pair of pixels that are neighbours in a row of y. The
// halo tile of x is therefore sorted by channel and by the column modulo the stride, so that the
// pair is one word. Pixels at odd positions read a copy of the halo tile that is shifted by one
// element. In float32 a word is one pixel, and the halo tile has the order of x.
//
// Tile: 32, 64 or 192 rows (float32: 160) by 64 output channels, 4 warps. The reduction advances by
// 128 pixels (8 blocks of 16); CTA b processes pixel tiles b, b + gridDim.x, ... as its split-K
// slice. Shared memory, at most 100 KB (float32: 200): two halo tiles, two tiles of dy of 16 KB
// (32), and for 16-bit elements a table of positions. Registers: 32 accumulators (192 rows: 96,
// 160: 80), 16 fragments, at most 102 (168, 255).
//
// Bank conflicts of float32: a fragment has 8 rows of dw, mostly 8 neighbouring words, of four
// pixels that are stride * C words apart. Choosing pixels with a distance of 1, 2 or 4
// (SpreadPixel) puts the four into different banks; the rows of dy are stored in the same order.
//
// Synchronisation: one barrier for each tile. cp.async copies dy of the next pixel tile, and also
// its halo, or the halo is copied in parts through registers between k-blocks. If warps share the
// pixels of a tile (32 rows), their sums are added in order in shared memory at the end.
// common/splitk_reduce.cuh adds the slices, even a single one: the kernel stores only float32 sums.
//
// Refuses: operands or results other than f16, bf16 or f32; groups; lhs_dilation; rank 3; K whose
// rows are not multiples of 16 bytes; halo tiles beyond the shared memory.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_WGRAD_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_WGRAD_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/split_tf32.cuh"
#include "cuda/common/splitk_reduce.cuh"
#include "cuda/common/two_buffers.cuh"
#include "cuda/few_channels/halo_loader.cuh"
#include "cuda/few_channels/params.h"
#include "cuda/few_channels/window_rows.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::few_channels {

// The row in a tile of dy of a pixel in a block of 16, in the order in which the steps read them.
template <typename T>
__device__ __forceinline__ int32_t RowOfPixel(const Params& params, int32_t pixel) {
  if constexpr (sizeof(T) == 2) return pixel;
  const int32_t spread = params.log2_spread, lane = pixel >> spread;
  return ((lane / 4 << spread) + (pixel & ((1 << spread) - 1))) * 4 + lane % 4;
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    WgradKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  constexpr int kWarpsM = Tag::kWarpsM, kWarpsN = Tag::kWarpsN, kWarpsK = Tag::kWarpsK;
  constexpr int kBlocksM = Tag::kBlocksM;
  using Gradient = RowMatrix<T>;
  constexpr int kRows = kWarpsM * kBlocksM * 16;
  constexpr int kBlocksN = 8 / kWarpsN;
  constexpr int kPixels = kTilePixels;
  constexpr int kGradientBytes = kPixels * Gradient::kRowBytes;
  static_assert(kWarpsM * kWarpsN * kWarpsK * 32 == kThreads);
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* halo = shared + 2 * kGradientBytes;
  int32_t rest, n_part, m_part, batch;
  params.column_parts.Divmod(blockIdx.y, &rest, &n_part);
  params.row_parts.Divmod(rest, &batch, &m_part);
  const int n_first = n_part * 64, m_first = m_part * kRows;
  using Source = std::conditional_t<
      sizeof(T) == 4, WordHalo<kBlocksM>,
      std::conditional_t<Tag::kByChunks, PlainHalo<T, kBlocksM>, SortedHalo<T, kBlocksM>>>;
  // Whether cp.async copies the halo tile.
  constexpr bool kAsync = Tag::kByChunks || sizeof(T) == 4;
  // MMA steps for a block of 16 pixels, and the part of it that one pass of the threads copies.
  constexpr int kSteps = 8 * int{sizeof(T)} / 16;
  constexpr int kPassPixels = kThreads / Gradient::kChunks;
  const T* x = static_cast<const T*>(params.lhs) + batch * params.lhs_batch;
  const T* dy = static_cast<const T*>(params.rhs) + batch * params.rhs_batch;
  const int32_t pixel_of_thread = threadIdx.x / Gradient::kChunks;
  uint32_t gradient[16 / kPassPixels];
#pragma unroll
  for (int pass = 0; pass < 16 / kPassPixels; ++pass) {
    gradient[pass] = SharedAddress(shared) +
                     Gradient::Offset(RowOfPixel<T>(params, pass * kPassPixels + pixel_of_thread),
                                      threadIdx.x % Gradient::kChunks);
  }
  const int n_of_thread = n_first + threadIdx.x % Gradient::kChunks * kChunkElements<T>;
  const int32_t k_bytes = params.k * int32_t{sizeof(T)};
  auto load_gradient = [&](const PixelTile& tile, int buffer) {
    const T* image =
        dy + int64_t{tile.image} * (params.rows.out * params.columns.out) * params.k + n_of_thread;
#pragma unroll
    for (int u = 0; u < kPixels / 16; ++u) {
      const int32_t down = u >> params.log2_across;
      const int32_t p = tile.row + down;
#pragma unroll
      for (int pass = 0; pass < 16 / kPassPixels; ++pass) {
        const int32_t q = tile.column + (u - (down << params.log2_across)) * 16 +
                          pass * kPassPixels + pixel_of_thread;
        const bool valid = p < params.rows.out && q < params.columns.out && n_of_thread < params.k;
        CopyAsync<16>(gradient[pass] + buffer * kGradientBytes + u * 16 * Gradient::kRowBytes,
                      OffsetBytes(image, p * params.columns.out + q, k_bytes), valid);
      }
    }
    CopyAsyncCommit();
  };

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_m = threadIdx.x / 32 / (kWarpsN * kWarpsK);
  const int warp_k = threadIdx.x / 32 / kWarpsN % kWarpsK;
  const int warp_column = threadIdx.x / 32 % kWarpsN * kBlocksN * 8;
  Source source(params, x, halo, m_first + warp_m * kBlocksM * 16);
  const FragmentReader<T, Gradient, true> reader(SharedAddress(shared), warp_column);

  float acc[kBlocksM][kBlocksN][4] = {};
  TwoBuffers<PixelTile> walk(params);
  // A k-block of 16 pixels.
  auto multiply = [&](int32_t k_block, int buffer) {
    const int32_t down = k_block >> params.log2_across;
    const int32_t column = (k_block - (down << params.log2_across)) * 16;
    // Pixels outside y: their gradients are zero, but their x may be NaN.
    const int32_t left = params.columns.out - walk.tile.column - column;
    if (walk.tile.row + down >= params.rows.out || left <= 0) return;
    auto rows = [&](auto whole) {
      // Mask of the pixels of a word that are inside y.
      uint32_t mask[kSteps][2];
#pragma unroll
      for (int e = 0; e < kSteps * 2; ++e) {
        uint32_t& word = mask[e / 2][e % 2];
        if constexpr (decltype(whole)::value) {
          word = 0xffffffffu;
        } else if constexpr (sizeof(T) == 4) {
          word = SpreadPixel<2>(e, t, params.log2_spread) < left ? 0xffffffffu : 0;
        } else {
          const int32_t pair_left = left - e * 8 - t * 2;
          word = pair_left >= 2 ? 0xffffffffu : pair_left == 1 ? 0xffffu : 0;
        }
      }
      const uint32_t offset = source.Offset(buffer, down, column);
      auto read_a = [&](int step, int i, uint32_t (&a)[4]) {
        source.Fragment(i, step, offset, a);
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] &= step == 0 ? mask[0][e / 2] : mask[kSteps - 1][e / 2];
      };
      auto read_b = [&](int step, uint32_t (&b)[kBlocksN / 2][4]) {
        reader.Read((buffer * (kPixels / 16) + k_block) * kSteps + step, b);
      };
      if constexpr (Tag::kThreeTf32) {
        static_assert(kSteps == kSplitRunSteps);
        uint32_t a[kSteps][4], b[kSteps][kBlocksN][2];
        auto read_pairs = [&](int step, uint32_t (&to)[kBlocksN][2]) {
          uint32_t quads[kBlocksN / 2][4];
          read_b(step, quads);
#pragma unroll
          for (int j = 0; j < kBlocksN; ++j) {
            to[j][0] = quads[j / 2][j % 2 * 2];
            to[j][1] = quads[j / 2][j % 2 * 2 + 1];
          }
        };
        auto read_block = [&](int i, uint32_t (&to)[kSteps][4]) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) read_a(step, i, to[step]);
        };
#pragma unroll
        for (int step = 0; step < kSteps; ++step) read_pairs(step, b[step]);
        read_block(0, a);
        const uint32_t again = MultiplySplitRun(b, a, acc, read_block, [](auto) {});
        if (__any_sync(0xffffffff, again != 0)) {
          PromoteWithCare(again, acc, [&](int step, auto& of_a, auto& of_b) {
#pragma unroll
            for (int i = 0; i < kBlocksM; ++i) read_a(step, i, of_a[i]);
            read_pairs(step, of_b);
          });
        }
      } else {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          uint32_t b[kBlocksN / 2][4];
          read_b(step, b);
          RoundFragments<T>(b);
#pragma unroll
          for (int i = 0; i < kBlocksM; ++i) {
            uint32_t a[4];
            read_a(step, i, a);
            RoundFragment<T>(a);
#pragma unroll
            for (int j = 0; j < kBlocksN; ++j) {
              MultiplyAdd<T>(acc[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
          }
        }
      }
    };
    if (kAsync && left >= 16) {
      rows(std::true_type());
    } else {
      rows(std::false_type());
    }
  };
  if (walk.index < params.tiles) {
    load_gradient(walk.tile, 0);
    source.LoadFirst(walk.tile);
  }
  while (walk.index < params.tiles) {
    CopyAsyncWait<0>();
    __syncthreads();
    const int buffer = walk.buffer, other = walk.Other(1);
    const PixelTile next(params, walk.NextIndex());
    const bool more = walk.NextIndex() < params.tiles;
    if (more) load_gradient(next, other);
    if constexpr (kAsync) {
      if (more) source.Load(next, other);
#pragma unroll 1
      for (int k_block = warp_k; k_block < kPixels / 16; k_block += kWarpsK) {
        multiply(k_block, buffer);
      }
    } else {
      HaloLoader<T>& loader = source.loader;
      if (more) loader.Begin(next);
      int k_block = warp_k;
      // The next halo tile is copied in parts, each during the products of some k-blocks.
      do {
        if (loader.More()) loader.Load();
        const int end = loader.Last()
                            ? kPixels / 16
                            : min(kPixels / 16, k_block + params.blocks_per_fetch * kWarpsK);
#pragma unroll 1
        for (; k_block < end; k_block += kWarpsK) multiply(k_block, buffer);
        if (loader.More()) source.Store(other);
      } while (loader.More() || k_block < kPixels / 16);
    }
    walk.Advance(next, 1);
  }

  float* out =
      static_cast<float*>(params.out) + blockIdx.x * params.out_elements + batch * params.out_batch;
  // The position of column 0 of a row of dw, and the distance between columns.
  const int32_t step = Tag::kNarrow ? params.c : 1;
  auto row_of = [&](int32_t m) -> float* {
    if constexpr (!Tag::kNarrow) return out + int64_t{m} * params.k;
    // dw is (tap, column, c), from its last tap on.
    int32_t tap, channel;
    params.c_divmod.Divmod(m, &tap, &channel);
    tap = params.rows.filter * params.columns.filter - 1 - tap;
    return out + int64_t{tap} * params.k * params.c + channel;
  };
  if constexpr (kWarpsK > 1) {
    // Adds the warps' sums in order through shared memory.
    static_assert(kWarpsK * kRows * 64 * 4 <= 2 * kGradientBytes);
    auto* sums = reinterpret_cast<float*>(shared);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBlocksM * 2; ++i) {
      const int row = (warp_m * kBlocksM * 2 + i) * 8 + g;
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        *reinterpret_cast<float2*>(sums + (warp_k * kRows + row) * 64 + warp_column + j * 8 +
                                   t * 2) =
            make_float2(acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * 64; i += kThreads) {
      float sum = 0;
#pragma unroll
      for (int from = 0; from < kWarpsK; ++from) sum += sums[from * kRows * 64 + i];
      const int32_t m = Source::RowOf(params, m_first + i / 64), n = n_first + i % 64;
      if (m >= 0 && n < params.k) row_of(m)[n * step] = sum;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBlocksM * 2; ++i) {
      const int32_t m = Source::RowOf(params, m_first + (warp_m * kBlocksM * 2 + i) * 8 + g);
      if (m < 0) continue;
      float* const row = row_of(m);
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        const int32_t n = n_first + warp_column + j * 8 + t * 2;
        if (n >= params.k) continue;
        const float2 pair = make_float2(acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]);
        if constexpr (Tag::kNarrow) {
          row[n * step] = pair.x;
          row[(n + 1) * step] = pair.y;
        } else {
          *reinterpret_cast<float2*>(row + n) = pair;
        }
      }
    }
  }
}

// kWarpsM x kWarpsN x kWarpsK warps divide the rows, the output channels and the pixels of a tile.
template <Op kOp, DType kType, int kRows, int kCtasPerSm_, bool kByChunks_, int kWarpsM_,
          int kWarpsN_, int kWarpsK_>
struct Wgrad {
  static_assert(kOp == Op::kWgrad);
  static constexpr bool kNarrow = false, kThreeTf32 = false;
  static constexpr bool kByChunks = kByChunks_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpsK = kWarpsK_;
  static constexpr int kBlocksM = kRows / 16 / kWarpsM;  // of one MMA, of a warp
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<LaunchParams>();
    Params params = launch.kernel;
    params.lhs = Tag::kNarrow ? operands.rhs : operands.lhs;
    params.rhs = Tag::kNarrow ? operands.lhs : operands.rhs;
    params.out = operands.workspace;
    BindEpilogue(operands, &params.epilogue);
    JAXCONV_RETURN_IF_ERROR(
        jaxconv::Launch<WgradKernel<Tag>>(plan.kernel->name, ConfigOf(launch), stream, params));
    return ReduceSlices<typename Tag::Epilogue>(static_cast<const float*>(operands.workspace),
                                                params.out_elements, plan.slices, params.k,
                                                params.epilogue, operands.out, kType, stream);
  }
};

// Few output channels, stride 1: dy is the tensor of few channels, x the other one.
template <Op kOp, DType kType, int kRows, int kCtasPerSm, bool kByChunks, int kWarpsM, int kWarpsN,
          int kWarpsK>
struct NarrowWgrad : Wgrad<kOp, kType, kRows, kCtasPerSm, kByChunks, kWarpsM, kWarpsN, kWarpsK> {
  static constexpr bool kNarrow = true;
};

// Float32 operands as three TF32 products.
template <Op kOp, DType kType, int kRows, int kCtasPerSm, bool kByChunks, int kWarpsM, int kWarpsN,
          int kWarpsK>
struct Wgrad3xTf32 : Wgrad<kOp, kType, kRows, kCtasPerSm, kByChunks, kWarpsM, kWarpsN, kWarpsK> {
  static_assert(kType == DType::kF32);
  static constexpr bool kThreeTf32 = true;
};
template <Op kOp, DType kType, int kRows, int kCtasPerSm, bool kByChunks, int kWarpsM, int kWarpsN,
          int kWarpsK>
struct NarrowWgrad3xTf32
    : Wgrad3xTf32<kOp, kType, kRows, kCtasPerSm, kByChunks, kWarpsM, kWarpsN, kWarpsK> {
  static constexpr bool kNarrow = true;
};

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_WGRAD_CUH_
