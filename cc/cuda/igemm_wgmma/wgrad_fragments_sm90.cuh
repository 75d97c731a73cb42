// What weight gradients of float32 operands by mma.sync and wgmma share (sm_90a): A = x in registers,
// from boxes as TMA loads them, a row of 32 channels for each of 32 pixels; for wgmma, B = dy
// transposed in shared memory.
//
// Reduction index kk of eight pixels is pixel 2 kk for kk < 4, and 2 (kk - 4) + 1 for kk >= 4: lane
// 4 g + t reads pixels 2 t and 2 t + 1. Its channels 2 g and 2 g + 1 are rows g and g + 8 of a
// fragment, so it reads them as one pair. Chunk c (16 bytes) of pixel p lies at c ^ p % 8, so lanes
// that read together access different banks.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_FRAGMENTS_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_FRAGMENTS_SM90_CUH_

#include <cstdint>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/igemm_wgmma/params.h"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// Where a lane's pair of channels of `pixel` lies in a box, of whose 32 channels a warp has the first
// 16 (half 0) or the last.
__device__ __forceinline__ uint32_t ChannelPairOffset(int half, int pixel) {
  const int g = threadIdx.x % 32 / 4;
  return pixel * 128 + ((half * 4 + g / 2) ^ (pixel % 8)) * 16 + g % 2 * 8;
}

// The number of k-blocks of a tile whose slice is a run of them.
struct RunOfKBlocks {
  const Params& params;

  __device__ __forceinline__ int32_t operator()(const TilePlace& place) const {
    return min(params.k_blocks_per_slice,
               params.residue_class[0].k_blocks - place.slice * params.k_blocks_per_slice);
  }
};

// Makes rows along the reduction of the boxes of dy of every stage, by the last kTransposers warps
// of a warpgroup. A lane reads kEights times eight pixels of a column, all before it writes the first: a
// read takes longer than the instructions of eight. store(words, row, chunk) writes eight to chunks
// chunk[0] and chunk[1] of a row that begins at `row`. No read or write has bank conflicts.
// k_blocks(place): the number of k-blocks of a tile. The rows of a box may lie in its place.
template <class Tile, int kEights, typename KBlocks, typename Store>
__device__ __forceinline__ void TransposeColumns(const Params& params, uint32_t ring,
                                                 const Barriers<Tile>& barriers, KBlocks k_blocks,
                                                 Store store) {
  constexpr int kWarps = Tile::kTransposers;
  constexpr int kJobsOfBox = Tile::kPixels / 8 / kEights;
  constexpr int kJobs = Tile::kTileN / 32 * kJobsOfBox;
  constexpr bool kInPlace = Tile::kRowsAt == Tile::kBytesA;
  static_assert(!kInPlace || kJobsOfBox == 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4 - (4 - kWarps);
  const uint32_t from = ring + Tile::kRingAt + Tile::kBytesA + lane % 4 * 4;
  const uint32_t to = ring + Tile::kRingAt + Tile::kRowsAt + lane * 128;
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const int32_t count = k_blocks(TilePlace(params, index));
    for (int32_t k_block = 0; k_block < count; ++k_block) {
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      const uint32_t at = stage.slot * Tile::kStageBytes;
#pragma unroll
      for (int part = 0; part < (kJobs + kWarps - 1) / kWarps; ++part) {
        const int job = part * kWarps + warp;
        if (job >= kJobs) break;
        const int box = job / kJobsOfBox, first = job % kJobsOfBox * kEights;
        uint32_t words[kEights][8];
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
#pragma unroll
          for (int kk = 0; kk < 8; ++kk) {
            const int pixel = kk % 4 * 2 + kk / 4;
            words[i][kk] = LoadWord(from + at + box * Tile::kBoxBytes + (first + i) * 1024 +
                                    pixel * 128 + ((lane / 4) ^ pixel) * 16);
          }
        }
        if constexpr (kInPlace) __syncwarp();
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
          const uint32_t left = ((first + i) * 2 ^ lane % 8) * 16;
          const uint32_t chunk[2] = {left, left ^ 16};
          store(words[i], to + at + box * 4096, chunk);
        }
      }
      FenceForCopies();
      __syncwarp();
      if (lane == 0) BarrierArrive(barriers.FullFilter(stage.slot));
      stage.Next();
    }
  }
}

// Stores eight words of a column as they are.
struct StoreColumn {
  __device__ __forceinline__ void operator()(const uint32_t (&words)[8], uint32_t row,
                                             const uint32_t (&chunk)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t quad[4] = {words[half * 4], words[half * 4 + 1], words[half * 4 + 2],
                                words[half * 4 + 3]};
      StoreChunk(row + chunk[half], quad);
    }
  }
};

// Stores both rows of a lane: sums[4 j + 2 r + e] is row r, column 8 j + 2 t + e of the columns from
// n on. `row`: the filter's row of the lane's first channel; `rows`: how many of the two exist. kWide:
// lanes exchange pairs, so that one stores 16 bytes, and an instruction 64 bytes of a row instead of
// 32; takes registers.
template <int kColumns, bool kWide, class Epilogue>
__device__ __forceinline__ void StoreWgradRows(const Params& params, const TilePlace& place,
                                               const float* sums, int32_t n, int32_t row, int rows,
                                               const Epilogue& epilogue) {
  float* const out = static_cast<float*>(params.out);
  const int t = threadIdx.x % 4;
  const bool odd = t % 2 != 0;
  const int32_t columns = params.gemm_n - n;
  const int64_t at = place.OutputOffset(params, n) + int64_t{row} * params.out_channels;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t to = at + r * params.out_channels;
    auto pair_of = [&](int j, float (&pair)[2]) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = j * 8 + 2 * t + e;
        pair[e] = epilogue.template operator()<float>(
            sums[j * 4 + r * 2 + e],
            OutputPlace{to + column, row + r, place.group * params.gemm_n + n + column, r < rows});
      }
    };
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {
      if (j * 8 >= columns) break;
      float first[2], second[2];
      pair_of(j, first);
      pair_of(j + 1, second);
      if constexpr (kWide) {
        float other[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          other[e] = __shfl_xor_sync(0xffffffff, odd ? first[e] : second[e], 1);
        }
        if (r >= rows) continue;
        // Columns of j in even lanes, of j + 1 in odd ones.
        *reinterpret_cast<float4*>(out + to + j * 8 + (odd ? 8 + 2 * (t - 1) : 2 * t)) =
            odd ? make_float4(other[0], other[1], second[0], second[1])
                : make_float4(first[0], first[1], other[0], other[1]);
      } else if (r < rows) {
        float* const pairs = out + to + j * 8 + 2 * t;
        *reinterpret_cast<float2*>(pairs) = make_float2(first[0], first[1]);
        *reinterpret_cast<float2*>(pairs + 8) = make_float2(second[0], second[1]);
      }
    }
  }
}

// The same for the 16 rows of a fragment that begin at row m of the list of blocks of 32 channels
// under taps.
template <int kColumns, bool kWide, class Epilogue>
__device__ __forceinline__ void StoreWgradFragment(const Params& params, const TilePlace& place,
                                                   const float* sums, int32_t n, int32_t m,
                                                   const Epilogue& epilogue) {
  int32_t tap, channel_block;
  params.channel_blocks.Divmod(m / 32, &tap, &channel_block);
  const int32_t channel = channel_block * 32 + m % 32 + threadIdx.x % 32 / 4 * 2;
  StoreWgradRows<kColumns, kWide>(
      params, place, sums, n, tap * params.row_channels + channel,
      m < params.residue_class[0].rows ? params.row_channels - channel : 0, epilogue);
}

// The kernel of these forms. kProducers threads take turns at k-blocks, one in each of the first
// warps of warpgroup 0. kTransposers warps, if any, transpose dy: the other warps of warpgroup 0,
// or warpgroup 1. The last warpgroups multiply.
//
// Full(s): TMA -> transposers and consumers. FullFilter(s): transposers -> consumers. Empty(s): every
// consumer warp -> producers (the transposers have read a stage before it is multiplied).
//
// Tag: Tile, TensorMaps, Prefetch; Produce, called by one thread with its number; Transpose, by the
// transposers; Consume<Tag>, by the consumers.
template <class Tag>
__global__ void __launch_bounds__(Tag::kThreads, 1)
    WgradFragmentsKernel(const __grid_constant__ Params params,
                         const __grid_constant__ typename Tag::TensorMaps maps) {
  using Tile = typename Tag::Tile;
  constexpr bool kTransposes = Tile::kTransposers > 0;
  constexpr bool kBeside = kTransposes && Tile::kTransposers < 4;  // the producers' warps
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  // Derived from the ring's base address: a second base address overflows the uniform registers.
  const Barriers<Tile> barriers{ring};
  static_assert(Barriers<Tile>::kCount * 8 <= Tile::kBarrierBytes);
  if (threadIdx.x == 0) {
    if constexpr (kTransposes) {
      for (int s = 0; s < Tile::kStages; ++s) {
        BarrierInit(barriers.Full(s), 1);
        BarrierInit(barriers.Empty(s), Tile::kConsumerWarps);
        BarrierInit(barriers.FullFilter(s), Tile::kTransposers);
      }
      BarrierInitFence();
    } else {
      barriers.Init(Tile::kConsumerWarps);
    }
    Tag::Prefetch(maps);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    LowerRegisters<Tile::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (kBeside && warp >= Tile::kProducers) {
      if constexpr (kBeside) Tag::Transpose(params, ring, barriers);
    } else if ((kBeside || (Tile::kProducers == 1 ? warp == 0 : warp < Tile::kProducers)) &&
               ElectOne()) {
      Tag::Produce(params, maps, ring, barriers, Tile::kProducers == 1 ? 0 : warp);
    }
  } else if (kTransposes && !kBeside && warpgroup == 1) {
    LowerRegisters<Tile::kProducerRegisters>();
    if constexpr (kTransposes) Tag::Transpose(params, ring, barriers);
  } else {
    RaiseRegisters<Tile::kConsumerRegisters>();
    WaitForInputs();
    Tag::template Consume<Tag>(params, ring, barriers);
  }
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_FRAGMENTS_SM90_CUH_
