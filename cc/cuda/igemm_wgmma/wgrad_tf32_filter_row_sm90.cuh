// igemm_wgmma, wgrad filter-row in TF32: the taps of a filter row multiply the same registers (sm_90a).
//
//     rows = 64 channels under the taps of a filter row, columns = K / groups, reduction = pixels
//
// x is A in registers, dy is transposed in shared memory (wgrad_fragments_sm90.cuh). The walk over
// the pixels is that of wgrad_filter_row_sm90.cuh: the taps of a filter row multiply the same dy by x,
// each one pixel further on. Lane 4 g + t needs pixels 2 t and 2 t + 1 of eight for the first tap, and
// with neighbouring taps 2 t to 2 t + 3 for all three, so it reads four pixels instead of six. Three
// units (a unit: a filter row, 64 channels) share a tile, and so the transposed dy:
//
//     producers    two threads, which take turns at k-blocks of 32 pixels: two boxes of x for each
//                  unit, and two of dy
//     transposers  two warps: dy -> rows along the reduction
//     consumers    three warpgroups, one for each unit: 3 taps x 64 channels x 64 of K
//
// Barriers: WgradFragmentsKernel. Shared memory: barriers in 1 KB, 4 stages of (3 x 10 + 8 + 8) KB.
// Registers: producers and transposers 56, consumers 152, of which 96 accumulators and 16 fragments
// (or 24). Persistent; split-K and refusals as in wgrad_filter_row_sm90.cuh, and K / groups that is not a
// multiple of 32.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_TF32_FILTER_ROW_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_TF32_FILTER_ROW_SM90_CUH_

#include <cstdint>

#include "cuda/igemm_wgmma/wgrad_filter_row_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_fragments_sm90.cuh"

namespace jaxconv::igemm_wgmma {

template <int kStages_>
struct WgradTf32FilterRowTile {
  static constexpr int kStages = kStages_, kFilterSlots = kStages_, kStationary = 0;
  static constexpr int kUnits = kTf32WgradRowUnits, kProducers = 2, kTransposers = 2;
  static constexpr int kUnitRows = kWgradRowTaps * 64;
  static constexpr int kTileM = kUnits * kUnitRows, kTileN = 64;
  static constexpr int kThreads = (kUnits + 1) * 128, kConsumerWarps = kUnits * 4;
  static constexpr int kPixels = kTf32WgradRowPixels;
  static constexpr int kBoxBytesX = (kPixels + kMaxSpan) * 128;
  static constexpr int kBoxBytes = kPixels * 128;  // of dy
  static constexpr int kBytesA = kUnits * 2 * kBoxBytesX, kBytesB = 2 * kBoxBytes;
  static constexpr int kRowsAt = kBytesA + kBytesB;  // the transposed dy
  static constexpr int kStageBytes = kRowsAt + kTileN * 128;
  static constexpr int kRingAt = 1024, kBarrierBytes = kRingAt;
  // 1024 more to align the ring.
  static constexpr int kSharedBytes = kRingAt + kStages * kStageBytes + 1024;
  static_assert(kSharedBytes + 1024 <= 232448, "227 KB a CTA, barriers among them");
  static_assert(kBoxBytesX % 1024 == 0 && kRowsAt % 1024 == 0 && kStageBytes % 1024 == 0);
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 152;
};

// The number of k-blocks of a tile: slice i takes k-blocks i, i + S, ...
struct RoundRobinKBlocks {
  const Params& params;

  __device__ __forceinline__ int32_t operator()(const TilePlace& place) const {
    const int32_t slices = params.slices.divisor;
    return (params.residue_class[0].k_blocks - place.slice + slices - 1) / slices;
  }
};

// A producer, one thread; its next k-block is `turn` k-blocks ahead.
template <class Tile>
__device__ __forceinline__ void ProduceTf32FilterRows(const Params& params,
                                                      const WgradFilterRowMaps& maps, uint32_t ring,
                                                      const Barriers<Tile>& barriers, int turn) {
  const ResidueClass& of = params.residue_class[0];
  const int32_t image_pixels =
      static_cast<int32_t>(of.count[0].divisor * of.count[1].divisor * of.count[2].divisor);
  const int32_t span = (min(of.taps[0], kWgradRowTaps) - 1) * of.offset_step[0];
  const uint32_t bytes_x = (Tile::kPixels + span) * 128;
  const int32_t slices = params.slices.divisor;
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const int32_t first = place.m_tile * Tile::kUnits;
    const int units = min(Tile::kUnits, of.rows / Tile::kUnitRows - first);
    int32_t channel[Tile::kUnits], ahead[Tile::kUnits];
    uint16_t off1[Tile::kUnits], off2[Tile::kUnits];
#pragma unroll
    for (int u = 0; u < Tile::kUnits; ++u) {
      const FilterRowUnit unit(of, first + u);
      channel[u] = place.group * params.a_group + unit.channel_block * 64;
      off1[u] = of.offset0[1] + unit.t1 * of.offset_step[1];
      off2[u] = of.offset0[2] + unit.t2 * of.offset_step[2];
      // The distance from a pixel of dy to the chunk's first tap, plus one image so that no index
      // is negative.
      ahead[u] = image_pixels + of.offset0[0] + unit.chunk * kWgradRowTaps * of.offset_step[0];
    }
    const int32_t k = place.group * params.b_group + place.n_tile * Tile::kTileN;
    WaitForPrecedingGrids();
    for (int32_t k_block = place.slice; k_block < of.k_blocks; k_block += slices) {
      if (turn > 0) {
        --turn;
        stage.Next();
        continue;
      }
      turn = Tile::kProducers - 1;
      const WalkPlace dy(of, k_block * Tile::kPixels);
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + Tile::kRingAt + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, units * 2 * bytes_x + Tile::kBytesB);
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        LoadWalk(params.rank, shared + Tile::kBytesA + box * Tile::kBoxBytes, &maps.dy, barrier,
                 k + box * 32, dy.x, dy.y, dy.z, dy.image, 0, 0);
      }
      WalkPlace x = dy;
      int32_t distance = -1;
#pragma unroll
      for (int u = 0; u < Tile::kUnits; ++u) {
        if (u >= units) break;
        // Filter rows of the same taps begin at the same pixel.
        if (ahead[u] != distance) {
          distance = ahead[u];
          x = WalkPlace(of, k_block * Tile::kPixels + distance);
        }
#pragma unroll
        for (int box = 0; box < 2; ++box) {
          LoadWalk(params.rank, shared + (u * 2 + box) * Tile::kBoxBytesX, &maps.x, barrier,
                   channel[u] + box * 32, x.x, of.lower[1] + x.y * params.src_step[1],
                   of.lower[2] + x.z * params.src_step[2], x.image - 1, off1[u], off2[u]);
        }
      }
      stage.Next();
    }
  }
}

// A consumer warpgroup. kAdjacent: the taps are neighbours.
template <class Tile, class Epilogue, bool kAdjacent>
__device__ __forceinline__ void ConsumeTf32FilterRows(const Params& params, uint32_t ring,
                                                      const Barriers<Tile>& barriers) {
  constexpr int kSteps = Tile::kPixels / 8;
  constexpr int kReads = kAdjacent ? kWgradRowTaps + 1 : 2 * kWgradRowTaps;
  const ResidueClass& of = params.residue_class[0];
  const int unit_of_tile = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  // Pixel i of the lane, or pixel i % 2 under tap i / 2.
  uint32_t of_lane[kReads];
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int pixel = lane % 4 * 2 + (kAdjacent ? i : i / 2 * of.offset_step[0] + i % 2);
    of_lane[i] = ring + Tile::kRingAt + (unit_of_tile * 2 + warp / 2) * Tile::kBoxBytesX +
                 ChannelPairOffset(warp % 2, pixel);
  }
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const int32_t unit_index = place.m_tile * Tile::kUnits + unit_of_tile;
    const bool exists = unit_index * Tile::kUnitRows < of.rows;
    float acc[kWgradRowTaps][Tile::kTileN / 2] = {};
    for (int32_t k_block = place.slice; k_block < of.k_blocks; k_block += params.slices.divisor) {
      const uint32_t at = stage.slot * Tile::kStageBytes;
      uint32_t x[2][kReads][2];
      auto read = [&](int step) {
#pragma unroll
        for (int i = 0; i < kReads; ++i) {
          LoadPair(of_lane[i] + at + step * 1024, &x[step % 2][i][0], &x[step % 2][i][1]);
        }
      };
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      if (exists) read(0);
      BarrierWait(barriers.FullFilter(stage.slot), stage.parity);
      if (exists) {
        const uint64_t dy = KMajorDescriptor(ring + Tile::kRingAt + at + Tile::kRowsAt);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          WgmmaFence();
#pragma unroll
          for (int tap = 0; tap < kWgradRowTaps; ++tap) {
            const uint32_t (&first)[2] = x[step % 2][kAdjacent ? tap : 2 * tap];
            const uint32_t (&second)[2] = x[step % 2][kAdjacent ? tap + 1 : 2 * tap + 1];
            const uint32_t a[4] = {first[0], first[1], second[0], second[1]};
            WgmmaFromRegisters<Tile::kTileN>(acc[tap], a, dy + step * (32 >> 4), 1);
          }
          WgmmaCommit();
          if (step + 1 < kSteps) {
            // The registers that the previous step multiplied are free.
            WgmmaWait<1>();
            read(step + 1);
          }
        }
        WgmmaWait<0>();
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(barriers.Empty(stage.slot));
      stage.Next();
    }
    const auto epilogue = MakeEpilogue<Epilogue>(params.epilogue, params.slice_elements > 0);
    if (exists) {
      const FilterRowUnit unit(of, unit_index);
      const int first = unit.chunk * kWgradRowTaps;
      const int taps = min(kWgradRowTaps, of.taps[0] - first);
      const int32_t tap0 = (unit.t2 * of.taps[1] + unit.t1) * of.taps[0] + first;
      const int32_t channel = unit.channel_block * 64 + warp * 16 + lane / 4 * 2;
#pragma unroll
      for (int tap = 0; tap < kWgradRowTaps; ++tap) {
        if (tap >= taps) break;
        StoreWgradRows<Tile::kTileN, /*kWide=*/true>(
            params, place, acc[tap], place.n_tile * Tile::kTileN,
            (tap0 + tap) * params.row_channels + channel, params.row_channels - channel, epilogue);
      }
    }
    FinishTile<Tile>(params, place, of, epilogue);
  }
}

template <Op kOp, DType kType_, int kStages>
struct WgradTf32FilterRow : WgradTf32FilterRowTile<kStages> {
  static_assert(kOp == Op::kWgrad && kType_ == DType::kF32);
  static constexpr DType kType = kType_;
  using Tile = WgradTf32FilterRowTile<kStages>;
  using TensorMaps = WgradFilterRowMaps;
  using Epilogue = PlainEpilogue;

  static __device__ __forceinline__ void Prefetch(const WgradFilterRowMaps& maps) {
    PrefetchTensorMap(&maps.x);
    PrefetchTensorMap(&maps.dy);
  }
  static __device__ __forceinline__ void Produce(const Params& params,
                                                 const WgradFilterRowMaps& maps, uint32_t ring,
                                                 const Barriers<Tile>& barriers, int turn) {
    ProduceTf32FilterRows(params, maps, ring, barriers, turn);
  }
  static __device__ __forceinline__ void Transpose(const Params& params, uint32_t ring,
                                                   const Barriers<Tile>& barriers) {
    TransposeColumns<Tile, 2>(params, ring, barriers, RoundRobinKBlocks{params}, StoreColumn());
  }
  template <class Tag>
  static __device__ __forceinline__ void Consume(const Params& params, uint32_t ring,
                                                 const Barriers<Tile>& barriers) {
    if (params.residue_class[0].offset_step[0] != 1) {
      ConsumeTf32FilterRows<Tile, typename Tag::Epilogue, false>(params, ring, barriers);
      return;
    }
    ConsumeTf32FilterRows<Tile, typename Tag::Epilogue, true>(params, ring, barriers);
  }
  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchFilterRowBoxes<WgradFragmentsKernel<Tag>, Tag, Tile::kPixels>(
        plan, operands, stream, /*overlaps=*/true);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_TF32_FILTER_ROW_SM90_CUH_
