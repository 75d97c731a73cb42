// depthwise, fprop and dgrad of long filters by wgmma (sm_90a): 16-bit operands, stride 1, maps of
// up to 64 columns.
//
// For one channel, with a row of the map in blocks of 8 columns, p = y - i and q = 8 b + j:
//
//     out[p, 8 b + j] = sum over i < 8 of D[(i, j), (p + i, b)]
//     D[(i, j), (y, b)] = sum over s, k of f[8 s + i, k - j] x[y + 8 s, 8 b + k]
//
// D is a matrix product. A, with 64 rows (i, j), holds a channel's whole band of taps in registers.
// B has a column for each block b of each row y and is the map itself: the windows of neighbouring
// blocks begin 16 bytes apart, so 8 of them form a core matrix of 128 bytes, and their next 8
// columns k lie 16 bytes further. No data is copied per tap. One m64n256k16 serves 32 rows y; 31x31
// takes ten (4 steps s of 5 blocks k), with 31 of 40 columns k useful.
//
//     box: pixels x 8 channels | planes: 8 channels x rows x columns | band: taps of 8 channels
//
// BandHalo blocks of zeros precede each row of a plane and serve as the right border of the
// previous row; rows of zeros lie above and below the map.
//
// Tile: 8 channels, all columns, 32 or 64 rows y, of which the last 7 complete no output. Two
// warpgroups alternate over the channels. A thread adds the sums of its two i; the sums of four
// warps pass through shared memory, 8 rows at a time, and are added in a fixed order. Finished rows
// overwrite rows of their channel's plane that are already multiplied. ldmatrix.trans then reads
// the tile, two channels a word, and the warps store it. The next tile's box is copied while this
// one is multiplied. Registers: 128 accumulators, 40 for the band.
//
// Shared memory of 31x31 on 56 x 56: planes 100 KB, box 49 KB, band 24 KB, sums 32 KB.
//
// The band's zeros multiply pixels outside an output's window, so an Inf or NaN of x spreads to
// nearby outputs.
//
// Refused, with a reason (toeplitz_wgmma_plan.cc): other types, strides and dilations, K != C,
// channels that are not multiples of 8, a depth, results of another type, wider maps, longer filters,
// and padding of rows that is far from even.
#ifndef JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_WGMMA_SM90_CUH_
#define JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_WGMMA_SM90_CUH_

#include <cstdint>
#include <cstring>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/depthwise/toeplitz_wgmma_plan.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::depthwise {

template <Op kOp, DType kType, int kChunks_, int kStepPairs_>
struct ToeplitzWgmma {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kChunks = kChunks_, kStepPairs = kStepPairs_;
  static constexpr int kFilterRows = 2 * kBandStep * kStepPairs;
  static constexpr int kProducts = kStepPairs * kChunks;  // products of 16 columns k, two chunks
                                                          // each
  static constexpr int kTaps = BandRowTaps(kChunks);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// Rows of the map that a tile reads: the first, their number, and the first one's row in the plane.
struct BandRowsRead {
  int32_t first, count, top;
  __device__ __forceinline__ BandRowsRead(const ToeplitzWgmmaParams& params, int32_t row) {
    const Axis& rows = params.axis[1];
    const int32_t begin = row - rows.pad;
    first = max(begin, 0);
    count = max(min(begin + rows.box, rows.in) - first, 0);
    top = first - begin;
  }
};

__device__ __forceinline__ void ClearBytes(uint32_t address, int32_t bytes) {
  const uint32_t zeros[4] = {};
  for (int32_t i = threadIdx.x * 16; i < bytes; i += kHaloThreads * 16) {
    StoreChunk(address + i, zeros);
  }
}

// Starts to copy a tile's rows, 16 bytes a pixel. Columns past the end of a row stay zero.
template <class Tag>
__device__ __forceinline__ void CopyRows(const ToeplitzWgmmaParams& params, int32_t item,
                                         uint32_t box) {
  using T = typename Tag::T;
  const TilePlace tile(params, item, kBandChannels);
  const BandRowsRead rows(params, tile.row);
  const auto columns = static_cast<int32_t>(params.box_columns.divisor);
  const auto blocks = static_cast<int32_t>(params.blocks.divisor);
  const T* from =
      static_cast<const T*>(params.gathered) +
      (int64_t{tile.image} * params.axis[1].in + rows.first) * columns * params.channels +
      tile.first_channel;
  for (int32_t i = threadIdx.x; i < rows.count * columns; i += kHaloThreads) {
    int32_t row, column;
    params.box_columns.Divmod(i, &row, &column);
    CopyAsync<16>(box + (row * blocks * 8 + column) * 16, from + int64_t{i} * params.channels,
                  true);
  }
}

// Stores the taps of a tile's channels: each warp takes filter rows, each lane a column with all
// channels.
template <class Tag>
__device__ __forceinline__ void FillTaps(const ToeplitzWgmmaParams& params, const TilePlace& tile,
                                         typename Tag::T* band) {
  using T = typename Tag::T;
  const int32_t rows = params.axis[1].taps, columns = params.axis[2].taps;
  const int32_t last = rows * columns - 1;
  const T* filter = static_cast<const T*>(params.filter) +
                    params.images_divmod.Div(tile.image) * params.filter_stride +
                    int64_t{tile.first_channel} * params.channel_stride;
  const int32_t start = 8 + 8 * BandHalo(Tag::kChunks) - params.axis[2].pad;
  for (int32_t row = threadIdx.x / 32; row < rows; row += kHaloThreads / 32) {
    for (int32_t column = threadIdx.x % 32; column < columns; column += 32) {
      const int32_t tap = row * columns + column;
      const T* from = filter + int64_t{params.flip ? last - tap : tap} * params.tap_stride;
      alignas(16) T taps[8];
      if (params.channel_stride == 1) {
        const uint4 chunk = __ldg(reinterpret_cast<const uint4*>(from));
        memcpy(taps, &chunk, sizeof(taps));
      } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) taps[c] = from[int64_t{c} * params.channel_stride];
      }
      T* to = band + row * Tag::kTaps + start + column;
#pragma unroll
      for (int c = 0; c < 8; ++c) to[c * (Tag::kFilterRows * Tag::kTaps)] = taps[c];
    }
  }
}

// Transposes the box to planes, and clears the rows outside the map, which hold results of the
// previous tile.
template <class Tag>
__device__ __forceinline__ void FillPlanes(const ToeplitzWgmmaParams& params,
                                           const BandRowsRead& rows, uint32_t box,
                                           uint32_t planes) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t data = planes + BandHalo(Tag::kChunks) * 16;
  const auto across = static_cast<int32_t>(params.blocks.divisor);
  const int32_t blocks = rows.count * across;
  // A matrix is a block of 8 pixels; four matrices a pass.
  const uint32_t to =
      data + rows.top * params.row_bytes + lane / 4 * params.plane_bytes + lane % 4 * 4;
  for (int32_t block = warp * 4; block < blocks; block += kHaloThreads / 32 * 4) {
    uint32_t word[4];
    LoadMatricesTransposed(box + block * 128 + lane * 16, word);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      int32_t row, column;
      params.blocks.Divmod(block + m, &row, &column);
      if (block + m < blocks) StoreWord(to + row * params.row_bytes + column * 16, word[m]);
    }
  }
  const uint32_t zeros[4] = {};
  for (int32_t row = warp; row < params.plane_rows; row += kHaloThreads / 32) {
    if (Inside(row - rows.top, rows.count)) continue;
    for (int32_t block = lane / 8; block < across; block += 4) {
      StoreChunk(data + lane % 8 * params.plane_bytes + row * params.row_bytes + block * 16, zeros);
    }
  }
}

// A channel's A in wgmma register order: warp w has rows (2 w, j = g) and (2 w + 1, g). A pair of
// taps at an odd position is formed from two words.
template <class Tag>
__device__ __forceinline__ void LoadBand(uint32_t band, int warp, int lane,
                                         uint32_t (&a)[Tag::kProducts][4]) {
  const int g = lane / 4, t = lane % 4, odd = g % 2;
  const uint32_t lanes = band + 2 * warp * (Tag::kTaps * 2) + (8 + 2 * t - g - odd) * 2;
#pragma unroll
  for (int product = 0; product < Tag::kProducts; ++product) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int index = 2 * product + e / 2;
      const int row = index / Tag::kChunks * kBandStep + e % 2;
      const uint32_t at = lanes + (row * Tag::kTaps + index % Tag::kChunks * 8) * 2;
      a[product][e] = __funnelshift_r(LoadWord(at), LoadWord(at + odd * 4), odd * 16);
    }
  }
}

// Processes a channel of a tile: multiplies its plane, adds, and writes the results to the plane's
// first rows.
template <class Tag>
__device__ __forceinline__ void ComputeChannel(const ToeplitzWgmmaParams& params,
                                               typename Tag::T* plane_elements, uint32_t sums,
                                               int barrier, int32_t out_rows,
                                               const uint32_t (&a)[Tag::kProducts][4]) {
  using T = typename Tag::T;
  constexpr int kChunks = Tag::kChunks;
  const uint32_t plane = SharedAddress(plane_elements);
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
  const auto blocks = static_cast<int32_t>(params.blocks.divisor);
  const auto pitch = static_cast<uint32_t>(params.row_bytes >> 4);
  // Addresses at which the thread writes and reads sums; a row of 64 columns is [column j][block].
  const uint32_t write = sums + warp * kBandSumBytes + lane * 8;
  const int place = thread / 16, quad = thread % 16;
  const uint32_t read = sums + quad * 16;
  const int32_t first_block = quad % 2 * 4;
  int32_t row = place - 9;
  T* result = plane_elements + BandHalo(kChunks) * 8 + first_block * 8 + quad / 2 +
              row * (params.row_bytes / 2);
  float acc[kBandRows * 4];
#pragma unroll
  for (float& sum : acc) sum = 0;
  // Rows y count from 1 here. A pass has the eight rows from 8 pass on; row r of warp w is a part
  // of output row r - 2 w - 1. A thread's output rows are congruent to its place modulo 8.
  float last[2] = {0, 0}, before[4] = {0, 0, 0, 0};
  auto finish = [&] {
    if (Inside(row, out_rows)) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        if (first_block + m < blocks) {
          result[m * 8] = FromFloat<T>(before[m]);
        }
      }
    }
    row += 8;
    result += 4 * params.row_bytes;
  };
#pragma unroll 1
  for (int32_t product = 0; product < params.products; ++product) {
    const uint32_t first = (plane & 0x3ffff) / 16 + product * (kBandRows * pitch);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < Tag::kProducts; ++i) {
      constexpr uint32_t kNext = 1;
      const int index = 2 * i, step = index / kChunks, chunk = index % kChunks;
      const uint32_t leading =
          chunk + 1 < kChunks ? kNext : kBandStep * pitch - static_cast<uint32_t>(kChunks - 1);
      const uint32_t at = first + step * (kBandStep * pitch) + chunk;
      WgmmaFromRegisters(T{}, acc, a[i], DescriptorOf(at | leading << 16, pitch), i > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
#pragma unroll
    for (float& sum : acc) sum = WgmmaResult(sum);
#pragma unroll
    for (int pass = 0; pass < kBandRows / 8; ++pass) {
      constexpr int kRowSums = 4;
      const uint32_t half = pass % 2 * kBandPassBytes;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int y = pass * 8 + i;
        const float* above = y > 0 ? &acc[(y - 1) * kRowSums] : last;
        StorePair(write + half + i * 256, above[0] + acc[y * kRowSums + 2],
                  above[1] + acc[y * kRowSums + 3]);
      }
      NamedBarrierSync(barrier, 128);
      float now[4] = {0, 0, 0, 0};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int i = place + 2 * w;
        float part[4];
        LoadShared<0>(read + half + w * kBandSumBytes + i % 8 * 256, part);
        const bool earlier = i >= 8;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          before[m] += earlier ? part[m] : 0;
          now[m] += earlier ? 0 : part[m];
        }
      }
      finish();
#pragma unroll
      for (int m = 0; m < 4; ++m) before[m] = now[m];
    }
    last[0] = acc[kBandRows * 4 - 4];
    last[1] = acc[kBandRows * 4 - 3];
  }
  // The first two rows begun in the last pass are complete.
  finish();
}

// Stores a tile's results from the planes; a lane has two channels of a pixel.
template <class Tag>
__device__ __forceinline__ void StoreTile(const ToeplitzWgmmaParams& params, const TilePlace& tile,
                                          int32_t out_rows, uint32_t planes) {
  using T = typename Tag::T;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t width = params.axis[2].out;
  T* out = static_cast<T*>(params.out) +
           (int64_t{tile.image} * params.axis[1].out + tile.row) * width * params.channels +
           tile.first_channel + lane % 4 * 2;
  const int32_t blocks = out_rows * static_cast<int32_t>(params.blocks.divisor);
  const uint32_t data = planes + BandHalo(Tag::kChunks) * 16 + lane % 8 * params.plane_bytes;
  for (int32_t block = warp * 4; block < blocks; block += kHaloThreads / 32 * 4) {
    // The lane's row of matrix lane / 8, one channel.
    int32_t row, column;
    params.blocks.Divmod(min(block + lane / 8, blocks - 1), &row, &column);
    uint32_t word[4];
    LoadMatricesTransposed(data + row * params.row_bytes + column * 16, word);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      params.blocks.Divmod(block + m, &row, &column);
      const int32_t pixel = column * 8 + lane / 4;
      if (block + m < blocks && pixel < width) {
        *reinterpret_cast<uint32_t*>(out + int64_t{row * width + pixel} * params.channels) =
            word[m];
      }
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(kHaloThreads, 1)
    ToeplitzWgmmaKernel(const __grid_constant__ ToeplitzWgmmaParams params) {
  using T = typename Tag::T;
  static_assert(kHaloThreads == kBandWarpgroups * 128);
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const uint32_t planes = SharedAddress(dynamic), box = planes + params.box_offset;
  const uint32_t band = planes + params.band_offset;
  const auto warpgroup = __shfl_sync(0xffffffff, static_cast<int32_t>(threadIdx.x / 128), 0);
  const uint32_t sums = planes + params.sums_offset + warpgroup * (2 * kBandPassBytes);
  Cursor at(params);
  ClearBytes(planes, params.sums_offset);
  __syncthreads();
  if (!at.Done()) CopyRows<Tag>(params, at.item, box);
  CopyAsyncCommit();
  int32_t held = -1;  // the first channel whose taps the band holds, counted over all filters
  for (; !at.Done(); ++at.item) {
    const TilePlace tile(params, at.item, kBandChannels);
    const int32_t out_rows = min(params.axis[1].tile, params.axis[1].out - tile.row);
    const int32_t wanted =
        params.images_divmod.Div(tile.image) * params.channels + tile.first_channel;
    if (wanted != held) {
      FillTaps<Tag>(params, tile, reinterpret_cast<T*>(dynamic + params.band_offset));
    }
    held = wanted;
    CopyAsyncWait<0>();
    __syncthreads();
    FillPlanes<Tag>(params, BandRowsRead(params, tile.row), box, planes);
    FenceForCopies();
    __syncthreads();
    if (at.item + 1 < at.end) CopyRows<Tag>(params, at.item + 1, box);
    CopyAsyncCommit();
#pragma unroll 1
    for (int channel = warpgroup; channel < kBandChannels; channel += kBandWarpgroups) {
      uint32_t a[Tag::kProducts][4];
      LoadBand<Tag>(band + channel * (Tag::kFilterRows * Tag::kTaps * 2), threadIdx.x % 128 / 32,
                    threadIdx.x % 32, a);
      ComputeChannel<Tag>(params, reinterpret_cast<T*>(dynamic + channel * params.plane_bytes),
                          sums, 1 + warpgroup, out_rows, a);
    }
    __syncthreads();
    StoreTile<Tag>(params, tile, out_rows, planes);
    __syncthreads();
  }
}

template <Op kOp, DType kType, int kChunks_, int kStepPairs_>
template <class Tag>
Status ToeplitzWgmma<kOp, kType, kChunks_, kStepPairs_>::Launch(const Plan& plan,
                                                                const Operands& operands,
                                                                void* stream) {
  return LaunchHaloGather<ToeplitzWgmmaParams, ToeplitzWgmmaKernel<Tag>>(plan, operands, stream);
}

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_TOEPLITZ_WGMMA_SM90_CUH_
