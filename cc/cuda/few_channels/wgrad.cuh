// few_channels, wgrad: dw[(r,s,c), k] = sum over (n, p, q) of x[n, p stride + r, q stride + s, c]
// dy[(n,p,q), k], for input channels too few for asynchronous copies.
//
// GEMM: rows are (r, s, c), the reduction runs over pixels, columns are output channels. The
// fragments of A of 16-bit elements are pairs of pixels that are neighbours in a row of y, so the
// halo tile of x is stored by channel and by residue of the column modulo the stride: the pair is
// then one word. Pixels at odd places read a copy of the halo tile that is shifted by one element.
// Of float32 a word is one pixel's, and the halo tile lies as x does.
//
// Tile: 32, 64 or 192 rows (float32: 160) by 64 output channels, 4 warps; the reduction is walked
// 128 pixels at a time (8 blocks of 16), CTA b taking pixel tiles b, b + gridDim.x, ... as its
// split-K slice. Shared memory, at most 100 KB (float32: 200): two halo tiles, two tiles of dy of
// 16 KB (32), and of 16-bit elements a table of places. Registers: 32 accumulators (192 rows: 96,
// 160: 80), 16 fragments, at most 102 (168, 255).
//
// Bank conflicts of float32: a fragment has 8 rows of dw, mostly 8 neighbouring words, of four
// pixels, which lie stride C words apart. Pixels 1, 2 or 4 apart (SpreadPixel) put the four into
// different banks; dy's rows are stored in that order.
//
// Who waits for whom: dy of the next pixel tile arrives by cp.async, its halo too, or through
// registers in parts between k-blocks; one barrier a tile. Where warps share the pixels of a tile
// (32 rows), their sums are added in order in shared memory at the end. common/splitk_reduce.cuh
// adds the slices, even a single one: sums leave the kernel as float32 only.
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
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::few_channels {

// The halo tile by channel and by residue of the column modulo the stride, so that a word is two
// neighbouring pixels. Pixels at odd places read a copy that is shifted by one element.
template <typename T, int kBlocksM>
struct SortedHalo {
  const Params& params;
  unsigned char* halo;
  // One channel of one row of x, its columns by residue modulo the stride.
  const int32_t plane;
  // Where an element of a halo row belongs: by channel, residue and column.
  unsigned short* place;
  HaloLoader<T> loader;
  // Where the elements of this lane's rows lie for the halo tile's first pixel.
  uint32_t row_address[kBlocksM * 2];

  // `m`: the warp's first row.
  __device__ __forceinline__ SortedHalo(const Params& p, const T* x, unsigned char* shared,
                                        int32_t m)
      : params(p),
        halo(shared),
        plane(p.columns.stride * p.pitch),
        place(reinterpret_cast<unsigned short*>(shared + 2 * p.halo_bytes)),
        loader(p, x) {
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
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBlocksM * 2; ++i) {
      const int32_t row = RowOf(params, m + i * 8 + lane / 4);
      int32_t tap, channel;
      params.c_divmod.Divmod(max(row, 0), &tap, &channel);
      const int32_t r = tap / params.columns.filter, s = tap % params.columns.filter;
      int32_t j, residue;
      params.column_stride_divmod.Divmod(s * params.columns.dilation, &j, &residue);
      const int32_t at =
          (r * params.rows.dilation * params.c + channel) * plane + residue * params.pitch + j;
      row_address[i] = SharedAddress(halo) +
                       (j % 2 == 0 ? at * 2 : params.copy_bytes + at * 2 - 2) + lane % 4 * 4;
    }
  }
  // Row m of the GEMM as a row of dw, or -1.
  static __device__ __forceinline__ int32_t RowOf(const Params& params, int32_t m) {
    return m < params.rows.filter * params.columns.filter * params.c ? m : -1;
  }
  // The loader's pairs -> a buffer.
  __device__ __forceinline__ void Store(int buffer) {
    unsigned char* to = halo + buffer * params.halo_bytes;
    loader.Store([this, to](int32_t row, int32_t pair, uint32_t value) {
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
    });
  }
  __device__ __forceinline__ void LoadFirst(const PixelTile& tile) {
    for (loader.Begin(tile); loader.More();) {
      loader.Load();
      Store(0);
    }
  }
  // Of a block of 16 pixels.
  __device__ __forceinline__ uint32_t Offset(int buffer, int32_t down, int32_t column) const {
    return buffer * params.halo_bytes + (down * params.rows.stride * params.c * plane + column) * 2;
  }
  __device__ __forceinline__ void Fragment(int i, int step, uint32_t offset,
                                           uint32_t (&a)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = LoadWord(row_address[i * 2 + e % 2] + offset + e / 2 * 16);
  }
};

// The halo tile as it lies in x, copied by chunks of 16 bytes. A word is two neighbouring elements
// of a pixel's window, and the words of two pixels are exchanged into two fragments: of the even
// elements, which are rows 0 to 7 of a block of the GEMM, and of the odd ones, rows 8 to 15. So the
// rows are runs of a filter row's elements, padded to pairs; the sums of padding are dropped.
template <typename T, int kBlocksM>
struct PlainHalo {
  const Params& params;
  const uint32_t halo;
  const ChunkLoader<T> loader;
  const uint32_t pixel_bytes;  // from one pixel's window to the next
  uint32_t pair_address[kBlocksM];

  __device__ __forceinline__ PlainHalo(const Params& p, const T* x, unsigned char* shared,
                                       int32_t m)
      : params(p),
        halo(SharedAddress(shared)),
        loader(p, x),
        pixel_bytes(p.columns.stride * p.c * 2) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
      int32_t run, pair;
      params.words_of_run.Divmod(m / 2 + i * 8 + lane / 4, &run, &pair);
      if (run >= params.runs) run = pair = 0;
      const int32_t r = run / params.runs_of_row, s = run % params.runs_of_row;
      const int32_t at = r * params.rows.dilation * params.pitch +
                         s * params.columns.dilation * params.c + pair * 2 + params.halo_lead -
                         params.run_lead;
      pair_address[i] = halo + at * 2 + lane % 4 * 2 * pixel_bytes;
    }
  }
  static __device__ __forceinline__ int32_t RowOf(const Params& params, int32_t m) {
    int32_t run, pair;
    params.words_of_run.Divmod(m / 16 * 8 + m % 8, &run, &pair);
    const int32_t element = pair * 2 + m / 8 % 2 - params.run_lead;
    const bool valid = run < params.runs &&
                       static_cast<uint32_t>(element) < static_cast<uint32_t>(params.run_elements);
    return valid ? run * params.run_elements + element : -1;
  }
  __device__ __forceinline__ void Load(const PixelTile& tile, int buffer) const {
    loader.Load(tile, halo + buffer * params.halo_bytes);
  }
  __device__ __forceinline__ void LoadFirst(const PixelTile& tile) const { Load(tile, 0); }
  __device__ __forceinline__ uint32_t Offset(int buffer, int32_t down, int32_t column) const {
    return buffer * params.halo_bytes + down * params.rows.stride * params.pitch * 2 +
           column * pixel_bytes;
  }
  // `step`: of a block of 16 pixels, which 16-bit elements take in one.
  __device__ __forceinline__ void Fragment(int i, int step, uint32_t offset,
                                           uint32_t (&a)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t from = pair_address[i] + offset + half * 8 * pixel_bytes;
      const uint32_t first = LoadWord(from), second = LoadWord(from + pixel_bytes);
      a[half * 2] = __byte_perm(first, second, 0x5410);
      a[half * 2 + 1] = __byte_perm(first, second, 0x7632);
    }
  }
};

// The halo tile of float32 as it lies in x: a word is one element of a pixel's window.
template <int kBlocksM>
struct WordHalo {
  const Params& params;
  const uint32_t halo;
  const ChunkLoader<float> loader;
  const uint32_t pixel_bytes;  // from one pixel's window to the next
  // Where the elements of this lane's rows lie, for the halo tile's first pixel, and its own pixels
  // beside that one: two of each step.
  uint32_t row_address[kBlocksM * 2];
  uint32_t pixel_offset[2][2];

  __device__ __forceinline__ WordHalo(const Params& p, const float* x, unsigned char* shared,
                                      int32_t m)
      : params(p),
        halo(SharedAddress(shared)),
        loader(p, x),
        pixel_bytes(p.columns.stride * p.c * 4) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBlocksM * 2; ++i) {
      const int32_t row = RowOf(params, m + i * 8 + lane / 4);
      int32_t tap, channel;
      params.c_divmod.Divmod(max(row, 0), &tap, &channel);
      const int32_t r = tap / params.columns.filter, s = tap % params.columns.filter;
      const int32_t at = r * params.rows.dilation * params.pitch +
                         s * params.columns.dilation * params.c + channel + params.halo_lead;
      row_address[i] = halo + at * 4;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      pixel_offset[e / 2][e % 2] = SpreadPixel<2>(e, lane % 4, params.log2_spread) * pixel_bytes;
    }
  }
  static __device__ __forceinline__ int32_t RowOf(const Params& params, int32_t m) {
    return m < params.rows.filter * params.columns.filter * params.c ? m : -1;
  }
  __device__ __forceinline__ void Load(const PixelTile& tile, int buffer) const {
    loader.Load(tile, halo + buffer * params.halo_bytes);
  }
  __device__ __forceinline__ void LoadFirst(const PixelTile& tile) const { Load(tile, 0); }
  __device__ __forceinline__ uint32_t Offset(int buffer, int32_t down, int32_t column) const {
    return buffer * params.halo_bytes + down * params.rows.stride * params.pitch * 4 +
           column * pixel_bytes;
  }
  __device__ __forceinline__ void Fragment(int i, int step, uint32_t offset,
                                           uint32_t (&a)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t pixel = step == 0 ? pixel_offset[0][e / 2] : pixel_offset[1][e / 2];
      a[e] = LoadWord(row_address[i * 2 + e % 2] + (offset + pixel));
    }
  }
};

// The row of a tile of dy, of a block of 16, that has a pixel: in the order in which the steps read
// them.
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
  // MMA steps of a block of 16 pixels, and what a pass of the threads copies of it.
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
    // Pixels that y does not have: their gradients are zeros, their x may be NaN.
    const int32_t left = params.columns.out - walk.tile.column - column;
    if (walk.tile.row + down >= params.rows.out || left <= 0) return;
    auto rows = [&](auto whole) {
      // A word's pixels that y has.
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
      // The next halo tile arrives in parts, each while some k-blocks are multiplied.
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
  // Where column 0 of a row of dw lies, and how far the columns are apart.
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

// kWarpsM x kWarpsN x kWarpsK warps: of rows, of output channels and of the pixels of a tile.
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

// Of few output channels and stride 1: dy is the tensor of few channels, and x the other.
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
