// few_channels, dgrad of stride 2 by wgmma (sm_90a): dx[n, h, w, c] = sum over (r, s, k) of
// dy[n, (h + pad - r) / 2, (w + pad - s) / 2, k] w[r, s, c, k], for at most four input channels and
// 64 output channels.
//
// A row h with h + pad = 2 a uses the even filter rows, on rows a, a - 1, ... of dy; the row before
// it uses the odd filter rows, on rows a - 1, a - 2, ... Both are computed together:
//
//     1  z[class, (s, c), q] = sum over r, k of w[r, s, c, k] dy[a - j, q, k]    wgmma, float32
//     2  dx[class, w, c]     = sum over s of z[class, (s, c), q(w, s)]           from shared memory
//
// GEMM: rows are (class, s, c), 32 for each class; columns are 112 pixels of a row of dy; the
// reduction runs over k and the rows of dy. Filter row 0 meets a row of dy for which the odd class
// has no tap, so it has separate accumulators: zeros for the odd class would be multiplied by
// gradients, and a NaN would reach pixels that share no window with it. Columns outside dy are set
// to zero in z; rows outside dy are skipped.
//
// Tile: a pair of rows of dx. A CTA has consecutive pairs, and a ring of rows of dy, which TMA
// fills; each row is loaded once for all its pairs. Two warpgroups alternate in pairs, with the
// filter in registers. Registers: 2 x 56 accumulators, 64 words of the filter, at most 224. Shared
// memory: z of each warpgroup (30 KB), eight rows of dy of 14 KB.
//
// Synchronisation: a consumer waits for the rows of its pair, releases those that its next pair
// does not need, and stores z, which its threads sum between two barriers.
//
// Refuses: strides other than 2, dilation, other filters than 7x7, more than 64 output channels or
// K not in multiples of 8.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_ROW_PAIRS_SM90_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_ROW_PAIRS_SM90_CUH_

#include <cuda.h>

#include <cstdint>
#include <cstring>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/few_channels/rows_plan.h"
#include "cuda/few_channels/rows_ring_sm90.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::few_channels {

inline constexpr int kGradientRowBytes = kRowPixels * 128;
inline constexpr int kPairsThreads = (kRowConsumers + 1) * 128;

// Sums the terms of two neighbouring pixels, from `column` on, of row h and the row before it, and
// stores the pixels inside dx. `from` is the element of z for filter column 0 of the second pixel;
// `to` is row h.
template <int kChannels, int kFilterColumns, typename T>
__device__ __forceinline__ void StoreSums(const PairsParams& params, const float* from, T* to,
                                          int32_t h, int32_t column) {
  float sums[2][2 * kChannels] = {};  // of row h first
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
#pragma unroll
      for (int s = 0; s < kFilterColumns; ++s) {
        sums[row][(1 - s % 2) * kChannels + channel] +=
            from[(row * 32 + s * 4 + channel) * kZPitch - (s + 1) / 2];
      }
    }
  }
  const bool whole = params.whole_words && column >= 0 && column + 1 < params.in_columns;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (static_cast<uint32_t>(h - row) >= static_cast<uint32_t>(params.in_rows)) continue;
    T* const at = to + (column - row * params.in_columns) * kChannels;
    T rounded[2 * kChannels];
#pragma unroll
    for (int i = 0; i < 2 * kChannels; ++i) rounded[i] = FromFloat<T>(sums[row][i]);
    if (whole) {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        uint32_t word;
        memcpy(&word, rounded + i * 2, sizeof(word));
        reinterpret_cast<uint32_t*>(at)[i] = word;
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < 2 * kChannels; ++i) {
      const int32_t pixel = column + i / kChannels;
      if (static_cast<uint32_t>(pixel) < static_cast<uint32_t>(params.in_columns)) {
        at[i] = rounded[i];
      }
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(kPairsThreads, 1)
    RowPairsKernel(const __grid_constant__ PairsParams params,
                   const __grid_constant__ CUtensorMap dy_map) {
  using T = typename Tag::T;
  constexpr int kShared = Tag::kFilterRows / 2;  // rows of dy with taps of both classes
  constexpr int kWindow = kShared + 1;
  constexpr int kSteps = kRowChannels / 16;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * kPairSlots];
  const uint32_t first = SharedAddress(shared);
  const RowRing<kGradientRowBytes, kPairSlots> ring{first, SharedAddress(barriers)};
  auto* const all_z = reinterpret_cast<float*>(shared + kPairSlots * kGradientRowBytes);
  ring.Init(1, kRowConsumers);
  for (int i = threadIdx.x; i < kRowConsumers * kZFloats; i += kPairsThreads) all_z[i] = 0;
  __syncthreads();
  const int32_t image_first = static_cast<int32_t>(blockIdx.y) * params.batch_images;
  const auto first_unit = static_cast<int32_t>(int64_t{params.units} * blockIdx.x / gridDim.x);
  const auto end = static_cast<int32_t>(int64_t{params.units} * (blockIdx.x + 1) / gridDim.x);
  const auto warpgroup = __shfl_sync(0xffffffff, static_cast<int32_t>(threadIdx.x / 128), 0);
  if (warpgroup == kRowConsumers) {
    LowerRegisters<24>();
    if (threadIdx.x % 128 >= 32) return;
    uint32_t row = 0;
    for (int32_t unit = first_unit; unit < end;) {
      const Band band(params.out_rows, params.strips, unit, end);
      const int32_t p = params.first_row + band.row - kShared;
      const int32_t q = params.first_column + band.strip * params.strip_columns;
      for (int32_t i = 0; i < band.count + kShared; ++i, ++row) {
        BarrierWait(ring.Empty(row), ring.Parity(row) ^ 1);
        if (ElectOne()) {
          BarrierArriveExpect(ring.Full(row), kGradientRowBytes);
          CopyTile4d(ring.Slot(row), &dy_map, ring.Full(row), 0, q, p + i,
                     image_first + band.image);
        }
        __syncwarp();
      }
      unit += band.count;
    }
    return;
  }

  RaiseRegisters<232>();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
  const bool odd = warp >= 2;  // the class of this warp's rows
  // For the rows of dy in order; the last has filter row 0.
  uint32_t a[kWindow][kSteps][4];
  {
    const T* w = static_cast<const T*>(params.w) + blockIdx.y * params.w_batch;
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int line = warp % 2 * 16 + e % 2 * 8 + g, s = line / 4, channel = line % 4;
          const int r = (kShared - j) * 2 - odd;
          const int k = step * 16 + e / 2 * 8 + t * 2;
          const bool valid =
              r >= 0 && s < Tag::kFilterColumns && channel < params.c && k < params.k;
          const T* from = w + ((r * Tag::kFilterColumns + s) * params.c + channel) * params.k + k;
          a[j][step][e] = valid ? __ldg(reinterpret_cast<const uint32_t*>(from)) : 0;
        }
      }
    }
  }
  RowReader reader(ring);
  float* const z = all_z + warpgroup * kZFloats;
  float* const z_store = z + (warp * 16 + g) * kZPitch + kZLead + t * 2;
  const int barrier = 1 + warpgroup;
  float acc[kRowPixels / 2], alone[kRowPixels / 2];
#pragma unroll
  for (int i = 0; i < kRowPixels / 2; ++i) acc[i] = alone[i] = 0;
  uint32_t row = 0;
  for (int32_t unit = first_unit; unit < end;) {
    const Band band(params.out_rows, params.strips, unit, end);
    const int32_t u_first = band.strip * params.strip_columns;
    const int32_t q_first = params.first_column + u_first;
#pragma unroll 1
    for (int32_t i = (warpgroup ^ (unit - first_unit)) & 1; i < band.count; i += 2) {
      const int32_t last = params.first_row + band.row + i;  // row of dy
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        BarrierWait(ring.Full(row + i + j), ring.Parity(row + i + j));
      }
      WgmmaFence();
      int any = 0;
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const bool inside =
            static_cast<uint32_t>(last - kShared + j) < static_cast<uint32_t>(params.dy_rows);
        const uint64_t descriptor = KMajorDescriptor(ring.Slot(row + i + j));
        if (inside) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            if (j < kShared) {
              WgmmaFromRegisters(T{}, acc, a[j][step], descriptor + step * 2, any | step);
            } else {
              WgmmaFromRegisters(T{}, alone, a[j][step], descriptor + step * 2, step);
            }
          }
          if (j < kShared) any = 1;
        }
      }
      WgmmaCommit();
      NamedBarrierSync(barrier, 128);  // the previous z has been read
      WgmmaWait<0>();
      if (i + 2 < band.count) reader.FreeUntil(row + i + 2);
      if (any == 0) {
#pragma unroll
        for (float& sum : acc) sum = 0;
      }
      const bool with_alone =
          !odd && static_cast<uint32_t>(last) < static_cast<uint32_t>(params.dy_rows);
#pragma unroll
      for (int j = 0; j < kRowPixels / 8; ++j) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          float sum[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int at = j * 4 + upper * 2 + e;
            sum[e] = WgmmaResult(acc[at]);
            if (with_alone) sum[e] += WgmmaResult(alone[at]);
          }
          *reinterpret_cast<float2*>(z_store + upper * 8 * kZPitch + j * 8) =
              make_float2(sum[0], sum[1]);
        }
      }
      NamedBarrierSync(barrier, 128);
      if (q_first < 0 || q_first + kRowPixels > params.dy_columns) {
        // Columns outside dy: zero times an infinite weight would be NaN.
        const bool behind = threadIdx.x % 128 >= kZLines;
        const int outside = behind ? max(0, params.dy_columns - q_first) : 0;
        const int inside = behind ? kRowPixels : min(kRowPixels, -q_first);
        for (int column = outside; column < inside; ++column) {
          z[threadIdx.x % kZLines * kZPitch + kZLead + column] = 0;
        }
        NamedBarrierSync(barrier, 128);
      }
      // A thread's pair of pixels: u = q of filter column 0 for its second pixel.
      const auto of_strip = static_cast<int32_t>(threadIdx.x % 128);
      const int32_t u = params.first_pair_column + u_first + of_strip;
      if (of_strip < min(params.strip_columns, params.pair_columns - u_first)) {
        const float* from = z + kZLead + u - q_first;
        const int32_t column = 2 * u - 1 - params.pad_columns;
        const int32_t h = 2 * last - params.pad_rows;
        T* const to =
            static_cast<T*>(params.dx) + (int64_t{image_first + band.image} * params.in_rows + h) *
                                             (params.in_columns * params.c);
        if (params.c == 1) {
          StoreSums<1, Tag::kFilterColumns>(params, from, to, h, column);
        } else if (params.c == 2) {
          StoreSums<2, Tag::kFilterColumns>(params, from, to, h, column);
        } else if (params.c == 3) {
          StoreSums<3, Tag::kFilterColumns>(params, from, to, h, column);
        } else {
          StoreSums<4, Tag::kFilterColumns>(params, from, to, h, column);
        }
      }
    }
    row += band.count + kShared;
    reader.template EndBand<kWindow>(row, barrier);
    unit += band.count;
  }
}

template <Op kOp, DType kType, int kFilterRows_, int kFilterColumns_>
struct RowPairs {
  static_assert(kOp == Op::kDgrad);
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kFilterRows = kFilterRows_, kFilterColumns = kFilterColumns_;
  static_assert(kFilterRows % 2 != 0 && kFilterColumns % 2 != 0 && kFilterColumns <= 8);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    PairsParams params = plan.As<PairsParams>();
    params.w = operands.rhs;
    params.dx = operands.out;
    DenseTensor dy;
    dy.dtype = kType;
    dy.rank = 4;
    dy.address = operands.lhs;
    dy.extent[0] = params.k;
    dy.extent[1] = params.dy_columns;
    dy.extent[2] = params.dy_rows;
    dy.extent[3] = params.images;
    const int32_t box[4] = {kRowChannels, kRowPixels, 1, 1};
    CUtensorMap map;
    JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(dy, box, &map));
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(params.grid_x), static_cast<unsigned>(params.grid_y));
    config.threads = kPairsThreads;
    config.shared_bytes = static_cast<size_t>(params.shared_bytes);
    return jaxconv::Launch<RowPairsKernel<Tag>>(plan.kernel->name, config, stream, params, map);
  }
};

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_ROW_PAIRS_SM90_CUH_
