// few_channels, dgrad: the data gradient of a convolution with few input channels.
//
// GEMM: z[(n,h,q), (s,c)] = sum over (r, k) of dy[n, p(h,r), q, k] w[r,s,c,k] in the accumulators,
// then
//     dx[n,h,w,c] = sum over s of z[n, h, q(w,s), s, c]
// from shared memory. For a 7x7 filter 3 channels then fill 21 of 24 columns instead of 3 of 16. (A
// single convolution of groups of pixels, with structural zeros in the filter, would multiply these
// zeros by gradients, so a NaN would reach pixels that share no window with it.)
//
// Tile: 256 pixels (16 blocks of 16 neighbours in a row of dy) by 16, 24, 40 or 48 columns (s, c),
// 4 warps of 4 blocks; the outer loop of the reduction runs over 128 bytes of dy's channels (64
// 16-bit or 32 float32 channels, 4 k-blocks), the inner loop over taps. The rows of a warp's blocks
// are congruent modulo the stride, so they share their taps. CTA b processes tiles b, b +
// gridDim.x, ... Shared memory, at most 100 KB (float32: 200): the halo tile of dy (128 bytes for
// each pixel), later overwritten by z (24 KB, 56 KB for 48 columns); the filter in the order of
// fragments, 256 bytes for 8 columns of a filter row's k-block; a table with the first term and the
// number of terms of each element of a row of dx. Registers: 32 to 96 accumulators; at most 102, or
// 255 for 48 columns, float32 and three products.
//
// Synchronisation: cp.async loads 128 bytes of each pixel of the halo tile; the MMAs follow after a
// barrier. At the end of the reduction z overwrites the halo tile between two barriers. The pixels
// of the next tile are prefetched to L2 during the MMAs. Five CTAs (48 columns and float32: two or
// three) share an SM and hide each other's loads.
//
// Refuses: operands or results other than f16, bf16 or f32; groups; lhs_dilation; rank 3; filters
// stored as krsc; K whose rows are not multiples of 16 bytes; S C beyond the columns; halo tiles
// beyond the shared memory.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_DGRAD_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_DGRAD_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/split_tf32.cuh"
#include "cuda/few_channels/halo_loader.cuh"
#include "cuda/few_channels/params.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::few_channels {

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    DgradKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  using Gradient = OperandTile<T, kDgradPixels, 128, false>;
  constexpr int kBlocksN = Tag::kColumns / 8;
  constexpr int kBlocksM = 4;  // of a warp
  constexpr int kPitch = Tag::kPitch;
  constexpr int kPerWord = kWordElements<T>, kElements = kChunkElements<T>;
  constexpr int kPassBlocks = 4;  // k-blocks, of two chunks, of the halo tile
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* z = reinterpret_cast<float*>(shared);  // after the MMAs, overwrites the halo tile
  unsigned char* filter = shared + params.halo_bytes;
  const int32_t batch = blockIdx.y;
  const T* dy = static_cast<const T*>(params.lhs) + batch * params.lhs_batch;
  const T* w = static_cast<const T*>(params.rhs) + batch * params.rhs_batch;
  const int log2_columns = 4 + params.log2_across;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;

  // The filter in the order of fragments: (r, k-block, block of 8 columns, lane, two words).
  const int32_t columns = params.columns.filter * params.c;
  const int32_t chunks = params.k_blocks * 2;  // of channels
  for (int32_t i = threadIdx.x; i < params.rows.filter * kBlocksN * 8 * chunks; i += kThreads) {
    const int32_t chunk = i % chunks, line = i / chunks;
    const int32_t r = line / (kBlocksN * 8), n = line % (kBlocksN * 8);
    const bool valid = n < columns && chunk * kElements < params.k;
    uint32_t words[4] = {};
    if constexpr (Tag::kNarrow) {
      // The filter as (tap, k, column), from its last tap on.
      int32_t s, column;
      params.c_divmod.Divmod(n, &s, &column);
      const int32_t tap =
          (params.rows.filter - 1 - r) * params.columns.filter + params.columns.filter - 1 - s;
      using Bits = std::conditional_t<sizeof(T) == 2, unsigned short, uint32_t>;
      const auto* source = reinterpret_cast<const Bits*>(w) +
                           (int64_t{tap} * params.k + chunk * kElements) * params.c + column;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        if (valid) {
          words[e / kPerWord] |= uint32_t{__ldg(source + e * params.c)} << (e % kPerWord * 16);
        }
      }
    } else {
      const T* source = w + (int64_t{r} * columns + n) * params.k + chunk * kElements;
      const uint4 value =
          valid ? __ldg(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
      words[0] = value.x, words[1] = value.y, words[2] = value.z, words[3] = value.w;
    }
    const int32_t fragment = (r * params.k_blocks + chunk / 2) * kBlocksN + n / 8;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      *reinterpret_cast<uint32_t*>(filter + (fragment * 32 + n % 8 * 4 + e) * 8 + chunk % 2 * 4) =
          Rounded<Tag>(words[e]);
    }
  }
  // For each element of a row of dx: its first term in a row of z, and the number of terms.
  int2* sums =
      reinterpret_cast<int2*>(filter + params.rows.filter * params.k_blocks * kBlocksN * 256);
  for (int32_t i = threadIdx.x; i < params.tile_columns * params.c; i += kThreads) {
    int32_t column, channel;
    params.c_divmod.Divmod(i, &column, &channel);
    // q stride = column + pad - s dilation, with q counted from the halo tile's first column.
    int32_t numerator = column + params.columns.pad - params.first_column * params.columns.stride;
    int32_t s = 0;
    while (s < params.columns.filter && numerator % params.columns.stride != 0) {
      ++s;
      numerator -= params.columns.dilation;
    }
    const int32_t left = params.columns.filter - s + params.column_period - 1;
    const int32_t q = numerator / params.columns.stride;
    sums[i] = make_int2(q * kPitch + s * params.c + channel, left / params.column_period);
  }
  // The rows of dx of a warp's blocks are congruent modulo the stride, so they share their taps.
  // The plan chooses such tiles.
  const int log2_rows = params.log2_across < 2 ? 2 - params.log2_across : 0;
  const int32_t warp_row = warp >> (params.log2_across > 2 ? params.log2_across - 2 : 0);
  int32_t block_pixel[kBlocksM], block_row[kBlocksM];
  uint32_t
      block_offset[kBlocksM];  // in the halo tile, from the first pixel of the warp's first row
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) {
    const int down = i >> (2 - log2_rows);
    const int across = params.log2_across > 2 ? warp % (1 << (params.log2_across - 2)) * 4 + i
                                              : i - (down << (2 - log2_rows));
    block_row[i] = warp_row + down * 4;
    block_pixel[i] = across * 16;
    block_offset[i] = ((params.row_stride_divmod.Div(down * 4) << log2_columns) + block_pixel[i]) *
                      Gradient::kRowBytes;
  }
  // Taps of the warp's rows: r_first, r_first + row_period, ...
  int32_t r_first = 0;
  {
    int32_t numerator = warp_row + params.rows.pad - params.first_row * params.rows.stride;
    while (r_first < params.rows.filter &&
           (numerator - r_first * params.rows.dilation) % params.rows.stride != 0) {
      ++r_first;
    }
  }
  const uint32_t gradient = SharedAddress(shared) + Gradient::Offset(lane % 16, lane / 16);
  const uint32_t fragment_address = SharedAddress(filter) + lane * 8;
  const uint32_t copied =
      SharedAddress(shared) + Gradient::Offset(threadIdx.x / 8, threadIdx.x % 8);
  const int32_t k_bytes = params.k * int32_t{sizeof(T)};

  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const PixelTile tile(params, index);
    const int32_t p_first = params.first_row + params.row_stride_divmod.Div(tile.row);
    const int32_t q_first = params.first_column + params.column_stride_divmod.Div(tile.column);
    float acc[kBlocksM][kBlocksN][4] = {};
    for (int32_t first = 0; first < params.k_blocks; first += kPassBlocks) {
      __syncthreads();
      const int32_t k = (first * 2 + static_cast<int32_t>(threadIdx.x % 8)) * kElements;
      const T* image =
          dy + int64_t{tile.image} * (params.rows.out * params.columns.out) * params.k + k;
      for (int32_t across = 0; across < 1 << params.log2_across; ++across) {
        // One column of blocks of 16 pixels.
        const int32_t q = q_first + across * 16 + static_cast<int32_t>(threadIdx.x / 8);
        const bool inside =
            static_cast<uint32_t>(q) < static_cast<uint32_t>(params.columns.out) && k < params.k;
        uint32_t to = copied + across * 16 * Gradient::kRowBytes;
        int32_t pixel = p_first * params.columns.out + q;
#pragma unroll 4
        for (int32_t row = 0; row < params.halo_rows; ++row) {
          const bool valid = inside && static_cast<uint32_t>(p_first + row) <
                                           static_cast<uint32_t>(params.rows.out);
          CopyAsync<16>(to, OffsetBytes(image, pixel, k_bytes), valid);
          to += Gradient::kRowBytes << log2_columns;
          pixel += params.columns.out;
        }
      }
      CopyAsyncCommit();
      CopyAsyncWait<0>();
      __syncthreads();
      // The tile of 48 columns has too few registers for this.
      if (kBlocksN <= 5 && (first == 0 || sizeof(T) == 4) && index + gridDim.x < params.tiles) {
        // Prefetches the next tile's pixels to L2, a cache line of 128 bytes each.
        const PixelTile next(params, index + gridDim.x);
        const int32_t p_next = params.first_row + params.row_stride_divmod.Div(next.row);
        const int32_t q_next = params.first_column + params.column_stride_divmod.Div(next.column);
        const T* next_image =
            dy + int64_t{next.image} * (params.rows.out * params.columns.out) * params.k +
            first * 2 * kElements;
        for (int32_t i = threadIdx.x; i < params.halo_rows << log2_columns; i += kThreads) {
          const int32_t down = i >> log2_columns;
          const int32_t p = p_next + down, q = q_next + i - (down << log2_columns);
          if (static_cast<uint32_t>(p) < static_cast<uint32_t>(params.rows.out) &&
              static_cast<uint32_t>(q) < static_cast<uint32_t>(params.columns.out)) {
            PrefetchToL2(OffsetBytes(next_image, p * params.columns.out + q, k_bytes));
          }
        }
      }
      const int32_t k_blocks = min(kPassBlocks, params.k_blocks - first);
      for (int32_t r = r_first; r < params.rows.filter; r += params.row_period) {
        const int32_t row = params.row_stride_divmod.Div(warp_row + params.rows.pad -
                                                         params.first_row * params.rows.stride -
                                                         r * params.rows.dilation);
        const uint32_t row_address = gradient + (row << log2_columns) * Gradient::kRowBytes;
        auto read_a = [&](int32_t k_block, int i, uint32_t (&a)[4]) {
          LoadMatrices((row_address + block_offset[i]) ^ (k_block * 32), a);
        };
        auto read_b = [&](int32_t k_block, uint32_t (&b)[kBlocksN][2]) {
#pragma unroll
          for (int j = 0; j < kBlocksN; ++j) {
            LoadPair(
                fragment_address + ((r * params.k_blocks + first + k_block) * kBlocksN + j) * 256,
                &b[j][0], &b[j][1]);
          }
        };
        if constexpr (Tag::kThreeTf32) {
#pragma unroll 1
          for (int32_t k_block = 0; k_block < k_blocks; k_block += kSplitRunSteps) {
            uint32_t a[kSplitRunSteps][4], b[kSplitRunSteps][kBlocksN][2];
            auto read_block = [&](int i, uint32_t (&to)[kSplitRunSteps][4]) {
#pragma unroll
              for (int step = 0; step < kSplitRunSteps; ++step) read_a(k_block + step, i, to[step]);
            };
#pragma unroll
            for (int step = 0; step < kSplitRunSteps; ++step) read_b(k_block + step, b[step]);
            read_block(0, a);
            const uint32_t left = MultiplySplitRun(b, a, acc, read_block, [](auto) {});
            if (__any_sync(0xffffffff, left != 0)) {
              PromoteWithCare(left, acc, [&](int step, auto& of_a, auto& of_b) {
#pragma unroll
                for (int i = 0; i < kBlocksM; ++i) read_a(k_block + step, i, of_a[i]);
                read_b(k_block + step, of_b);
              });
            }
          }
        } else {
#pragma unroll 2
          for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
            uint32_t b[kBlocksN][2];
            read_b(k_block, b);
#pragma unroll
            for (int i = 0; i < kBlocksM; ++i) {
              uint32_t a[4];
              read_a(k_block, i, a);
              RoundFragment<T>(a);
#pragma unroll
              for (int j = 0; j < kBlocksN; ++j) MultiplyAdd<T>(acc[i][j], a, b[j][0], b[j][1]);
            }
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int32_t pixel = block_pixel[i] + upper * 8 + g;
        float* row = z + ((block_row[i] << log2_columns) + pixel) * kPitch + t * 2;
        // Outside dy the product with an infinite weight would be 0 * Inf = NaN.
        const bool inside =
            static_cast<uint32_t>(q_first + pixel) < static_cast<uint32_t>(params.columns.out);
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
          *reinterpret_cast<float2*>(row + j * 8) =
              inside ? make_float2(acc[i][j][upper * 2], acc[i][j][upper * 2 + 1])
                     : make_float2(0, 0);
        }
      }
    }
    __syncthreads();
    const int32_t elements = min(params.tile_columns, params.columns.in - tile.column) * params.c;
    const int32_t rows = min(params.tile_rows, params.rows.in - tile.row);
    T* out = static_cast<T*>(params.out) + batch * params.out_batch +
             ((int64_t{tile.image} * params.rows.in + tile.row) * params.columns.in + tile.column) *
                 params.c;
    const typename Tag::Epilogue epilogue(params.epilogue);
    // The rows of a warp are four apart; two warps share a row of 128 pixels. The number of rows is
    // a compile-time constant, so that no missing rows are added and the distances are constant.
    const int32_t row_elements = params.columns.in * params.c;
    auto add_rows = [&](auto log2_across) {
      constexpr int kAcross = decltype(log2_across)::value;
      constexpr int kPixels = 16 << kAcross;  // of a row
      constexpr int kRows = kAcross < 2 ? 4 >> kAcross : 1;
      constexpr int kWarpsOfRow = kAcross == 3 ? 2 : 1;
      const int32_t first_row = warp / kWarpsOfRow;
      for (int32_t element = lane + warp % kWarpsOfRow * 32; element < elements;
           element += 32 * kWarpsOfRow) {
        const int2 at = sums[element];
        const float* from = z + first_row * (kPixels * kPitch) + at.x;
        float sum[kRows] = {};
        // Loads four terms together; one at a time would wait for shared memory each time.
#pragma unroll 1
        for (int32_t left = at.y; left > 0; left -= 4, from += 4 * params.z_step) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              if (e < left) sum[i] += from[e * params.z_step + i * (4 * kPixels * kPitch)];
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int32_t row = first_row + i * 4;
          if constexpr (!Tag::Epilogue::kPlain) {
            const int32_t column = params.c_divmod.Div(element),
                          channel = element - column * params.c;
            const int32_t pixel =
                (tile.image * params.rows.in + tile.row + row) * params.columns.in + tile.column +
                column;
            const OutputPlace place{batch * params.out_batch + int64_t{pixel} * params.c + channel,
                                    pixel, channel, row < rows};
            sum[i] = epilogue.template operator()<T>(sum[i], place);
          }
          if (row < rows) out[row * row_elements + element] = FromFloat<T>(sum[i]);
        }
      }
    };
    if (params.log2_across == 0) {
      add_rows(std::integral_constant<int, 0>());
    } else if (params.log2_across == 1) {
      add_rows(std::integral_constant<int, 1>());
    } else if (params.log2_across == 2) {
      add_rows(std::integral_constant<int, 2>());
    } else {
      add_rows(std::integral_constant<int, 3>());
    }
    epilogue.FinishTile(index * kDgradPixels, (index + 1) * kDgradPixels, 0, params.c);
  }
}

template <Op kOp, DType kType, int kColumns_, int kCtasPerSm_>
struct Dgrad {
  // fprop: few output channels, stride 1.
  static_assert(kOp != Op::kWgrad);
  static constexpr bool kNarrow = kOp == Op::kFprop, kThreeTf32 = false;
  static constexpr int kColumns = kColumns_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kPitch = DgradPitch(kColumns);
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
    return jaxconv::Launch<DgradKernel<Tag>>(plan.kernel->name, ConfigOf(launch), stream, params);
  }
};

// Float32 operands as three TF32 products.
template <Op kOp, DType kType, int kColumns, int kCtasPerSm>
struct Dgrad3xTf32 : Dgrad<kOp, kType, kColumns, kCtasPerSm> {
  static_assert(kType == DType::kF32);
  static constexpr bool kThreeTf32 = true;
};

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_DGRAD_CUH_
