// few_channels, fprop of stride 2 by wgmma (sm_90a): y[(n,p,q), k] = sum over (r, s, c) of
// x[n, 2 p + r - pad, 2 q + s - pad, c] w[r, s, c, k], for at most four input channels.
//
// GEMM: rows are output channels, columns the pixels of a row of y, the reduction runs over
// (r, s, c). With four channels a pixel has 8 bytes, so the windows of neighbouring outputs begin
// 16 bytes apart: a row of the image is a K-major matrix of core matrices as it lies, 8 outputs in
// 128 bytes, and the next two pixels of all windows 16 bytes further. Nothing is copied for each
// tap.
//
//     row of x      p0 p0 p0 p1 p1 p1 p2 p2 p2 ...          three channels, as in global memory
//     pairs         |p0 0 p1 0|p2 0 p3 0|p4 0 p5 0| ...     16 bytes each; output q: from pair q on
//     firsts        |p0 0 0  0|p2 0 0  0|p4 0 0  0| ...     a window's last pair, of odd rows
//
// An odd filter row ends in the middle of a pair. The pixel after it is no part of the window and
// may be NaN, so the last pair comes from a second copy of the row that has zeros there.
//
// Tile: 64 channels x 112 pixels of a row of y, one m64n112k16 for 16 elements of the reduction. A
// CTA has consecutive rows of y, and a ring of pairs of image rows; of each pair of rows that
// follows it computes one row of y. One warpgroup (two for 3x3, each every other pair) copies x as
// it lies by cp.async and spreads it to four channels; two take the rows of y in turn, with the
// filter in registers. Registers: 56 accumulators, 4 words of the filter for each k-step (14 for
// 7x7), at most 168. Shared memory: two staged rows of y (28 KB), the ring (59 KB for 7x7), rows of
// x as they lie.
//
// Who waits for whom: a consumer waits until the pairs of its window are there, and gives back the
// pairs that its next row does not need; each pair waits for both consumers. Rows of y are staged
// with the swizzle of 128 bytes and stored by TMA.
//
// Refuses: strides other than 2, dilation, other filters than the instance's, rows of x that are
// not multiples of 16 bytes, K not in multiples of 8, epilogues beyond scale, bias and a clamp.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_ROWS_SM90_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_ROWS_SM90_CUH_

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
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/min_max.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::few_channels {

inline constexpr int kStagedRowBytes = kRowPixels * kRowChannels * 2;

template <class Tag>
using PairRing = RowRing<2 * Tag::kRowBytes>;

// A producer warpgroup: rows of x, as they lie, to the ring, all pairs or every other one. Its
// copies are kRawPairs - 1 pairs ahead.
template <class Tag>
__device__ __forceinline__ void SpreadRows(const RowsParams& params, const PairRing<Tag>& ring,
                                           int producer, uint32_t raw, int32_t image_first,
                                           int32_t first_unit, int32_t end) {
  using T = typename Tag::T;
  constexpr int kWindowPairs = (Tag::kFilterRows + 1) / 2;
  constexpr int kChunks = Tag::kChunks;
  static_assert(kChunks <= 128);
  const auto thread = static_cast<int32_t>(threadIdx.x % 128);
  const int32_t raw_bytes = params.raw_chunks * 32;  // of a pair
  int32_t unit = first_unit, left = 0, from = 0, element = 0;
  const T* image = nullptr;
  auto find_pair = [&] {
    if (left > 0 || unit >= end) return left > 0;
    const Band band(params.out_rows, params.strips, unit, end);
    unit += band.count;
    left = band.count + kWindowPairs - 1;
    from = band.row * 2 - params.pad_rows;
    element = (band.strip * (2 * kRowPixels) - params.pad_columns) * params.c - params.lead;
    image = static_cast<const T*>(params.x) +
            int64_t{image_first + band.image} * (params.in_rows * params.row_elements);
    return true;
  };
  auto skip_pair = [&] {
    if (find_pair()) from += 2, --left;
  };
  // A pair, behind which the other producer's is where there are two.
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
    if constexpr (Tag::kProducers > 1) skip_pair();
    CopyAsyncCommit();
  };
  if (producer != 0) skip_pair();
  const auto bands = params.out_rows.Div(end - 1) - params.out_rows.Div(first_unit) + 1;
  const auto pairs = static_cast<uint32_t>(end - first_unit + bands * (kWindowPairs - 1));
  for (int i = 0; i < Tag::kRawPairs - 1; ++i) load(raw + i * raw_bytes);
  const int32_t misaligned = params.lead % 2 * 16;  // bits
  const uint32_t words = params.lead / 2 * 4 + thread * (4 * params.c);
  uint32_t stage = 0, next_stage = Tag::kRawPairs - 1;
  static_assert(Tag::kProducers <= 2);
  for (uint32_t pair = producer; pair < pairs; pair += Tag::kProducers) {
    CopyAsyncWait<Tag::kRawPairs - 2>();
    // All copies are here, and nobody reads the pair before this one.
    NamedBarrierSync(2 + kRowConsumers + producer, 128);
    load(raw + next_stage * raw_bytes);
    BarrierWait(ring.Empty(pair), ring.Parity(pair) ^ 1);
    if (thread < kChunks) {
      // The 2 C elements of two pixels of each row.
      uint32_t word[2][5] = {};
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t source = raw + stage * raw_bytes + row * params.raw_chunks * 16 + words;
#pragma unroll
        for (int i = 0; i < 5; ++i) {
          if (i <= params.c) word[row][i] = LoadWord(source + i * 4);
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
        if (params.c == 1) {
          first[0] = value[0] & 0xffff;
          second[0] = value[0] >> 16;
        } else if (params.c == 2) {
          second[0] = value[1];
        } else if (params.c == 3) {
          first[1] = value[1] & 0xffff;
          second[0] = value[1] >> 16 | value[2] << 16;
          second[1] = value[2] >> 16;
        } else {
          first[1] = value[1];
          second[0] = value[2];
          second[1] = value[3];
        }
        const uint32_t to = ring.Slot(pair) + row * Tag::kRowBytes + thread * 16;
        StoreChunk(to, {first[0], first[1], second[0], second[1]});
        if (Tag::kFilterColumns % 2 != 0) StoreChunk(to + kChunks * 16, first);
      }
    }
    FenceForCopies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(ring.Full(pair));
    stage = stage + 1 == Tag::kRawPairs ? 0 : stage + 1;
    next_stage = next_stage + 1 == Tag::kRawPairs ? 0 : next_stage + 1;
  }
}

// The consumers' filter: fragments of 64 channels by 16 elements of the reduction, two pixels by
// four channels twice. It passes through the staged rows' place, a line of 128 bytes for each tap
// and input channel.
template <class Tag>
__device__ __forceinline__ void LoadFilter(const RowsParams& params, const unsigned short* w,
                                           int n_first, unsigned char* lines,
                                           uint32_t (&a)[Tag::kSteps][4]) {
  static_assert(Tag::kFilterRows * Tag::kFilterColumns * 4 * 128 <=
                kRowConsumers * kStagedRowBytes);
  const int chunks = Tag::kFilterRows * Tag::kFilterColumns * params.c * 8;
  for (int i = threadIdx.x; i < chunks; i += kRowConsumers * 128) {
    const int32_t n = n_first + i % 8 * 8;
    const auto* source = reinterpret_cast<const uint4*>(w + int64_t{i / 8} * params.k + n);
    *reinterpret_cast<uint4*>(lines + i * 16) =
        n < params.k ? __ldg(source) : make_uint4(0, 0, 0, 0);
  }
  NamedBarrierSync(1, kRowConsumers * 128);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
  const unsigned char* source = lines + (t / 2 * params.c + t % 2 * 2) * 128 + (warp * 16 + g) * 2;
  const int32_t tap = params.c * 128;
#pragma unroll
  for (int step = 0; step < Tag::kSteps; ++step) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int s = step % Tag::kStepsOfRow * 4 + e / 2 * 2;  // of lanes whose t is below 2
      const int line = step / Tag::kStepsOfRow * Tag::kFilterColumns + s;
      const unsigned char* at = source + line * tap + e % 2 * 16;
      uint32_t word = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (s + t / 2 < Tag::kFilterColumns && t % 2 * 2 + half < params.c) {
          word |= uint32_t{*reinterpret_cast<const unsigned short*>(at + half * 128)}
                  << (half * 16);
        }
      }
      a[step][e] = word;
    }
  }
  NamedBarrierSync(1, kRowConsumers * 128);
}

template <class Tag>
__global__ void __launch_bounds__(Tag::kThreads, 1)
    RowsKernel(const __grid_constant__ RowsParams params,
               const __grid_constant__ CUtensorMap y_map) {
  using T = typename Tag::T;
  constexpr int kWindowPairs = (Tag::kFilterRows + 1) / 2;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * kPairSlots];
  const uint32_t first = SharedAddress(shared);
  const PairRing<Tag> ring{first + kRowConsumers * kStagedRowBytes, SharedAddress(barriers)};
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
    if constexpr (Tag::kProducers > 1) LowerRegisters<88>();
    const int producer = warpgroup - kRowConsumers;
    const uint32_t raw = ring.first + kPairSlots * 2 * Tag::kRowBytes +
                         producer * Tag::kRawPairs * (params.raw_chunks * 32);
    SpreadRows<Tag>(params, ring, producer, raw, image_first, first_unit, end);
    return;
  }
  if constexpr (Tag::kProducers > 1) RaiseRegisters<168>();

  uint32_t a[Tag::kSteps][4];
  LoadFilter<Tag>(params, static_cast<const unsigned short*>(params.w) + batch * params.w_batch,
                  n_first, shared, a);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float scale[2] = {1, 1}, bias[2] = {0, 0}, lower = -INFINITY, upper = INFINITY;
  if constexpr (!Tag::Epilogue::kPlain) {
    const typename Tag::Epilogue epilogue(params.epilogue);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t n = n_first + warp * 16 + half * 8 + lane / 4;
      const ChannelTerms<1> terms = epilogue.template Terms<1>(n < params.k ? n : 0);
      scale[half] = terms.scale[0];
      bias[half] = terms.bias[0];
    }
    if (params.epilogue.activation != Activation::kNone) lower = 0;
    if (params.epilogue.activation == Activation::kRelu6) upper = 6;
  }
  // A lane's row of the matrices that it stores: a pixel's 8 channels.
  const uint32_t staged = first + warpgroup * kStagedRowBytes;
  const uint32_t store =
      staged + (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
  float acc[kRowPixels / 2];
#pragma unroll
  for (float& sum : acc) sum = 0;
  uint32_t pair = 0;  // the band's first
  RowReader reader(ring);
  for (int32_t unit = first_unit; unit < end;) {
    const Band band(params.out_rows, params.strips, unit, end);
#pragma unroll 1
    for (int32_t i = (warpgroup ^ (unit - first_unit)) & 1; i < band.count; i += 2) {
      // One producer's pairs come in order.
#pragma unroll
      for (uint32_t j = Tag::kProducers > 1 ? 0 : kWindowPairs - 1; j < kWindowPairs; ++j) {
        BarrierWait(ring.Full(pair + i + j), ring.Parity(pair + i + j));
      }
      WgmmaFence();
#pragma unroll
      for (int r = 0; r < Tag::kFilterRows; ++r) {
        const uint32_t row = ring.Slot(pair + i + r / 2) + r % 2 * Tag::kRowBytes;
#pragma unroll
        for (int h = 0; h < Tag::kStepsOfRow; ++h) {
          constexpr uint32_t kFirsts = Tag::kChunks + 1;  // chunks from pair to first
          const bool odd = h + 1 == Tag::kStepsOfRow && Tag::kFilterColumns % 2 != 0;
          const uint32_t low = ((row + h * 32) & 0x3ffff) >> 4 | (odd ? kFirsts : 1) << 16;
          WgmmaFromRegisters(T{}, acc, a[r * Tag::kStepsOfRow + h], DescriptorOf(low, 128 >> 4),
                             r + h > 0);
        }
      }
      WgmmaCommit();
      // Meanwhile the row before this one has left its place.
      if (warp == 0 && ElectOne()) WaitForStoresToRead();
      NamedBarrierSync(2 + warpgroup, 128);
      WgmmaWait<0>();
      if (i + 2 < band.count) reader.FreeUntil(pair + i + 2);
#pragma unroll
      for (int j = 0; j < kRowPixels / 16; ++j) {
        uint32_t word[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          T values[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float sum = WgmmaResult(acc[j * 8 + m * 2 + e]);
            if constexpr (!Tag::Epilogue::kPlain) {
              sum = MinNan(MaxNan(fmaf(sum, scale[m % 2], bias[m % 2]), lower), upper);
            }
            values[e] = FromFloat<T>(sum);
          }
          memcpy(&word[m], values, sizeof(word[m]));
        }
        StoreMatricesTransposed(store + j * 2048, word[0], word[1], word[2], word[3]);
      }
      FenceForCopies();
      NamedBarrierSync(2 + warpgroup, 128);
      if (warp == 0 && ElectOne()) {
        StoreTile4d(&y_map, staged, n_first, band.strip * kRowPixels, band.row + i,
                    image_first + band.image);
        CommitStores();
      }
    }
    pair += band.count + kWindowPairs - 1;
    reader.template EndBand<kWindowPairs>(pair, 2 + warpgroup);
    unit += band.count;
  }
  if (warp == 0 && ElectOne()) WaitForStoresToRead();
}

template <Op kOp, DType kType, int kFilterRows_, int kFilterColumns_>
struct Rows {
  static_assert(kOp == Op::kFprop);
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kFilterRows = kFilterRows_, kFilterColumns = kFilterColumns_;
  static constexpr int kStepsOfRow = (kFilterColumns + 3) / 4;
  static constexpr int kSteps = kFilterRows * kStepsOfRow;
  static constexpr int kProducers = RowProducers(kFilterRows), kRawPairs = RawPairs(kFilterRows);
  static constexpr int kThreads = (kRowConsumers + kProducers) * 128;
  static constexpr int kChunks = RowChunks(kFilterColumns), kRowBytes = RowBytes(kFilterColumns);
  // A filter row is whole k-steps, but for the last pixel.
  static_assert((kFilterColumns + 1) / 2 % 2 == 0);

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
    const int32_t box[4] = {kRowChannels, kRowPixels, 1, 1};
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
