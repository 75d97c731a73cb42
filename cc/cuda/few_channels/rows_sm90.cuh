// few_channels, fprop of stride S = 2 or 4 by wgmma (sm_90a): y[(n,p,q), k] = sum over (r, s, c) of
// x[n, S p + r - pad, S q + s - pad, c] w[r, s, c, k], for at most four input channels.
//
// GEMM: rows are output channels, columns are the pixels of a row of y, the reduction runs over (r,
// s, c). With four channels a pixel has 8 bytes, so at stride 2 the windows of neighbouring outputs
// begin 16 bytes apart. A row of the image then is a K-major operand without copying for the taps:
// 8 outputs are a core matrix of 128 bytes, and the next two pixels of all windows follow 16 bytes
// later.
//
//     row of x      p0 p0 p0 p1 p1 p1 p2 p2 p2 ...          three channels, as in global memory
//     chunks        |p0 0 p1 0|p2 0 p3 0|p4 0 p5 0| ...     16 bytes each; output q: chunk q on
//     firsts        |p0 0 0  0|p2 0 0  0|p4 0 0  0| ...     a window's last chunk, of odd rows
//
// At stride 4 windows begin two chunks apart. Even and odd chunks are stored in two planes, in
// which the chunks of neighbouring windows are neighbours again.
//
// A filter row of odd length ends in the middle of a chunk. The next pixel does not belong to the
// window and may be NaN, so the last chunk is read from a second copy with zeros there.
//
// Tile: 64 channels x 112 (stride 4: 56) pixels of a row of y, one wgmma for 16 elements of the
// reduction. A CTA has consecutive rows of y, and a ring of pairs of image rows; each S / 2 further
// pairs complete one row of y. One or two alternating warpgroups copy unmodified rows of x by
// cp.async and expand them to four channels. Two other warpgroups alternate in rows of y, with the
// filter in registers. Registers: 56 (28) accumulators, 4 words of the filter for each k-step (7x7:
// 14, 11x11: 33). Shared memory: two staged rows of y (28 KB), through which the filter passes; the
// ring (7x7: 59 KB, 11x11: 92 KB); unmodified rows of x.
//
// Synchronisation: a consumer waits for the pairs of its window, and releases those that its next
// row does not need; the slot of a pair is free after both consumers have released it. Consumers
// issue their products in turn. Otherwise each would get half of the tensor core's rate, and both
// would store at the same time. Rows of y are staged with the 128-byte swizzle and stored by TMA.
//
// Refuses: other strides and filters than the instance's, dilation, rows of x that are not
// multiples of 16 bytes, K not in multiples of 8, epilogues beyond scale, bias and a clamp or swish.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_ROWS_SM90_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_ROWS_SM90_CUH_

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/activation.cuh"
#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/few_channels/rows_plan.h"
#include "cuda/few_channels/rows_ring_sm90.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::few_channels {

// Named barriers: 1 for both consumers, 2 and 3 for one consumer each, then the turns and the
// producers.
inline constexpr int kTurnBarrier = 2 + kRowConsumers;
inline constexpr int kProducerBarrier = kTurnBarrier + kRowConsumers;

template <class Tag>
using PairRing = RowRing<2 * Tag::kShape.row_bytes(), Tag::kShape.ring_pairs()>;

// A producer warpgroup: expands rows of x into the ring, all pairs or every other one. Its copies
// are raw_pairs() - 1 pairs ahead.
template <class Tag, int kChannels>
__device__ __forceinline__ void SpreadRows(const RowsParams& params, const PairRing<Tag>& ring,
                                           int producer, uint32_t raw, int32_t image_first,
                                           int32_t first_unit, int32_t end) {
  using T = typename Tag::T;
  constexpr RowsInstance kShape = Tag::kShape;
  constexpr int kRawPairs = kShape.raw_pairs(), kPlanes = kShape.planes();
  constexpr int kChunks = kPlanes * kShape.plane_chunks();
  static_assert(kChunks <= 128);
  const auto thread = static_cast<int32_t>(threadIdx.x % 128);
  const int32_t raw_bytes = params.raw_chunks * 32;  // of a pair
  int32_t unit = first_unit, left = 0, from = 0, element = 0;
  const T* image = nullptr;
  auto find_pair = [&] {
    if (left > 0 || unit >= end) return left > 0;
    const Band band(params.out_rows, params.strips, unit, end);
    unit += band.count;
    left = Tag::PairsOf(band.count);
    from = band.row * kShape.stride - params.pad_rows;
    element = (band.strip * kStripPixels - params.pad_columns) * kChannels - params.lead;
    image = static_cast<const T*>(params.x) +
            int64_t{image_first + band.image} * (params.in_rows * params.row_elements);
    return true;
  };
  auto skip_pair = [&] {
    if (find_pair()) from += 2, --left;
  };
  // Loads a pair. With two producers the next pair belongs to the other one.
  auto load = [&](uint32_t to) {
    if (find_pair()) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t at = thread + i * 128, row = from + (at >= params.raw_chunks);
        const int32_t of_row = element + (at - (at >= params.raw_chunks) * params.raw_chunks) * 8;
        const bool inside =
            static_cast<uint32_t>(row) < static_cast<uint32_t>(params.in_rows) &&
            static_cast<uint32_t>(of_row) < static_cast<uint32_t>(params.row_elements);
        if (at < 2 * params.raw_chunks) {
          CopyAsync<16>(to + at * 16, image + (row * params.row_elements + of_row), inside);
        }
      }
      from += 2;
      --left;
    }
    if constexpr (Tag::kShape.producers() > 1) skip_pair();
    CopyAsyncCommit();
  };
  if (producer != 0) skip_pair();
  const auto bands = params.out_rows.Div(end - 1) - params.out_rows.Div(first_unit) + 1;
  const auto pairs =
      static_cast<uint32_t>(Tag::PairsOf(end - first_unit) + (bands - 1) * Tag::PairsOf(0));
  for (int i = 0; i < kRawPairs - 1; ++i) load(raw + i * raw_bytes);
  const int32_t misaligned = params.lead % 2 * 16;  // bits
  const uint32_t words = params.lead / 2 * 4 + thread * (4 * kChannels);
  uint32_t stage = 0, next_stage = kRawPairs - 1;
  const uint32_t place = (thread % kPlanes * kShape.pitch() + thread / kPlanes) * 16;
  const bool last = thread % kPlanes == (kShape.window_pairs() - 1) % kPlanes;
  static_assert(kShape.producers() <= 2);
  for (uint32_t pair = producer; pair < pairs; pair += kShape.producers()) {
    CopyAsyncWait<kRawPairs - 2>();
    // All copies of this pair have arrived, and the previous pair has been read.
    NamedBarrierSync(kProducerBarrier + producer, 128);
    load(raw + next_stage * raw_bytes);
    BarrierWait(ring.Empty(pair), ring.Parity(pair) ^ 1);
    if (thread < kChunks) {
      // The 2 C elements of two pixels in each row.
      uint32_t word[2][5] = {};
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t source = raw + stage * raw_bytes + row * params.raw_chunks * 16 + words;
#pragma unroll
        for (int i = 0; i < 5; ++i) {
          if (i <= kChannels) word[row][i] = LoadWord(source + i * 4);
        }
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        uint32_t value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          value[i] = __funnelshift_r(word[row][i], word[row][i + 1], misaligned);
        }
        uint32_t first[4] = {value[0], 0, 0, 0}, second[2] = {0, 0};
        if constexpr (kChannels == 1) {
          first[0] = value[0] & 0xffff;
          second[0] = value[0] >> 16;
        } else if constexpr (kChannels == 2) {
          second[0] = value[1];
        } else if constexpr (kChannels == 3) {
          first[1] = value[1] & 0xffff;
          second[0] = value[1] >> 16 | value[2] << 16;
          second[1] = value[2] >> 16;
        } else {
          first[1] = value[1];
          second[0] = value[2];
          second[1] = value[3];
        }
        const uint32_t to = ring.Slot(pair) + row * kShape.row_bytes() + place;
        StoreChunk(to, {first[0], first[1], second[0], second[1]});
        if (kShape.filter_columns % 2 != 0 && last) {
          StoreChunk(to + (kPlanes - thread % kPlanes) * (kShape.pitch() * 16), first);
        }
      }
    }
    FenceForCopies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(ring.Full(pair));
    stage = stage + 1 == kRawPairs ? 0 : stage + 1;
    next_stage = next_stage + 1 == kRawPairs ? 0 : next_stage + 1;
  }
}

// The consumers' filter: fragments of 64 channels by 16 elements of the reduction (four pixels by
// four channels). It passes through the place of the staged rows, with a line of 128 bytes for each
// tap and input channel. The chunks of lines are permuted so that those of eight lines are in
// different banks.
template <class Tag>
__device__ __forceinline__ void LoadFilter(const RowsParams& params, const unsigned short* w,
                                           int n_first, uint32_t lines, uint32_t zeros,
                                           uint32_t (&a)[Tag::kSteps][4]) {
  constexpr int kRows = Tag::kShape.filter_rows, kColumns = Tag::kShape.filter_columns;
  const int chunks = kRows * kColumns * params.c * 8;
  for (int i = threadIdx.x; i < chunks; i += kRowConsumers * 128) {
    const int32_t n = n_first + i % 8 * 8, line = i / 8;
    CopyAsync<16>(lines + line * 128 + (i % 8 ^ line % 8) * 16, w + int64_t{line} * params.k + n,
                  n < params.k);
  }
  CopyAsyncCommit();
  if (threadIdx.x == 0) StoreChunk(zeros, {0, 0, 0, 0});
  CopyAsyncWait<0>();
  NamedBarrierSync(1, kRowConsumers * 128);
  // A lane's row of the loaded matrices: a pixel and channel of the reduction.
  const int lane = threadIdx.x % 32, channel = lane % 4, pixel = lane / 16 * 2 + lane % 8 / 4;
  const int chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
#pragma unroll
  for (int step = 0; step < Tag::kSteps; ++step) {
    const int s = step % Tag::kStepsOfRow * 4 + pixel;
    const int line = (step / Tag::kStepsOfRow * kColumns + s) * params.c + channel;
    const bool valid = s < kColumns && channel < params.c;
    LoadMatricesTransposed(valid ? lines + line * 128 + (chunk ^ line % 8) * 16 : zeros, a[step]);
  }
  NamedBarrierSync(1, kRowConsumers * 128);
}

// What follows scale and bias: nothing, a clamp, or a swish (silu or hard_swish).
enum class Finish { kNone, kClamp, kSwish };

// A thread's sums of eight pixels as words to store: two pixels of a channel, and of the channel 8
// further.
template <class Tag, Finish kFinish>
__device__ __forceinline__ void RoundSums(const float* sums, const float (&scale)[2],
                                          const float (&bias)[2], Activation activation,
                                          const PairBounds<typename Tag::T>& bounds,
                                          uint32_t* word) {
  using T = typename Tag::T;
  float values[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    values[e] = WgmmaResult(sums[e]);
    if constexpr (!Tag::Epilogue::kPlain) {
      values[e] = fmaf(values[e], scale[e / 2], bias[e / 2]);
    }
  }
  if constexpr (kFinish == Finish::kSwish) ActivateSwish<T>(activation, values);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    word[m] = PackPair<T>(values[2 * m], values[2 * m + 1]);
    if constexpr (kFinish == Finish::kClamp) word[m] = bounds.Clamp(word[m]);
  }
}

template <class Tag>
__global__ void __launch_bounds__(Tag::kThreads, 1)
    RowsKernel(const __grid_constant__ RowsParams params,
               const __grid_constant__ CUtensorMap y_map) {
  using T = typename Tag::T;
  constexpr RowsInstance kShape = Tag::kShape;
  constexpr int kWindowPairs = Tag::PairsOf(1);  // of image rows
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * kShape.ring_pairs()];
  __shared__ uint4 zeros;
  const uint32_t first = SharedAddress(shared);
  const PairRing<Tag> ring{first + kShape.first_bytes(), SharedAddress(barriers)};
  ring.Init(4, kRowConsumers);  // warps of the producer
  __syncthreads();
  int32_t part, batch;
  params.column_parts.Divmod(static_cast<int32_t>(blockIdx.y), &batch, &part);
  const int n_first = part * kRowChannels;
  const int32_t image_first = batch * params.batch_images;
  const auto first_unit = static_cast<int32_t>(int64_t{params.units} * blockIdx.x / gridDim.x);
  const auto end = static_cast<int32_t>(int64_t{params.units} * (blockIdx.x + 1) / gridDim.x);
  const auto warpgroup = __shfl_sync(0xffffffff, static_cast<int32_t>(threadIdx.x / 128), 0);
  if (warpgroup >= kRowConsumers) {
    if constexpr (kShape.producers() > 1) LowerRegisters<256 - Tag::kConsumerRegisters>();
    const int producer = warpgroup - kRowConsumers;
    const uint32_t raw = ring.first + kShape.ring_pairs() * 2 * kShape.row_bytes() +
                         producer * kShape.raw_pairs() * (params.raw_chunks * 32);
    auto spread = [&](auto channels) {
      SpreadRows<Tag, decltype(channels)::value>(params, ring, producer, raw, image_first,
                                                 first_unit, end);
    };
    if (params.c == 1) {
      spread(std::integral_constant<int, 1>());
    } else if (params.c == 2) {
      spread(std::integral_constant<int, 2>());
    } else if (params.c == 3) {
      spread(std::integral_constant<int, 3>());
    } else {
      spread(std::integral_constant<int, 4>());
    }
    return;
  }
  if constexpr (kShape.producers() > 1) RaiseRegisters<Tag::kConsumerRegisters>();

  uint32_t a[Tag::kSteps][4];
  LoadFilter<Tag>(params, static_cast<const unsigned short*>(params.w) + batch * params.w_batch,
                  n_first, first, SharedAddress(&zeros), a);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float scale[2] = {1, 1}, bias[2] = {0, 0};
  if constexpr (!Tag::Epilogue::kPlain) {
    const typename Tag::Epilogue epilogue(params.epilogue);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t n = n_first + warp * 16 + half * 8 + lane / 4;
      const ChannelTerms<1> terms = epilogue.template Terms<1>(n < params.k ? n : 0);
      scale[half] = terms.scale[0];
      bias[half] = terms.bias[0];
    }
  }
  const Activation activation = params.epilogue.activation;
  const PairBounds<T> bounds(activation);
  // A lane's row of the stored matrices: 8 channels of a pixel.
  const uint32_t staged = first + warpgroup * kShape.staged_bytes();
  const uint32_t store =
      staged + (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
  float acc[kShape.pixels() / 2];
#pragma unroll
  for (float& sum : acc) sum = 0;
  auto stage = [&](auto finish) {
#pragma unroll
    for (int j = 0; j < kShape.pixels(); j += 16) {
      uint32_t word[4] = {};
#pragma unroll
      for (int m = 0; m < 4; m += 2) {
        if (j + m * 4 < kShape.pixels()) {
          RoundSums<Tag, decltype(finish)::value>(acc + j / 2 + m * 2, scale, bias, activation,
                                                  bounds, word + m);
        }
      }
      StoreMatricesTransposed(store + j * 128, word[0], word[1], word[2], word[3]);
    }
  };
  if (warpgroup == 1) NamedBarrierArrive(kTurnBarrier, 256);  // consumer 0 has the first turn
  uint32_t pair = 0;                                          // first pair of the band
  RowReader reader(ring);
  for (int32_t unit = first_unit; unit < end;) {
    const Band band(params.out_rows, params.strips, unit, end);
#pragma unroll 1
    for (int32_t i = (warpgroup ^ (unit - first_unit)) & 1; i < band.count; i += 2) {
      const uint32_t of_row = pair + i * kShape.planes();
      // With one producer pairs arrive in order.
#pragma unroll
      for (uint32_t j = kShape.producers() > 1 ? 0 : kWindowPairs - 1; j < kWindowPairs; ++j) {
        BarrierWait(ring.Full(of_row + j), ring.Parity(of_row + j));
      }
      NamedBarrierSync(kTurnBarrier + warpgroup, 256);
      WgmmaFence();
#pragma unroll
      for (int r = 0; r < kShape.filter_rows; ++r) {
        const uint32_t row = (ring.Slot(of_row + r / 2) >> 4) + r % 2 * (kShape.row_bytes() / 16);
#pragma unroll
        for (int h = 0; h < Tag::kStepsOfRow; ++h) {
          constexpr int kPlanes = kShape.planes();
          const bool odd = h + 1 == Tag::kStepsOfRow && kShape.filter_columns % 2 != 0;
          // Chunks 2 h and 2 h + 1 of the windows, and the distance between them.
          const uint32_t at = 2 * h % kPlanes * kShape.pitch() + 2 * h / kPlanes;
          const uint32_t plane = odd ? kPlanes : (2 * h + 1) % kPlanes;
          const uint32_t apart = plane * kShape.pitch() + (2 * h + 1) / kPlanes - at;
          WgmmaFromRegisters(T{}, acc, a[r * Tag::kStepsOfRow + h],
                             DescriptorOf(row + at + (apart << 16), 128 >> 4), r + h > 0);
        }
      }
      WgmmaCommit();
      if (unit + i + 1 < end) NamedBarrierArrive(kTurnBarrier + 1 - warpgroup, 256);
      // Meanwhile the previous row has been read by its TMA store.
      if (warp == 0 && ElectOne()) WaitForStoresToRead();
      NamedBarrierSync(2 + warpgroup, 128);
      WgmmaWait<0>();
      if (i + 2 < band.count) reader.FreeUntil(of_row + 2 * kShape.planes());
      if (Tag::Epilogue::kPlain || activation == Activation::kNone) {
        stage(std::integral_constant<Finish, Finish::kNone>());
      } else if (activation <= Activation::kRelu6) {
        stage(std::integral_constant<Finish, Finish::kClamp>());
      } else {
        stage(std::integral_constant<Finish, Finish::kSwish>());
      }
      FenceForCopies();
      NamedBarrierSync(2 + warpgroup, 128);
      if (warp == 0 && ElectOne()) {
        StoreTile4d(&y_map, staged, n_first, band.strip * kShape.pixels(), band.row + i,
                    image_first + band.image);
        CommitStores();
      }
    }
    pair += Tag::PairsOf(band.count);
    reader.template EndBand<kWindowPairs>(pair, 2 + warpgroup);
    unit += band.count;
  }
  if (warp == 0 && ElectOne()) WaitForStoresToRead();
}

template <Op kOp, DType kType, int kFilterRows, int kFilterColumns, int kStride = 2>
struct Rows {
  static_assert(kOp == Op::kFprop);
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr RowsInstance kShape{kFilterRows, kFilterColumns, kStride};
  static_assert(kStride == 2 || kStride == 4);
  static constexpr int kStepsOfRow = (kFilterColumns + 3) / 4;
  static constexpr int kSteps = kFilterRows * kStepsOfRow;
  static constexpr int kThreads = (kRowConsumers + kShape.producers()) * 128;
  // With two producers: accumulators, the filter and about 40 others.
  static constexpr int kConsumerRegisters = kShape.pixels() / 2 + 4 * kSteps <= 128 ? 168 : 200;
  // A filter row is whole k-steps except for its last pixel.
  static_assert(kShape.window_pairs() % 2 == 0);

  // The pairs of image rows in the windows of `rows` consecutive rows of y.
  static constexpr __host__ __device__ int32_t PairsOf(int32_t rows) {
    return rows * kShape.planes() + (kFilterRows + 1) / 2 - kShape.planes();
  }

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    RowsParams params = plan.As<RowsParams>();
    params.x = operands.lhs;
    params.w = operands.rhs;
    params.y = operands.out;
    BindEpilogue(operands, &params.epilogue);
    DenseTensor y;
    y.dtype = kType;
    y.rank = 4;
    y.address = params.y;
    y.extent[0] = params.k;
    y.extent[1] = params.out_columns;
    y.extent[2] = params.out_rows.divisor;
    y.extent[3] = params.images;
    const int32_t box[4] = {kRowChannels, kShape.pixels(), 1, 1};
    CUtensorMap map;
    JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(y, box, &map));
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(params.grid_x), static_cast<unsigned>(params.grid_y));
    config.threads = Tag::kThreads;
    config.shared_bytes = static_cast<size_t>(params.shared_bytes);
    return jaxconv::Launch<RowsKernel<Tag>>(plan.kernel->name, config, stream, params, map);
  }
};

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_ROWS_SM90_CUH_
