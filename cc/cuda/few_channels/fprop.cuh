// few_channels, fprop: y[(n,p,q), k] = sum over (r, s, c) of x[n, p stride + r, q stride + s, c]
// w[(r,s,c), k], for input channels too few for asynchronous copies.
//
// GEMM: rows are pixels of y, the reduction runs over (r, s, c), columns are output channels. A
// pixel of 3 16-bit channels has 6 bytes, too few for an asynchronous copy, and R S / stride^2
// windows read it. So each CTA loads the halo tile of x once into shared memory and builds all
// fragments of A from its words. The reduction consists of runs: S C neighbouring elements for each
// filter row (C for each tap of a dilated filter). A run of 16-bit elements is padded to pairs. The
// second half of an incomplete pair is masked, because it belongs to the next pixel and may be NaN.
// Pixels at odd elements read a copy of the halo tile that is shifted by one element. A float32
// element is a word, so float32 needs neither padding nor this copy.
//
// Tile: 128 pixels (8 blocks of 16 neighbours in a row of y) by 64 output channels. Each of 4 warps
// has 32 pixels by 64 channels (three TF32 products: 64 by 32). float32 also has tiles of 256
// pixels with 64 by 64 for each warp, which loads 17 fragment words for 16 products instead of 26.
// CTA b processes tiles b, b + gridDim.x, ... Shared memory, at most 100 KB (float32: 200): the
// filter of 64 channels and its table, 2,112 bytes for 8 words of the reduction; 8 KB of staged
// outputs, except for plain float32; two halo tiles. Registers: 64 accumulators, 16 fragments of B,
// at most 128 (256 pixels: 128 accumulators; three products: 32 parts of B and 16 sums of a run in
// addition; at most 255).
//
// Bank conflicts of float32: for 3 channels and stride 2 the windows of neighbouring pixels are 6
// words apart, and 8 of them with four words each have bank conflicts. The 8 lanes of a block
// therefore have every second (fourth) pixel, 12 words apart (SpreadPixel). The filter is stored in
// the order of fragments, so that a lane reads its words of 16 columns by one load of 16 bytes.
//
// Synchronisation: one barrier for each tile. For 16-bit elements without 16-byte chunks, the
// threads load a part of the next tile's halo into registers, multiply some k-blocks of 8 words,
// and store the part into the other halo tile. Otherwise cp.async copies the halo during the
// products. Four CTAs (float32: three or two) share an SM and hide each other's loads.
//
// Refuses: operands or results other than f16, bf16 or f32; groups; lhs_dilation; rank 3; filters
// stored as krsc; halo tiles beyond the shared memory; dilated filter rows of an odd number of
// 16-bit channels.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_FPROP_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_FPROP_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/split_tf32.cuh"
#include "cuda/common/two_buffers.cuh"
#include "cuda/few_channels/halo_loader.cuh"
#include "cuda/few_channels/params.h"
#include "cuda/few_channels/store_pixels.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::few_channels {

// The filter of 64 output channels in k-blocks of 8 words of the reduction. A chunk is 16 bytes of
// neighbouring output channels of one row.
template <typename T>
struct FilterTile : RowMatrix<T> {
  using Rows = RowMatrix<T>;
  const FragmentReader<T, Rows, true> reader;

  __device__ __forceinline__ FilterTile(uint32_t filter, int first_column)
      : reader(filter, first_column) {}
  // Chunk i of all.
  static __device__ __forceinline__ void Place(int32_t i, int32_t* row, int32_t* chunk) {
    *row = i / Rows::kChunks;
    *chunk = i % Rows::kChunks;
  }
  static __device__ __forceinline__ void Store(unsigned char* filter, int32_t row, int32_t chunk,
                                               const uint32_t (&words)[4]) {
    *reinterpret_cast<uint4*>(filter + Rows::Offset(row, chunk)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
  template <int kBlocks>
  __device__ __forceinline__ void Read(int32_t k_block, uint32_t (&b)[kBlocks][4]) const {
    reader.Read(k_block, b);
  }
};

// float32 is stored in the order of fragments: (k-block, 16 channels, lane), each entry with the
// words of two blocks of 8 columns. Channel n of the 16 is column n / 4 * 2 + n % 2 of block n / 2
// % 2, so that a lane has the sums of four neighbouring channels.
template <>
struct FilterTile<float> {
  static constexpr int kChunks = kTileChannels / 4;
  uint32_t address;

  __device__ __forceinline__ FilterTile(uint32_t filter, int first_column)
      : address(filter + (first_column / 16 * 32 + threadIdx.x % 32) * 16) {}
  // Neighbouring threads have neighbouring rows, whose words are in different banks.
  static __device__ __forceinline__ void Place(int32_t i, int32_t* row, int32_t* chunk) {
    *row = i / (8 * kChunks) * 8 + i % 8;
    *chunk = i / 8 % kChunks;
  }
  static __device__ __forceinline__ void Store(unsigned char* filter, int32_t row, int32_t chunk,
                                               const uint32_t (&words)[4]) {
    const int32_t lane = chunk % 4 * 8 + row % 4;
    unsigned char* const to =
        filter + row / 8 * kFilterBlockBytes + (chunk / 4 * 32 + lane) * 16 + row / 4 % 2 * 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      *reinterpret_cast<uint32_t*>(to + e % 2 * 64 + e / 2 * 8) = words[e];
    }
  }
  template <int kBlocks>
  __device__ __forceinline__ void Read(int32_t k_block, uint32_t (&b)[kBlocks][4]) const {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const uint4 words = LoadChunk(address + k_block * kFilterBlockBytes + j * 512);
      b[j][0] = words.x, b[j][1] = words.y, b[j][2] = words.z, b[j][3] = words.w;
    }
  }
};

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    FpropKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  constexpr bool kThree = Tag::kThreeTf32;
  using Tile = MmaTile<Tag::kPixels, 64, 128, kThree ? 2 : 4, kThree ? 2 : 1, 1, 4>;
  using Filter = FilterTile<T>;
  constexpr int kPerWord = kWordElements<T>;
  // Whether cp.async copies the halo tile.
  constexpr bool kAsync = Tag::kByChunks || sizeof(T) == 4;
  constexpr bool kStages = !Tag::Epilogue::kPlain || sizeof(T) == 2;
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* filter = shared;
  unsigned char* staged = filter + params.k_blocks * kFilterBlockBytes;
  int2* table = reinterpret_cast<int2*>(staged + (kStages ? kStagingBytes * kThreads / 32 : 0));
  unsigned char* halo = reinterpret_cast<unsigned char*>(table + params.k_blocks * 8);
  const uint32_t staging = SharedAddress(staged);
  int32_t part, batch;
  params.column_parts.Divmod(blockIdx.y, &batch, &part);
  const int n_first = part * 64;
  const T* x = static_cast<const T*>(params.lhs) + batch * params.lhs_batch;
  const T* w = static_cast<const T*>(params.rhs) + batch * params.rhs_batch;

  for (int32_t i = threadIdx.x; i < params.k_blocks * 8 * kPerWord * Filter::kChunks;
       i += kThreads) {
    int32_t row, chunk, run, word;
    Filter::Place(i, &row, &chunk);
    params.words_of_run.Divmod(row / kPerWord, &run, &word);
    const int32_t element = word * kPerWord + row % kPerWord - params.run_lead;
    const bool valid = run < params.runs &&
                       static_cast<uint32_t>(element) < static_cast<uint32_t>(params.run_elements);
    using Bits = std::conditional_t<sizeof(T) == 2, unsigned short, uint32_t>;
    constexpr int kElements = kChunkElements<T>;
    const int n = n_first + chunk * kElements;
    uint32_t words[4] = {};
    auto set = [&](int e, const Bits* source) {
      if (valid && n + e < params.k) {
        words[e / kPerWord] |= uint32_t{__ldg(source)} << (e % kPerWord * 16);
      }
    };
    if constexpr (Tag::kNarrow) {
      // The filter as (tap, column, reduction), from its last tap on.
      int32_t s, channel;
      params.c_divmod.Divmod(max(element, 0), &s, &channel);
      const int32_t taps = params.rows.filter * params.columns.filter;
      const int32_t tap = taps - 1 - (run * (params.columns.filter / params.runs_of_row) + s);
      const auto* source =
          reinterpret_cast<const Bits*>(w) + (int64_t{tap} * params.k + n) * params.c + channel;
#pragma unroll
      for (int e = 0; e < kElements; ++e) set(e, source + e * params.c);
    } else {
      const auto* source = reinterpret_cast<const Bits*>(w) +
                           (int64_t{run} * params.run_elements + element) * params.k + n;
      if (params.k_vector) {
        if (valid && n < params.k) {
          const uint4 value = __ldg(reinterpret_cast<const uint4*>(source));
          words[0] = value.x, words[1] = value.y, words[2] = value.z, words[3] = value.w;
        }
      } else {
#pragma unroll
        for (int e = 0; e < kElements; ++e) set(e, source + e);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) words[e] = Rounded<Tag>(words[e]);
    Filter::Store(filter, row, chunk, words);
  }
  // The position of each word of the reduction in a window, and a mask of the bits that belong to
  // it.
  for (int32_t i = threadIdx.x; i < params.k_blocks * 8; i += kThreads) {
    int32_t run, word;
    params.words_of_run.Divmod(i, &run, &word);
    const int32_t r = run / params.runs_of_row, s = run % params.runs_of_row;
    const int32_t offset = r * params.rows.dilation * params.pitch +
                           s * params.columns.dilation * params.c + word * kPerWord;
    uint32_t mask = sizeof(T) == 4 ? 0xffffffffu : 0;
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (static_cast<uint32_t>(word * 2 + e - params.run_lead) <
            static_cast<uint32_t>(params.run_elements)) {
          mask |= 0xffffu << (e * 16);
        }
      }
    }
    table[i] = run < params.runs
                   ? make_int2(offset * int32_t{sizeof(T)}, static_cast<int32_t>(mask))
                   : make_int2(0, 0);
  }

  using Loader = std::conditional_t<kAsync, ChunkLoader<T>, HaloLoader<T>>;
  Loader loader(params, x);
  auto store_to = [&](unsigned char* to) {
    return [&params, to](int32_t row, int32_t pair, uint32_t value) {
      const int32_t at = row * params.pitch + pair * 2;
      *reinterpret_cast<uint32_t*>(to + at * 2) = value;
      if (params.copy_bytes > 0) {
        // The element before the first of a row is the last of the row above; no window reads it.
        auto* copy = reinterpret_cast<unsigned short*>(to + params.copy_bytes) + at;
        copy[-1] = static_cast<unsigned short>(value);
        copy[0] = static_cast<unsigned short>(value >> 16);
      }
    };
  };
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_block = Tile::WarpM() / 16;
  // The start of the window of this lane's pixel, in each of the warp's blocks.
  uint32_t window[Tile::kBlocksM];
  const uint32_t halo_address = SharedAddress(halo);
#pragma unroll
  for (int i = 0; i < Tile::kBlocksM; ++i) {
    const int32_t block = first_block + i;
    const int32_t row = block >> params.log2_across;
    const int32_t column = ColumnInTile<T>(params, block, g);
    const int32_t at = row * params.rows.stride * params.pitch + params.halo_lead -
                       params.run_lead + column * params.columns.stride * params.c;
    window[i] = halo_address + (sizeof(T) == 4 || at % 2 == 0 ? at * int32_t{sizeof(T)}
                                                              : params.copy_bytes + at * 2 - 2);
  }
  const uint32_t half_block = (sizeof(T) == 2 ? 8 : SpreadPixel<3>(1, 0, params.log2_spread)) *
                              params.columns.stride * params.c * int32_t{sizeof(T)};
  const uint32_t table_address = SharedAddress(table) + t * 8;
  const Filter reader(SharedAddress(filter), Tile::WarpN());

  // The words of a k-block: positions in a window, and masks.
  struct Words {
    uint32_t at[2], mask[2];
  };
  auto words_of = [&](int32_t k_block) {
    Words words;
    LoadPair(table_address + k_block * 64, &words.at[0], &words.mask[0]);
    LoadPair(table_address + k_block * 64 + 32, &words.at[1], &words.mask[1]);
    return words;
  };
  // `masked`: some words of the k-block may not belong to the windows.
  auto read_a = [&](int i, uint32_t offset, const Words& words, bool masked, uint32_t (&a)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t from = window[i] + offset + words.at[half];
      a[half * 2] = LoadWord(from);
      a[half * 2 + 1] = LoadWord(from + half_block);
    }
    if (masked) {
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] &= words.mask[e / 2];
    }
  };
  // The number of k-blocks multiplied at a time.
  constexpr int kRun = kThree ? kSplitRunSteps : 1;
  auto multiply = [&](int32_t k_block, uint32_t offset,
                      float (&acc)[Tile::kBlocksM][Tile::kBlocksN][4]) {
    // float32 has padding only after the last run.
    const bool masked = sizeof(T) == 2 || k_block + kRun >= params.k_blocks;
    if constexpr (kThree) {
      Words words[kRun];
      uint32_t a[kRun][4], b[kRun][Tile::kBlocksN][2];
      auto read_b = [&](int step, uint32_t (&to)[Tile::kBlocksN][2]) {
        uint32_t quads[Tile::kBlocksN / 2][4];
        reader.Read(k_block + step, quads);
#pragma unroll
        for (int j = 0; j < Tile::kBlocksN; ++j) {
          to[j][0] = quads[j / 2][j % 2 * 2];
          to[j][1] = quads[j / 2][j % 2 * 2 + 1];
        }
      };
      auto read_block = [&](int i, uint32_t (&to)[kRun][4]) {
#pragma unroll
        for (int step = 0; step < kRun; ++step) read_a(i, offset, words[step], masked, to[step]);
      };
#pragma unroll
      for (int step = 0; step < kRun; ++step) {
        words[step] = words_of(k_block + step);
        read_b(step, b[step]);
      }
      read_block(0, a);
      const uint32_t left = MultiplySplitRun(b, a, acc, read_block, [](auto) {});
      if (__any_sync(0xffffffff, left != 0)) {
        PromoteWithCare(left, acc, [&](int step, auto& of_a, auto& of_b) {
          const Words again = words_of(k_block + step);
#pragma unroll
          for (int i = 0; i < Tile::kBlocksM; ++i) read_a(i, offset, again, true, of_a[i]);
          read_b(step, of_b);
        });
      }
    } else {
      const Words words = words_of(k_block);
      uint32_t b[Tile::kBlocksN / 2][4];
      reader.Read(k_block, b);
#pragma unroll
      for (int i = 0; i < Tile::kBlocksM; ++i) {
        uint32_t a[4];
        read_a(i, offset, words, masked, a);
        RoundFragment<T>(a);
#pragma unroll
        for (int j = 0; j < Tile::kBlocksN; ++j) {
          MultiplyAdd<T>(acc[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  };

  TwoBuffers<PixelTile> walk(params);
  if (walk.index < params.tiles) {
    if constexpr (kAsync) {
      loader.Load(walk.tile, halo_address);
    } else {
      for (loader.Begin(walk.tile); loader.More();) {
        loader.Load();
        loader.Store(store_to(halo));
      }
    }
  }
  if constexpr (!kAsync) __syncthreads();
  while (walk.index < params.tiles) {
    const uint32_t offset = walk.buffer, other = walk.Other(params.halo_bytes);
    const PixelTile next(params, walk.NextIndex());
    float acc[Tile::kBlocksM][Tile::kBlocksN][4] = {};
    if constexpr (kAsync) {
      // The copies of this tile have arrived, and all threads have read the previous tile.
      CopyAsyncWait<0>();
      __syncthreads();
      if (walk.NextIndex() < params.tiles) loader.Load(next, halo_address + other);
#pragma unroll 1
      for (int32_t k_block = 0; k_block < params.k_blocks; k_block += kRun) {
        multiply(k_block, offset, acc);
      }
    } else {
      if (walk.NextIndex() < params.tiles) loader.Begin(next);
      int32_t k_block = 0;
      // The next halo tile is copied in parts, each during the products of some k-blocks.
      do {
        if (loader.More()) loader.Load();
        const int32_t end = loader.Last() ? params.k_blocks
                                          : min(params.k_blocks, k_block + params.blocks_per_fetch);
#pragma unroll 1
        for (; k_block < end; ++k_block) multiply(k_block, offset, acc);
        if (loader.More()) loader.Store(store_to(halo + other));
      } while (loader.More() || k_block < params.k_blocks);
    }
    const typename Tag::Epilogue epilogue(params.epilogue);
    const uint32_t of_warp = staging + threadIdx.x / 32 * kStagingBytes;
    bool finished = Tag::Epilogue::kPlain;
    const int n_of_warp = n_first + Tile::WarpN();
    if constexpr (!Tag::Epilogue::kPlain && kAsync) {
      // (Without cp.async the pairs in flight leave no registers for this.)
      if (params.k_vector && Clamps(params.epilogue) && params.epilogue.residual == nullptr) {
        ClampPixels<T>(params, epilogue, n_of_warp, acc);
        finished = true;
      }
    }
    if (finished) {
      T* const y = static_cast<T*>(params.out) + batch * params.out_batch;
      if constexpr (sizeof(T) == 4) {
        StorePixels(params, walk.tile, acc, first_block, y, n_of_warp);
      } else {
        StorePixels(params, walk.tile, acc, of_warp, y, n_first);
      }
    } else if constexpr (!Tag::Epilogue::kPlain) {
      StoreFusedPixels(params, walk.tile, acc, first_block, of_warp, static_cast<T*>(params.out),
                       epilogue, batch * params.out_batch, n_of_warp);
    }
    epilogue.FinishTile(walk.index * Tag::kPixels, (walk.index + 1) * Tag::kPixels, n_first,
                        min(n_first + kTileChannels, params.k));
    if constexpr (!kAsync) __syncthreads();
    walk.Advance(next, params.halo_bytes);
  }
}

// kByChunks: the halo tile of 16-bit elements is copied by chunks of 16 bytes.
template <Op kOp, DType kType, int kPixels_, int kCtasPerSm_, bool kByChunks_>
struct Fprop {
  // dgrad: few output channels, stride 1.
  static_assert(kOp != Op::kWgrad);
  static constexpr int kPixels = kPixels_;
  static constexpr bool kNarrow = kOp == Op::kDgrad;
  static constexpr bool kByChunks = kByChunks_, kThreeTf32 = false;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<LaunchParams>();
    Params params = launch.kernel;
    params.lhs = operands.lhs;
    params.rhs = operands.rhs;
    params.out = operands.out;
    BindEpilogue(operands, &params.epilogue);
    return jaxconv::Launch<FpropKernel<Tag>>(plan.kernel->name, ConfigOf(launch), stream, params);
  }
};

// Float32 operands as three TF32 products.
template <Op kOp, DType kType, int kPixels, int kCtasPerSm, bool kByChunks>
struct Fprop3xTf32 : Fprop<kOp, kType, kPixels, kCtasPerSm, kByChunks> {
  static_assert(kType == DType::kF32);
  static constexpr bool kThreeTf32 = true;
};

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_FPROP_CUH_
