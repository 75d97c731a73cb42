// few_channels, wgrad by wgmma (sm_90a): dw[(r,s,c), k] = sum over (n, p, q) of
// x[n, p stride + r - pad, q stride + s - pad, c] dy[(n,p,q), k], for filter rows of few elements.
//
// GEMM: rows are 64 output channels, columns the elements of a window, the reduction runs over the
// pixels of a row of y. dy is A as it lies in memory (MN-major). B consists of planes, one for each
// filter row and eight elements of its windows:
//
//     row of x      |p0 p0 p0 p1 p1 p1 p2 p2 p2 ...         three channels, stride 2: windows begin
//     windows       q = 0: p0 ... p6, q = 1: p2 ... p8       six elements apart, 21 elements each
//     plane 0       |p0 p0 p0 p1 p1 p1 p2 p2|p2 p2 p2 p3 p3 p3 p4 p4|...    16 bytes for each pixel
//     plane 1       |p2 p3 p3 p3 p4 p4 p4 p5|p4 p5 ...                      of y: a core matrix is
//     plane 2       |p5 p5 p6 p6 p6 p7 p7 p7|p7 p7 ...                      8 pixels, 128 bytes
//
// A plane has the same length in every row, so the planes of all filter rows are a constant distance
// apart: one wgmma multiplies 16 pixels for the whole filter (7x7, 3 channels: 168 columns, of which
// 147 are used). Elements beyond a window fill columns that are not stored, so they may be anything.
//
// A CTA has consecutive rows of y. TMA loads its rows of x and of dy, with zeros outside; two
// warpgroups alternate in spreading rows of x into planes; other warpgroups, one for each 64
// channels, only issue wgmmas, and store their sums once, at the end, for common/splitk_reduce.cuh.
// Copies begin inside x; the spreading threads replace elements left of it by zeros.
//
// The ring of planes consists of groups of `stride` rows of x, because each row of y needs one group
// more. A window must lie in consecutive groups, so the first groups are stored a second time behind
// the last. Pixels of a strip beyond y have zeros: their gradients are zero, but their x may be NaN.
//
// Registers: half as many accumulators as columns. Shared memory for 112 pixels and 7x7: rows of dy
// of 14 KB (4: 57 KB), groups of 10.5 KB (8 + 3: 115 KB), rows of x (4 pairs: 11 KB).
//
// Refuses: filter rows of more elements than the planes have, strides of rows other than the
// instance's, dilation, rows of x that are not multiples of 16 bytes, K not in multiples of 8.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_ROW_WINDOWS_SM90_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_ROW_WINDOWS_SM90_CUH_

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/splitk_reduce.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/few_channels/rows_plan.h"
#include "cuda/few_channels/rows_ring_sm90.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::few_channels {

// A ring whose slots are filled and released by some number of arrivals.
template <uint32_t kSlots_>
struct SlotRing {
  static constexpr uint32_t kSlots = kSlots_;
  uint32_t barriers;

  __device__ __forceinline__ uint32_t Full(uint32_t i) const { return barriers + i % kSlots * 8; }
  __device__ __forceinline__ uint32_t Empty(uint32_t i) const {
    return barriers + (kSlots + i % kSlots) * 8;
  }
  __device__ __forceinline__ void WaitFull(uint32_t i) const {
    BarrierWait(Full(i), i / kSlots & 1);
  }
  __device__ __forceinline__ void WaitEmpty(uint32_t i) const {
    BarrierWait(Empty(i), (i / kSlots & 1) ^ 1);
  }
  // Called by one thread.
  __device__ __forceinline__ void Init(int writers, int readers) const {
    for (uint32_t i = 0; i < kSlots; ++i) {
      BarrierInit(Full(i), writers);
      BarrierInit(Empty(i), readers);
    }
  }
};

template <class Tag, int kPixels>
__global__ void __launch_bounds__(Tag::kThreads, 1)
    RowWindowsKernel(const __grid_constant__ WindowsParams params,
                     const __grid_constant__ CUtensorMap x_map,
                     const __grid_constant__ CUtensorMap dy_map) {
  using T = typename Tag::T;
  constexpr RowWindowsInstance kShape = Tag::kShape;
  constexpr int kRows = kShape.stride, kWindow = kShape.window_groups();
  constexpr int kPlanes = kShape.row_planes, kSpreaders = RowWindowsInstance::kSpreaders;
  constexpr uint32_t kGroups = RowWindowsInstance::kGroups;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8)
      uint64_t barriers[2 * (kGroups + kShape.gradient_rows + RowWindowsInstance::kRawGroups)];
  constexpr uint32_t kPlaneBytes = kPixels * 16, kGradientBytes = kPixels * 128;
  constexpr uint32_t kGroupBytes = kPlaneBytes * (kRows * kPlanes);
  const uint32_t gradients = SharedAddress(shared);
  const uint32_t groups = gradients + kShape.gradient_rows * kShape.consumers * kGradientBytes;
  const uint32_t raw = groups + (kGroups + kWindow - 1) * kGroupBytes;
  const SlotRing<kGroups> ring{SharedAddress(barriers)};
  const SlotRing<kShape.gradient_rows> gradient_ring{ring.barriers + 2 * kGroups * 8};
  const SlotRing<RowWindowsInstance::kRawGroups> raw_ring{gradient_ring.barriers +
                                                          2 * kShape.gradient_rows * 8};
  if (threadIdx.x == 0) {
    ring.Init(4, 4 * kShape.consumers);  // warps
    gradient_ring.Init(1, 4 * kShape.consumers);
    raw_ring.Init(1, 4);
    BarrierInitFence();
  }
  __syncthreads();
  int32_t part, batch;
  params.column_parts.Divmod(static_cast<int32_t>(blockIdx.y), &batch, &part);
  const int n_first = part * (kShape.consumers * kRowChannels);
  const int32_t image_first = batch * params.batch_images;
  const auto first_unit = static_cast<int32_t>(int64_t{params.units} * blockIdx.x / gridDim.x);
  const auto end = static_cast<int32_t>(int64_t{params.units} * (blockIdx.x + 1) / gridDim.x);
  const auto warpgroup = __shfl_sync(0xffffffff, static_cast<int32_t>(threadIdx.x / 128), 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;

  if (warpgroup == kShape.consumers + kSpreaders) {
    // Warp 0 loads dy, warp 1 loads x.
    if constexpr (Tag::kSetsRegisters) LowerRegisters<56>();
    const int loader = __shfl_sync(0xffffffff, warp, 0);
    if (loader > 1) return;
    uint32_t i = 0;
    for (int32_t unit = first_unit; unit < end;) {
      const Band band(params.out_rows, params.strips, unit, end);
      unit += band.count;
      if (loader == 0) {
#pragma unroll 1
        for (int32_t j = 0; j < band.count; ++j, ++i) {
          gradient_ring.WaitEmpty(i);
          if (ElectOne()) {
            BarrierArriveExpect(gradient_ring.Full(i), kShape.consumers * kGradientBytes);
#pragma unroll
            for (int part_of = 0; part_of < kShape.consumers; ++part_of) {
              CopyTile4d(gradients + (i % kShape.gradient_rows * kShape.consumers + part_of) *
                                         kGradientBytes,
                         &dy_map, gradient_ring.Full(i), n_first + part_of * kRowChannels,
                         band.strip * kPixels, band.row + j, image_first + band.image);
            }
          }
          __syncwarp();
        }
        continue;
      }
      // Copies begin inside x, at multiples of 16 bytes.
      const int32_t word = params.first_word + band.strip * params.strip_words;
      const uint32_t to = raw + (max(word, 0) - word) * 8;
      int32_t h = band.row * kRows - params.pad_rows;
#pragma unroll 1
      for (int32_t j = 0; j < band.count + kWindow - 1; ++j, ++i, h += kRows) {
        raw_ring.WaitEmpty(i);
        if (ElectOne()) {
          BarrierArriveExpect(raw_ring.Full(i), kRows * params.raw_row_bytes);
          CopyTile3d(to + i % raw_ring.kSlots * params.raw_group_bytes, &x_map, raw_ring.Full(i),
                     max(word, 0), h, image_first + band.image);
        }
        __syncwarp();
      }
    }
    return;
  }

  if (warpgroup >= kShape.consumers) {
    // Spreads every other group. A thread has a pixel, of all rows or of every other one.
    if constexpr (Tag::kSetsRegisters) LowerRegisters<112>();
    constexpr int kOfRow = kPixels > 64 ? 128 : 64, kSteps = (kRows * kOfRow + 127) / 128;
    const auto thread = static_cast<int32_t>(threadIdx.x % 128);
    const int32_t pixel = thread % kOfRow, row = thread / kOfRow;
    const bool in_strip = pixel < kPixels && row < kRows;
    const uint32_t element = params.lead_bytes + pixel * params.step_bytes;
    const uint32_t misaligned = element % 4 * 8;  // bits
    const uint32_t from = raw + row * params.raw_row_bytes + element / 4 * 4;
    const uint32_t to = groups + row * kPlanes * kPlaneBytes + pixel * 16;
    uint32_t group = 0;
    for (int32_t unit = first_unit; unit < end;) {
      const Band band(params.out_rows, params.strips, unit, end);
      unit += band.count;
      const bool valid = pixel < params.out_columns - band.strip * kPixels;
      // Elements of the window left of x.
      const int32_t outside =
          band.strip == 0 ? params.left_elements - pixel * params.step_bytes / 2 : 0;
#pragma unroll 1
      for (int32_t j = 0; j < band.count + kWindow - 1; ++j, ++group) {
        if (group % kSpreaders != static_cast<uint32_t>(warpgroup - kShape.consumers)) continue;
        raw_ring.WaitFull(group);
        uint32_t value[kSteps][kPlanes][4] = {};
        if (in_strip && valid) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            const uint32_t at = from + group % raw_ring.kSlots * params.raw_group_bytes +
                                step * (128 / kOfRow) * params.raw_row_bytes;
            uint32_t word[kPlanes * 4 + 1];
#pragma unroll
            for (int i = 0; i <= kPlanes * 4; ++i) word[i] = LoadWord(at + i * 4);
#pragma unroll
            for (int i = 0; i < kPlanes * 4; ++i) {
              value[step][i / 4][i % 4] = __funnelshift_r(word[i], word[i + 1], misaligned);
            }
            if (outside > 0) {
#pragma unroll
              for (int i = 0; i < kPlanes * 4; ++i) {
                uint32_t& pair = value[step][i / 4][i % 4];
                pair = outside <= 2 * i ? pair : outside == 2 * i + 1 ? pair & 0xffff0000 : 0;
              }
            }
          }
        }
        __syncwarp();
        if (lane == 0) BarrierArrive(raw_ring.Empty(group));
        ring.WaitEmpty(group);
        if (in_strip) {
          auto store = [&](uint32_t slot) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
              for (int plane = 0; plane < kPlanes; ++plane) {
                StoreChunk(to + slot * kGroupBytes +
                               (step * (128 / kOfRow) * kPlanes + plane) * kPlaneBytes,
                           value[step][plane]);
              }
            }
          };
          store(group % kGroups);
          if (kWindow > 1 && group % kGroups + 1 < kWindow) store(group % kGroups + kGroups);
        }
        FenceForCopies();
        __syncwarp();
        if (lane == 0) BarrierArrive(ring.Full(group));
      }
    }
    return;
  }

  if constexpr (Tag::kSetsRegisters) RaiseRegisters<168>();
  constexpr int kColumns = kShape.columns();
  float acc[kColumns / 2];
#pragma unroll
  for (float& sum : acc) sum = 0;

  // The row of y, the first group of its window, the groups that have arrived and that this warp
  // has released, and those that it releases with the row before.
  uint32_t row = 0, first = 0, arrived = 0, released = 0, until = 0;
  for (int32_t unit = first_unit; unit < end;) {
    const Band band(params.out_rows, params.strips, unit, end);
    unit += band.count;
#pragma unroll 1
    for (int32_t i = 0; i < band.count; ++i, ++row, ++first) {
#pragma unroll 1
      for (; arrived != first + kWindow; ++arrived) ring.WaitFull(arrived);
      gradient_ring.WaitFull(row);
      WgmmaFence();
      const uint64_t a = MnMajorDescriptor<0>(
          gradients + (row % kShape.gradient_rows * kShape.consumers + warpgroup) * kGradientBytes);
      const uint64_t b =
          MnMajorCoreDescriptor<128>(groups + first % kGroups * kGroupBytes, kPlaneBytes);
#pragma unroll
      for (int step = 0; step < kPixels / 16; ++step) {
        Wgmma<kColumns, T, true, true>(acc, a + step * (16 * 128 >> 4), b + step * (16 * 16 >> 4),
                                       1);
      }
      WgmmaCommit();
      WgmmaWait<1>();
      if (row > 0) {
        if (lane == 0) BarrierArrive(gradient_ring.Empty(row - 1));
#pragma unroll 1
        for (; released != until; ++released) {
          if (lane == 0) BarrierArrive(ring.Empty(released));
        }
      }
      until = first + (i + 1 < band.count ? 1 : kWindow);
    }
    first += kWindow - 1;
  }
  WgmmaWait<0>();
  float* out =
      static_cast<float*>(params.out) + blockIdx.x * params.out_elements + batch * params.w_batch;
  const int n = n_first + warpgroup * kRowChannels + warp * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int of_row = j % kPlanes * 8 + lane % 4 * 2 + e % 2, k = n + e / 2 * 8;
      if (of_row < params.row_elements && k < params.k) {
        out[(j / kPlanes * params.row_elements + of_row) * params.k + k] =
            WgmmaResult(acc[j * 4 + e]);
      }
    }
  }
}

template <Op kOp, DType kType, int kFilterRows, int kRowPlanes, int kStride, int kConsumers,
          int kGradientRows>
struct RowWindows {
  static_assert(kOp == Op::kWgrad);
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr RowWindowsInstance kShape{kFilterRows, kRowPlanes, kStride, kConsumers,
                                             kGradientRows};
  static constexpr int kThreads = (kConsumers + RowWindowsInstance::kSpreaders + 1) * 128;
  // Accumulators and about 50 others; otherwise all threads have as many.
  static constexpr bool kSetsRegisters = kThreads == 512 && kShape.columns() > 128;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    WindowsParams params = plan.As<WindowsParams>();
    params.out = operands.workspace;
    DenseTensor x;
    x.word_bytes = 8;
    x.rank = 3;
    x.address = operands.lhs;
    x.extent[0] = params.x_row_words;
    x.extent[1] = params.x_rows;
    x.extent[2] = params.images;
    const int32_t x_box[3] = {params.raw_row_bytes / 8, kStride, 1};
    CUtensorMap x_map, dy_map;
    JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(x, x_box, &x_map, /*swizzled=*/false));
    DenseTensor dy;
    dy.dtype = kType;
    dy.rank = 4;
    dy.address = operands.rhs;
    dy.extent[0] = params.k;
    dy.extent[1] = params.out_columns;
    dy.extent[2] = params.out_rows.divisor;
    dy.extent[3] = params.images;
    const int32_t dy_box[4] = {kRowChannels, params.pixels, 1, 1};
    JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(dy, dy_box, &dy_map));
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(params.grid_x), static_cast<unsigned>(params.grid_y));
    config.threads = Tag::kThreads;
    config.shared_bytes = static_cast<size_t>(params.shared_bytes);
    const auto launch = [&](auto pixels) {
      return jaxconv::Launch<RowWindowsKernel<Tag, decltype(pixels)::value>>(
          plan.kernel->name, config, stream, params, x_map, dy_map);
    };
    if constexpr (kShape.most_pixels() > 64) {
      JAXCONV_RETURN_IF_ERROR(params.pixels == 128   ? launch(std::integral_constant<int, 128>())
                              : params.pixels == 112 ? launch(std::integral_constant<int, 112>())
                                                     : launch(std::integral_constant<int, 64>()));
    } else {
      JAXCONV_RETURN_IF_ERROR(launch(std::integral_constant<int, 64>()));
    }
    return ReduceSlices<Epilogue>(static_cast<const float*>(operands.workspace),
                                  params.out_elements, plan.slices, params.k, EpilogueParams(),
                                  operands.out, kType, stream);
  }
};

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_ROW_WINDOWS_SM90_CUH_
