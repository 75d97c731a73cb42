// few_channels, fprop: y[(n,p,q), k] = sum over (r, s, c) of x[n, p stride + r, q stride + s, c]
// w[(r,s,c), k], for input channels too few for asynchronous copies.
//
// GEMM: rows are pixels of y, the reduction runs over (r, s, c), columns are output channels. A
// pixel of 3 16-bit channels has 6 bytes, too few for a copy, and R S / stride^2 windows read it.
// So each CTA loads the halo tile of x once into shared memory and builds all fragments of A from
// it, by words: the reduction is made of runs, S C neighbouring elements under each filter row (C
// under each tap of a dilated filter). A run is padded to pairs, whose odd half is masked away,
// because it is the next pixel's and may be NaN. Pixels at odd elements read a copy of the halo
// tile that is shifted by one element.
//
// Tile: 128 pixels (8 blocks of 16 neighbours in a row of y) by 64 output channels, 4 warps, each
// 32 pixels by 64 channels; CTA b processes tiles b, b + gridDim.x, ... Shared memory, at most 100
// KB: the filter of 64 channels and its table, 2,112 bytes for 16 elements of the reduction; 8 KB
// of staged outputs; two halo tiles. Registers: 64 accumulators, 16 fragments of B, at most 128.
//
// Who waits for whom: the threads fetch the next tile's halo into registers in parts, multiply some
// k-blocks of 16 elements, and store the part into the other halo tile; one barrier a tile. Four
// CTAs share an SM and hide each other's loads.
//
// Refuses: operands or results other than f16 or bf16; groups; lhs_dilation; rank 3; filters stored
// as krsc; halo tiles beyond the shared memory; dilated filter rows of an odd number of channels.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_FPROP_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_FPROP_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/finish_staged.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/two_buffers.cuh"
#include "cuda/few_channels/halo_loader.cuh"
#include "cuda/few_channels/params.h"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::few_channels {

// The accumulators of a warp -> y: two blocks of 16 neighbouring pixels, 64 channels. They are
// rounded first and then pass through shared memory, to be stored by 16 bytes.
template <typename T>
__device__ __forceinline__ void StorePixels(const Params& params, const PixelTile& tile,
                                            const float (&acc)[2][8][4], uint32_t staging, T* y,
                                            int n_first) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // Chunk c of row r lies at c ^ r % 8.
  const uint32_t store = staging + g * 128 + (g * 16 + t * 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        T pair[2] = {FromFloat<T>(acc[i][j][upper * 2]), FromFloat<T>(acc[i][j][upper * 2 + 1])};
        uint32_t word;
        memcpy(&word, pair, sizeof(word));
        StoreWord((store ^ (j * 16)) + upper * 1024, word);
      }
    }
    __syncwarp();
    const int32_t block = threadIdx.x / 32 * 2 + i, down = block >> params.log2_across;
    const int32_t p = tile.row + down;
    const int32_t q_first = tile.column + (block - (down << params.log2_across)) * 16;
    if (p >= params.rows.out) continue;
    T* row = y + (int64_t{tile.image} * params.rows.out + p) * params.columns.out * params.k;
    if (params.k_vector) {
#pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        const int pixel = pass * 4 + lane / 8, chunk = lane % 8;
        const int32_t q = q_first + pixel, n = n_first + chunk * 8;
        const uint4 value = LoadChunk(staging + pixel * 128 + (chunk ^ pixel % 8) * 16);
        if (q < params.columns.out && n < params.k) {
          *reinterpret_cast<uint4*>(row + int64_t{q} * params.k + n) = value;
        }
      }
    } else {
      const int columns = min(64, params.k - n_first);
#pragma unroll 1
      for (int pixel = 0; pixel < 16 && q_first + pixel < params.columns.out; ++pixel) {
        for (int n = lane; n < columns; n += 32) {
          const uint32_t word =
              LoadWord(staging + pixel * 128 + (n / 8 ^ pixel % 8) * 16 + n % 8 / 2 * 4);
          const auto half = static_cast<unsigned short>(n % 2 == 0 ? word : word >> 16);
          reinterpret_cast<unsigned short*>(
              row)[int64_t{q_first + pixel} * params.k + n_first + n] = half;
        }
      }
    }
  }
}

// The same with the fused epilogue: the sums pass through shared memory in float32, 16 pixels by 32
// channels at a time.
template <typename T>
__device__ __forceinline__ void StoreFusedPixels(const Params& params, const PixelTile& tile,
                                                 const float (&acc)[2][8][4], uint32_t staging,
                                                 T* y, const FusedEpilogue& epilogue, int64_t base,
                                                 int n_first) {
  constexpr int kColumns = 32;
  static_assert(kStagingBytes >= 16 * kColumns * 4);
  using Rows = StagedRows<T, kColumns>;
  const Rows rows{staging};
  const int lane = Lane();
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int32_t block = threadIdx.x / 32 * 2 + i, down = block >> params.log2_across;
    const int32_t p = tile.row + down;
    const int32_t q_first = tile.column + (block - (down << params.log2_across)) * 16;
    const int32_t row_first = (tile.image * params.rows.out + p) * params.columns.out;
    // Pixels from q_first on, none where the tile ends below the image.
    const int pixels = p < params.rows.out ? min(16, params.columns.out - q_first) : 0;
#pragma unroll 1
    for (int c = 0; c < 64; c += kColumns) {
      auto stage = [&] {
        __syncwarp();
#pragma unroll
        for (int b = 0; b < 2; ++b) {
#pragma unroll
          for (int k = 0; k < 64; k += kColumns) {
            if (b == i && k == c) rows.Store(lane, acc[b][k / 8]);
          }
        }
        __syncwarp();
      };
      if (params.k_vector) {
        const int32_t n = n_first + c + Rows::Column(lane);
        const bool inside = n < params.k;
        auto offset_of = [&](int v) -> int64_t {
          const int pixel = Rows::Row(lane, v);
          if (!inside || pixel >= pixels) return -1;
          return base + int64_t{row_first + q_first + pixel} * params.k + n;
        };
        const StagedVectors<T, Rows::kVectors, false, 1> vectors(epilogue, n, inside, offset_of);
        stage();
        vectors.Finish(epilogue, y, offset_of, [&](int v, int q) {
          return rows.Quad(Rows::Row(lane, v), Rows::Column(lane) / 4 + q);
        });
      } else {
        stage();
        const int32_t n = n_first + c + lane;
#pragma unroll 1
        for (int pixel = 0; pixel < pixels && n < params.k; ++pixel) {
          const int32_t row = row_first + q_first + pixel;
          const int64_t at = base + int64_t{row} * params.k + n;
          const float sum = __uint_as_float(LoadWord(rows.Quad(pixel, lane / 4) + lane % 4 * 4));
          y[at] = FromFloat<T>(
              epilogue.template operator()<T, true>(sum, OutputPlace{at, row, n, /*inside=*/true}));
        }
      }
    }
  }
}

// An epilogue of scale, bias and a clamp (Clamps), on the accumulators, which are then
// stored as a plain tile's: half the bytes through shared memory. For even K.
__device__ __forceinline__ void ClampPixels(const Params& params, const FusedEpilogue& epilogue,
                                            int n_first, float (&acc)[2][8][4]) {
  const float lower = epilogue.params.activation == Activation::kNone ? -INFINITY : 0.0f;
  const float upper = epilogue.params.activation == Activation::kRelu6 ? 6.0f : INFINITY;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int32_t n = n_first + j * 8 + static_cast<int32_t>(threadIdx.x % 4) * 2;
    const ChannelTerms<2> terms = epilogue.Terms<2>(n < params.k ? n : 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = fmaf(acc[i][j][e], terms.scale[e % 2], terms.bias[e % 2]);
        acc[i][j][e] = MinNan(MaxNan(sum, lower), upper);
      }
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    FpropKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  using Tile = MmaTile<128, 64, 128, 4, 1, 1, 4>;
  using Filter = RowMatrix<T>;
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* filter = shared;
  unsigned char* staged = filter + params.k_blocks * 16 * Filter::kRowBytes;
  int2* table = reinterpret_cast<int2*>(staged + kStagingBytes * kThreads / 32);
  unsigned char* halo = reinterpret_cast<unsigned char*>(table + params.k_blocks * 8);
  const uint32_t staging = SharedAddress(staged);
  int32_t part, batch;
  params.column_parts.Divmod(blockIdx.y, &batch, &part);
  const int n_first = part * 64;
  const T* x = static_cast<const T*>(params.lhs) + batch * params.lhs_batch;
  const T* w = static_cast<const T*>(params.rhs) + batch * params.rhs_batch;

  for (int32_t i = threadIdx.x; i < params.k_blocks * 16 * Filter::kChunks; i += kThreads) {
    const int32_t row = i / Filter::kChunks, chunk = i % Filter::kChunks;
    int32_t run, pair;
    params.pairs_of_run.Divmod(row / 2, &run, &pair);
    const int32_t element = pair * 2 + row % 2 - params.run_lead;
    const bool valid = run < params.runs &&
                       static_cast<uint32_t>(element) < static_cast<uint32_t>(params.run_elements);
    const int n = n_first + chunk * 8;
    unsigned char* to = filter + Filter::Offset(row, chunk);
    if constexpr (Tag::kNarrow) {
      // The filter as (tap, column, reduction), from its last tap on.
      int32_t s, channel;
      params.c_divmod.Divmod(max(element, 0), &s, &channel);
      const int32_t taps = params.rows.filter * params.columns.filter;
      const int32_t tap = taps - 1 - (run * (params.columns.filter / params.runs_of_row) + s);
      const auto* source = reinterpret_cast<const unsigned short*>(w) +
                           (int64_t{tap} * params.k + n) * params.c + channel;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        reinterpret_cast<unsigned short*>(to)[e] =
            valid && n + e < params.k ? __ldg(source + e * params.c) : 0;
      }
      continue;
    }
    const auto* source = reinterpret_cast<const unsigned short*>(w) +
                         (int64_t{run} * params.run_elements + element) * params.k + n;
    if (params.k_vector) {
      *reinterpret_cast<uint4*>(to) = valid && n < params.k
                                          ? __ldg(reinterpret_cast<const uint4*>(source))
                                          : make_uint4(0, 0, 0, 0);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        reinterpret_cast<unsigned short*>(to)[e] =
            valid && n + e < params.k ? __ldg(source + e) : 0;
      }
    }
  }
  for (int32_t i = threadIdx.x; i < params.k_blocks * 8; i += kThreads) {
    int32_t run, pair;
    params.pairs_of_run.Divmod(i, &run, &pair);
    const int32_t r = run / params.runs_of_row, s = run % params.runs_of_row;
    const int32_t offset =
        r * params.rows.dilation * params.pitch + s * params.columns.dilation * params.c + pair * 2;
    auto half = [&](int32_t e) {
      return static_cast<uint32_t>(pair * 2 + e - params.run_lead) <
                     static_cast<uint32_t>(params.run_elements)
                 ? 0xffff << (e * 16)
                 : 0;
    };
    table[i] = run < params.runs ? make_int2(offset * 2, half(0) | half(1)) : make_int2(0, 0);
  }

  using Loader = std::conditional_t<Tag::kByChunks, ChunkLoader<T>, HaloLoader<T>>;
  Loader loader(params, x);
  auto store_to = [&](unsigned char* to) {
    return [&params, to](int32_t row, int32_t pair, uint32_t value) {
      const int32_t at = row * params.pitch + pair * 2;
      *reinterpret_cast<uint32_t*>(to + at * 2) = value;
      if (params.copy_bytes > 0) {
        // The element before a row's first is the last of the row above, which no window wants.
        auto* copy = reinterpret_cast<unsigned short*>(to + params.copy_bytes) + at;
        copy[-1] = static_cast<unsigned short>(value);
        copy[0] = static_cast<unsigned short>(value >> 16);
      }
    };
  };
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // Where the window of this lane's pixel begins, in each of the warp's two blocks.
  uint32_t window[Tile::kBlocksM];
  const uint32_t halo_address = SharedAddress(halo);
#pragma unroll
  for (int i = 0; i < Tile::kBlocksM; ++i) {
    const int block = threadIdx.x / 32 * Tile::kBlocksM + i;
    const int32_t row = block >> params.log2_across;
    const int32_t column = (block - (row << params.log2_across)) * 16 + g;
    const int32_t at = row * params.rows.stride * params.pitch + params.halo_lead -
                       params.run_lead + column * params.columns.stride * params.c;
    window[i] = halo_address + (at % 2 == 0 ? at * 2 : params.copy_bytes + at * 2 - 2);
  }
  const uint32_t half_block = 8 * params.columns.stride * params.c * 2;
  const uint32_t table_address = SharedAddress(table) + t * 8;
  const FragmentReader<T, Filter, true> reader(SharedAddress(filter), 0);

  // One k-block of 16 elements of the reduction.
  auto multiply = [&](int32_t k_block, uint32_t offset,
                      float (&acc)[Tile::kBlocksM][Tile::kBlocksN][4]) {
    uint32_t at[2], mask[2];
    LoadPair(table_address + k_block * 64, &at[0], &mask[0]);
    LoadPair(table_address + k_block * 64 + 32, &at[1], &mask[1]);
    uint32_t b[Tile::kBlocksN / 2][4];
    reader.Read(k_block, b);
#pragma unroll
    for (int i = 0; i < Tile::kBlocksM; ++i) {
      uint32_t a[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t from = window[i] + offset + at[half];
        a[half * 2] = LoadWord(from) & mask[half];
        a[half * 2 + 1] = LoadWord(from + half_block) & mask[half];
      }
#pragma unroll
      for (int j = 0; j < Tile::kBlocksN; ++j) {
        MultiplyAdd<T>(acc[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  };

  TwoBuffers<PixelTile> walk(params);
  if (walk.index < params.tiles) {
    if constexpr (Tag::kByChunks) {
      loader.Load(walk.tile, halo_address);
    } else {
      for (loader.Begin(walk.tile); loader.More();) {
        loader.Load();
        loader.Store(store_to(halo));
      }
    }
  }
  if constexpr (!Tag::kByChunks) __syncthreads();
  while (walk.index < params.tiles) {
    const uint32_t offset = walk.buffer, other = walk.Other(params.halo_bytes);
    const PixelTile next(params, walk.NextIndex());
    float acc[Tile::kBlocksM][Tile::kBlocksN][4] = {};
    if constexpr (Tag::kByChunks) {
      // This tile's copies have arrived, and nobody reads the tile before it any more.
      CopyAsyncWait<0>();
      __syncthreads();
      if (walk.NextIndex() < params.tiles) loader.Load(next, halo_address + other);
#pragma unroll 1
      for (int32_t k_block = 0; k_block < params.k_blocks; ++k_block) {
        multiply(k_block, offset, acc);
      }
    } else {
      if (walk.NextIndex() < params.tiles) loader.Begin(next);
      int32_t k_block = 0;
      // The next halo tile arrives in parts, each while some k-blocks are multiplied.
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
    if constexpr (!Tag::Epilogue::kPlain && Tag::kByChunks) {
      // (The pairs in flight leave no registers for this.)
      if (params.k_vector && Clamps(params.epilogue) && params.epilogue.residual == nullptr) {
        ClampPixels(params, epilogue, n_first, acc);
        finished = true;
      }
    }
    if (finished) {
      StorePixels(params, walk.tile, acc, of_warp,
                  static_cast<T*>(params.out) + batch * params.out_batch, n_first);
    } else if constexpr (!Tag::Epilogue::kPlain) {
      StoreFusedPixels(params, walk.tile, acc, of_warp, static_cast<T*>(params.out), epilogue,
                       batch * params.out_batch, n_first);
    }
    epilogue.FinishTile(walk.index * kTilePixels, (walk.index + 1) * kTilePixels, n_first,
                        min(n_first + kTileChannels, params.k));
    if constexpr (!Tag::kByChunks) __syncthreads();
    walk.Advance(next, params.halo_bytes);
  }
}

// kByChunks: the halo tile is copied by chunks of 16 bytes.
template <Op kOp, DType kType, int kChannels, int kCtasPerSm_, bool kByChunks_>
struct Fprop {
  // dgrad: of few output channels and stride 1.
  static_assert(kOp != Op::kWgrad && kChannels == kTileChannels);
  static constexpr bool kNarrow = kOp == Op::kDgrad;
  static constexpr bool kByChunks = kByChunks_;
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

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_FPROP_CUH_
