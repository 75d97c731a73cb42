// few_channels, wgrad: dw[(r,s,c), k] = sum over (n, p, q) of x[n, p stride + r, q stride + s, c]
// dy[(n,p,q), k], for input channels too few for asynchronous copies.
//
// GEMM: rows are (r, s, c), the reduction runs over pixels, columns are output channels. The
// fragments of A are pairs of pixels that are neighbours in a row of y, so the halo tile of x is
// stored by channel and by residue of the column modulo the stride: the pair is then one word.
// Pixels at odd places read a copy of the halo tile that is shifted by one element.
//
// Tile: 32, 64 or 192 rows by 64 output channels, 4 warps; the reduction is walked 128 pixels at a
// time (8 k-blocks of 16), CTA b taking pixel tiles b, b + gridDim.x, ... as its split-K slice.
// Shared memory, at most 100 KB: two halo tiles, two tiles of dy of 16 KB, and a table of places.
// Registers: 32 accumulators (192 rows: 96), 16 fragments, at most 102 (168).
//
// Who waits for whom: dy of the next pixel tile arrives by cp.async, its halo through registers in
// parts between k-blocks; one barrier a tile. Where warps share the pixels of a tile (32 rows),
// their sums are added in order in shared memory at the end. common/splitk_reduce.cuh adds the
// slices, even a single one: sums leave the kernel as float32 only.
//
// Refuses: operands or results other than f16 or bf16; groups; lhs_dilation; rank 3; K that is not
// a multiple of 8; halo tiles beyond the shared memory.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_WGRAD_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_WGRAD_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/splitk_reduce.cuh"
#include "cuda/few_channels/halo_loader.cuh"
#include "cuda/few_channels/params.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::few_channels {

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
  const int32_t m_end = params.rows.filter * params.columns.filter * params.c;
  const T* x = static_cast<const T*>(params.lhs) + batch * params.lhs_batch;
  const T* dy = static_cast<const T*>(params.rhs) + batch * params.rhs_batch;
  // One channel of one row of x, its columns by residue modulo the stride.
  const int32_t plane = params.columns.stride * params.pitch;

  // Where an element of a halo row belongs: by channel, residue and column.
  auto* place = reinterpret_cast<unsigned short*>(halo + 2 * params.halo_bytes);
  const auto row_pairs = static_cast<int32_t>(params.halo_row_divmod.divisor);
  for (int32_t i = threadIdx.x; i < row_pairs * 2; i += kThreads) {
    int32_t column, channel, j, residue;
    params.c_divmod.Divmod(max(0, i - params.halo_lead), &column, &channel);
    params.column_stride_divmod.Divmod(column, &j, &residue);
    // Pairs at either end may hold elements that no window wants.
    const bool wanted = i >= params.halo_lead && j < params.pitch;
    place[i] = static_cast<unsigned short>(wanted ? channel * plane + residue * params.pitch + j
                                                  : params.halo_spare);
  }
  __syncthreads();
  HaloLoader<T> loader(params, x);
  auto store_to = [&](int buffer) {
    unsigned char* to = halo + buffer * params.halo_bytes;
    return [&params, to, place, plane](int32_t row, int32_t pair, uint32_t value) {
      const uint32_t places = reinterpret_cast<const uint32_t*>(place)[pair];
      auto* low = reinterpret_cast<unsigned short*>(to) + row * params.c * plane;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        auto* at = low + (e == 0 ? places & 0xffff : places >> 16);
        const auto half = static_cast<unsigned short>(e == 0 ? value : value >> 16);
        *at = half;
        // The copy is shifted by one element.
        if (params.copy_bytes > 0) at[params.copy_bytes / 2 - 1] = half;
      }
    };
  };
  // Pass u of the gradient's copy is block u of 16 pixels.
  const uint32_t gradient =
      SharedAddress(shared) + Gradient::Offset(threadIdx.x / 8, threadIdx.x % 8);
  const int n_of_thread = n_first + threadIdx.x % 8 * 8;
  const int32_t k_bytes = params.k * int32_t{sizeof(T)};
  auto load_gradient = [&](const PixelTile& tile, int buffer) {
    const T* image =
        dy + int64_t{tile.image} * (params.rows.out * params.columns.out) * params.k + n_of_thread;
#pragma unroll
    for (int u = 0; u < kPixels / 16; ++u) {
      const int32_t down = u >> params.log2_across;
      const int32_t p = tile.row + down;
      const int32_t q = tile.column + (u - (down << params.log2_across)) * 16 +
                        static_cast<int32_t>(threadIdx.x / 8);
      const bool valid = p < params.rows.out && q < params.columns.out && n_of_thread < params.k;
      CopyAsync<16>(gradient + buffer * kGradientBytes + u * 16 * Gradient::kRowBytes,
                    OffsetBytes(image, p * params.columns.out + q, k_bytes), valid);
    }
    CopyAsyncCommit();
  };

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_m = threadIdx.x / 32 / (kWarpsN * kWarpsK);
  const int warp_k = threadIdx.x / 32 / kWarpsN % kWarpsK;
  const int warp_column = threadIdx.x / 32 % kWarpsN * kBlocksN * 8;
  // Where the elements of this lane's rows lie for the halo tile's first pixel.
  uint32_t row_address[kBlocksM * 2];
#pragma unroll
  for (int i = 0; i < kBlocksM * 2; ++i) {
    const int32_t m = m_first + (warp_m * kBlocksM * 2 + i) * 8 + g;
    int32_t tap, channel;
    params.c_divmod.Divmod(m < m_end ? m : 0, &tap, &channel);
    const int32_t r = tap / params.columns.filter, s = tap % params.columns.filter;
    int32_t j, residue;
    params.column_stride_divmod.Divmod(s * params.columns.dilation, &j, &residue);
    const int32_t at =
        (r * params.rows.dilation * params.c + channel) * plane + residue * params.pitch + j;
    row_address[i] =
        SharedAddress(halo) + (j % 2 == 0 ? at * 2 : params.copy_bytes + at * 2 - 2) + t * 4;
  }
  const FragmentReader<T, Gradient, true> reader(SharedAddress(shared), warp_column);

  float acc[kBlocksM][kBlocksN][4] = {};
  int32_t index = blockIdx.x;
  PixelTile tile(params, index);
  if (index < params.tiles) {
    load_gradient(tile, 0);
    for (loader.Begin(tile); loader.More();) {
      loader.Load();
      loader.Store(store_to(0));
    }
  }
  int buffer = 0;
  for (; index < params.tiles; index += gridDim.x) {
    CopyAsyncWait<0>();
    __syncthreads();
    const PixelTile next(params, index + gridDim.x);
    if (index + gridDim.x < params.tiles) {
      load_gradient(next, 1 - buffer);
      loader.Begin(next);
    }
    int k_block = warp_k;
    // The next halo tile arrives in parts, each while some k-blocks are multiplied.
    do {
      if (loader.More()) loader.Load();
      const int end = loader.Last()
                          ? kPixels / 16
                          : min(kPixels / 16, k_block + params.blocks_per_fetch * kWarpsK);
#pragma unroll 1
      for (; k_block < end; k_block += kWarpsK) {
        const int32_t down = k_block >> params.log2_across;
        const int32_t column = (k_block - (down << params.log2_across)) * 16;
        // Pixels that y does not have: their gradients are zeros, their x may be NaN.
        const int32_t left = params.columns.out - tile.column - column;
        if (tile.row + down >= params.rows.out || left <= 0) continue;
        uint32_t mask[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t pair_left = left - half * 8 - t * 2;
          mask[half] = pair_left >= 2 ? 0xffffffffu : pair_left == 1 ? 0xffffu : 0;
        }
        uint32_t b[kBlocksN / 2][4];
        reader.Read(buffer * (kPixels / 16) + k_block, b);
        const uint32_t offset = buffer * params.halo_bytes +
                                (down * params.rows.stride * params.c * plane + column) * 2;
#pragma unroll
        for (int i = 0; i < kBlocksM; ++i) {
          uint32_t a[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            a[e] = LoadWord(row_address[i * 2 + e % 2] + offset + e / 2 * 16) & mask[e / 2];
          }
#pragma unroll
          for (int j = 0; j < kBlocksN; ++j) {
            MultiplyAdd<T>(acc[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
          }
        }
      }
      if (loader.More()) loader.Store(store_to(1 - buffer));
    } while (loader.More() || k_block < kPixels / 16);
    buffer = 1 - buffer;
    tile = next;
  }

  float* out =
      static_cast<float*>(params.out) + blockIdx.x * params.out_elements + batch * params.out_batch;
  if constexpr (kWarpsK > 1) {
    // The warps' sums are added in order, through shared memory.
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
      const int32_t m = m_first + i / 64, n = n_first + i % 64;
      if (m < m_end && n < params.k) out[int64_t{m} * params.k + n] = sum;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBlocksM * 2; ++i) {
      const int32_t m = m_first + (warp_m * kBlocksM * 2 + i) * 8 + g;
      if (m >= m_end) continue;
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        const int32_t n = n_first + warp_column + j * 8 + t * 2;
        if (n >= params.k) continue;
        *reinterpret_cast<float2*>(out + int64_t{m} * params.k + n) =
            make_float2(acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]);
      }
    }
  }
}

// kWarpsM x kWarpsN x kWarpsK warps: of rows, of output channels and of the pixels of a tile.
template <Op kOp, DType kType, int kRows, int kCtasPerSm_, int kWarpsM_, int kWarpsN_, int kWarpsK_>
struct Wgrad {
  static_assert(kOp == Op::kWgrad);
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpsK = kWarpsK_;
  static constexpr int kBlocksM = kRows / 16 / kWarpsM;  // of one MMA, of a warp
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<LaunchParams>();
    Params params = launch.kernel;
    params.lhs = operands.lhs;
    params.rhs = operands.rhs;
    params.out = operands.workspace;
    BindEpilogue(operands, &params.epilogue);
    JAXCONV_RETURN_IF_ERROR(
        jaxconv::Launch<WgradKernel<Tag>>(plan.kernel->name, ConfigOf(launch), stream, params));
    return ReduceSlices<typename Tag::Epilogue>(static_cast<const float*>(operands.workspace),
                                                params.out_elements, plan.slices, params.k,
                                                params.epilogue, operands.out, kType, stream);
  }
};

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_WGRAD_CUH_
