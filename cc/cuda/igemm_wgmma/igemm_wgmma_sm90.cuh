// igemm_wgmma: convolution as an implicit GEMM, wgmma fed by the tensor copy engine (sm_90a).
//
//     fprop   rows = output pixels, columns = K / groups, reduction = taps x C / groups
//     dgrad   rows = input pixels (of one phase), columns = C / groups, reduction = taps x K /
//     groups
//
// float32 operands are multiplied in TF32, to which the copy engine rounds them; 16-bit ones as
// they are. A step of the reduction is one tap and 128 bytes of channels: 64, or 32 in float32. Its
// activations are one im2col box of tile_m pixels x 128 bytes: padding, row ends, image ends,
// strides, dilation and the end of the batch are the copy engine's business. Its filter is tile_n /
// 64 boxes of 64 x 64 out of (tap, C, K): for fprop the lines run along columns (MN-major B), for
// dgrad along the reduction (K-major). wgmma takes TF32 K-major only, so fprop in float32 gets the
// filter transposed, (tap, K, C), and wgrad, where both operands would have to be transposed,
// multiplies by mma.sync (device/mma_wgrad_tile_sm90.cuh). A filter stored as (K, tap, C) is read
// by the other operation's kernel (KernelOp in core/implicit_gemm.h). A 1x1 convolution without
// stride and padding is a matrix, loaded as one.
//
//     CTA: one producer warpgroup, of which one thread issues the copies, and two or three math
//     warpgroups: one above the other in a tile (cooperative), or taking turns at tiles of their
//     own (pingpong). Persistent: a CTA takes every so-manieth tile, columns fastest. Shared
//     memory, 128x256: 4 stages of (16 + 32) KB, 32 KB to turn fragments into lines, barriers.
//     Registers: producer 40, math 232 (with three math warpgroups 32 and 160, with 192
//     accumulators a thread 24 and 240).
//
// "Columns": for few output channels or few pixels the tile is the other way round, 64 channels by
// up to 256 pixels in pingpong (wgmma_columns_sm90.cuh).
//
// "One tap": for 1x1 convolutions, which memory bounds. The filter's steps for a CTA's columns stay
// in shared memory (not in 128x128): what L2 gives is spent on activations alone. Tiles may be
// drawn: SMs do not get on equally fast, and whoever is free takes the next tile.
//
// "Rows": the taps of a filter row share one load. The pixels are those of the padded image, so a
// tap's operand begins that many lines further on; the padding's columns are computed and dropped.
// Rows share their padding: the zeros behind one are those before the next.
//
// Full(s): the producer announces a stage's bytes, math waits. Empty(s): each math warpgroup that
// reads the stage arrives when its wgmma has retired, one step late, so that one step is always in
// flight; the producer waits. While math stores a tile, the producer fills the ring for the next.
//
// All of that is set up while the kernel before this one in the stream ends
// (overlapping_launch.cuh): the producer waits for that before its first copy, with the step's
// bytes on their way to L2, and math before its first tile. Where tiles are few:
// igemm_wgmma_cluster_sm90.cuh.
//
// Refused, with a reason: channels not of 16-byte pitches, groups of channels that are not
// multiples of a step's, more than eight phases, corners or offsets beyond the maps' fields,
// strides above 8.
#ifndef JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_SM90_CUH_
#define JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_SM90_CUH_

#include <algorithm>
#include <type_traits>

#include "cuda/device/element.cuh"
#include "cuda/device/fused_epilogue.cuh"
#include "cuda/device/igemm_wgmma_params.h"
#include "cuda/device/mma_wgrad_tile_sm90.cuh"
#include "cuda/device/wgmma_columns_sm90.cuh"
#include "cuda/device/wgmma_tile_sm90.cuh"
#include "cuda/kernels/igemm_wgmma.h"
#include "cuda/kernels/overlapping_launch.cuh"
#include "cuda/kernels/tensor_map.h"
#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tensor_copy_sm90.cuh"

namespace jaxconv {

template <WgmmaTileId kTile>
struct WgmmaTileOf;
//  math warpgroups, pingpong, 64-row blocks of each, columns (twice), stages, filter slots,
//  resident
template <>
struct WgmmaTileOf<WgmmaTileId::k128x256> : WgmmaTile<2, false, 1, 256, 0, 4> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k256x128> : WgmmaTile<2, false, 2, 128, 0, 4> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x320> : WgmmaTile<2, false, 1, 192, 128, 3> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x192> : WgmmaTile<2, false, 1, 192, 0, 4> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k192x128> : WgmmaTile<3, false, 1, 128, 0, 4> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x128> : WgmmaTile<2, false, 1, 128, 0, 6> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x128Pingpong> : WgmmaTile<2, true, 2, 128, 0, 6> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k192x128Pingpong> : WgmmaTile<2, true, 3, 128, 0, 5, 0, 0, 2048> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x64Pingpong> : WgmmaTile<2, true, 2, 64, 0, 7> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x128PingpongRows> : WgmmaTile<2, true, 2, 128, 0, 3, 8> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x128PingpongOneTap>
    : WgmmaTile<2, true, 2, 128, 0, 6, 0, 0, 4096, true> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k64x256PingpongOneTap>
    : WgmmaTile<2, true, 1, 256, 0, 8, 0, 4, 4096, true> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k64x256PingpongOneTapC128>
    : WgmmaTile<2, true, 1, 256, 0, 16, 0, 2, 4096, true> {
  static constexpr bool kWholeRows = true;
};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x64PingpongResidentF32>
    : WgmmaTile<2, true, 2, 64, 0, 4, 0, 18, 0> {};

//  pixels, stages, filter slots, resident, one tap
template <>
struct WgmmaTileOf<WgmmaTileId::k256x64Columns> : WgmmaColumnsTile<256, 5> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k256x64ColumnsRows> : WgmmaColumnsTile<256, 4, 8> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k224x64ColumnsRows> : WgmmaColumnsTile<224, 4, 10> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k192x64ColumnsResident> : WgmmaColumnsTile<192, 5, 0, 9> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x64ColumnsResident> : WgmmaColumnsTile<128, 7, 0, 9> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k256x64ColumnsOneTap> : WgmmaColumnsTile<256, 4, 0, 4, 8192, true> {
};

//  warps in m and n, rows and columns of each, stages
template <>
struct WgmmaTileOf<WgmmaTileId::k128x256Mma> : MmaWgradTile<2, 4, 64, 64, 4> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k256x128Mma> : MmaWgradTile<4, 2, 64, 64, 4> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x64Mma> : MmaWgradTile<4, 2, 32, 32, 8> {};

// Channels of a step, one line of shared memory.
template <typename T>
inline constexpr int32_t kWgmmaStepChannels = 128 / sizeof(T);
// Whether the filter's lines run along the output's columns, as they lie in (tap, C, K) for fprop.
template <Op kOp, typename T>
inline constexpr bool kWgmmaColumnLines = kOp != Op::kDgrad && sizeof(T) == 2;
// wgrad: output pixels of a step, and of a box of kWgmmaStepChannels of either operand.
template <typename T>
inline constexpr int32_t kWgmmaStepPixels = 128 / sizeof(T);

struct WgmmaMaps {
  CUtensorMap a[kMaxWgmmaPhases];
  CUtensorMap b;
  CUtensorMap out;  // one tap and columns, 16 bits
};

// Where a tile lies.
struct WgmmaTilePlace {
  int32_t n_tile, m_tile, slice, group, batch, phase;

  __device__ __forceinline__ WgmmaTilePlace(const IgemmWgmmaParams& params, int32_t index) {
    params.n_tiles.Divmod(index, &index, &n_tile);
    params.m_tiles.Divmod(index, &index, &m_tile);
    params.slices.Divmod(index, &index, &slice);
    params.groups.Divmod(index, &index, &group);
    params.batches.Divmod(index, &phase, &batch);
  }
};

// Addresses of the mbarriers.
template <class Tile>
struct WgmmaBarriers {
  static constexpr int kCount = 2 * Tile::kStages + 2 * Tile::kSlotsB + Tile::kResident;
  // One tap: behind them, for each stage the tile that begins there, and whether all have ended.
  static constexpr int kWords = kCount + (Tile::kOneTap ? Tile::kStages / 2 + 1 : 0);
  uint32_t first;
  __device__ __forceinline__ uint32_t TileAt(uint32_t stage) const {
    return first + kCount * 8 + stage * 4;
  }
  __device__ __forceinline__ uint32_t Ended() const { return TileAt(Tile::kStages); }
  __device__ __forceinline__ uint32_t Full(uint32_t stage) const { return first + stage * 8; }
  __device__ __forceinline__ uint32_t Empty(uint32_t stage) const {
    return first + (Tile::kStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t FullB(uint32_t slot) const {
    return first + (2 * Tile::kStages + slot) * 8;
  }
  __device__ __forceinline__ uint32_t EmptyB(uint32_t slot) const {
    return first + (2 * Tile::kStages + Tile::kSlotsB + slot) * 8;
  }
  __device__ __forceinline__ uint32_t Resident(uint32_t step) const {
    return first + (2 * Tile::kStages + 2 * Tile::kSlotsB + step) * 8;
  }
};

// A place in a ring of kSize slots and the parity of its round.
template <int kSize>
struct RingPlace {
  uint32_t slot = 0, parity = 0;
  __device__ __forceinline__ void Next() {
    if (++slot == kSize) slot = 0, parity ^= 1;
  }
  __device__ __forceinline__ void Skip(uint32_t count) {
    const uint32_t at = slot + count;
    parity ^= at / kSize & 1;
    slot = at % kSize;
  }
};

// Where the first pixel of a tile lies in the source, for the copy engine.
struct WgmmaPixel {
  int32_t x = 0, y = 0, z = 0, image = 0;

  // Pixel m of `pixels` of a batch.
  __device__ __forceinline__ WgmmaPixel(const IgemmWgmmaParams& params, const WgmmaPhase& phase,
                                        int32_t m, int32_t pixels, int32_t batch) {
    if (params.rank == 0) {
      x = batch * pixels + m;
    } else {
      phase.count[0].Divmod(m, &m, &x);
      phase.count[1].Divmod(m, &m, &y);
      phase.count[2].Divmod(m, &image, &z);
      x = phase.lower[0] + x * params.src_step[0];
      y = phase.lower[1] + y * params.src_step[1];
      z = phase.lower[2] + z * params.src_step[2];
      image += batch * params.images;
    }
  }
};

// Where in a tile's reduction a step lies: taps fastest, then slabs, so that what no tap has read
// before is spread over the reduction and not wanted at its beginning. In rows the taps of a row
// share a step, and t0 stays 0.
template <bool kRows>
struct WgmmaStep {
  int32_t slab = 0, t0 = 0, t1 = 0, t2 = 0;

  __device__ __forceinline__ WgmmaStep(const WgmmaPhase& phase, int32_t first) {
    if (first == 0) return;
    if constexpr (!kRows) t0 = first % phase.taps[0], first /= phase.taps[0];
    t1 = first % phase.taps[1], first /= phase.taps[1];
    slab = first / phase.taps[2];
    t2 = first - slab * phase.taps[2];
  }
  __device__ __forceinline__ void Next(const WgmmaPhase& phase) {
    if (!kRows && ++t0 < phase.taps[0]) return;
    t0 = 0;
    if (++t1 < phase.taps[1]) return;
    t1 = 0;
    if (++t2 < phase.taps[2]) return;
    t2 = 0;
    ++slab;
  }
  // The filter's linear tap.
  __device__ __forceinline__ int32_t Tap(const WgmmaPhase& phase) const {
    return phase.filter0 + t0 * phase.filter_step[0] + t1 * phase.filter_step[1] +
           t2 * phase.filter_step[2];
  }
};

// A box of pixels from `at` on, a line of those channels from `c` on.
template <BoxTarget kTarget = BoxTarget::kShared>
__device__ __forceinline__ void CopyWgmmaBox(int32_t rank, uint32_t shared, const CUtensorMap* map,
                                             uint32_t barrier, int32_t c, const WgmmaPixel& at,
                                             uint16_t off0, uint16_t off1, uint16_t off2) {
  switch (rank) {
    case 0:
      CopyTile2d<kTarget>(shared, map, barrier, c, at.x);
      break;
    case 1:
      CopyIm2col1d<kTarget>(shared, map, barrier, c, at.x, at.image, off0);
      break;
    case 2:
      CopyIm2col2d<kTarget>(shared, map, barrier, c, at.x, at.y, at.image, off0, off1);
      break;
    default:
      CopyIm2col3d<kTarget>(shared, map, barrier, c, at.x, at.y, at.z, at.image, off0, off1, off2);
  }
}

// A step's pixels from `at` on, a line of those channels from `channel` on.
template <typename T, BoxTarget kTarget = BoxTarget::kShared, bool kRows>
__device__ __forceinline__ void CopyWgmmaPixels(const IgemmWgmmaParams& params,
                                                const WgmmaPhase& phase,
                                                const WgmmaStep<kRows>& step, uint32_t shared,
                                                const CUtensorMap* map, uint32_t barrier,
                                                int32_t channel, const WgmmaPixel& at) {
  CopyWgmmaBox<kTarget>(params.rank, shared, map, barrier,
                        channel + step.slab * kWgmmaStepChannels<T>, at,
                        kRows ? 0 : phase.offset0[0] + step.t0 * phase.offset_step[0],
                        phase.offset0[1] + step.t1 * phase.offset_step[1],
                        phase.offset0[2] + step.t2 * phase.offset_step[2]);
}

// Boxes wholly past the last column are not loaded; what lies in their place is not stored.
template <class Tile>
__device__ __forceinline__ int WgmmaFilterBoxes(const IgemmWgmmaParams& params, int32_t n_first) {
  return min(Tile::kTileN / 64, (params.gemm_n - n_first + 63) / 64);
}

// The filter under one tap: `boxes` of 64 columns from column n on, a step of the reduction from
// `channel` on. fprop walks K (n) by C (channel), dgrad K (channel) by C (n); the map is (K, C,
// tap), or (C, K, tap) for fprop in float32 and for a filter stored as krsc, which has one group. A
// group's part begins somewhere along K.
template <Op kOp, typename T, class Tile, BoxTarget kTarget = BoxTarget::kShared>
__device__ __forceinline__ void CopyWgmmaFilter(uint32_t shared, const CUtensorMap* map,
                                                uint32_t barrier, int boxes, int32_t n,
                                                int32_t channel, int32_t channel_of_group,
                                                int32_t tap) {
  constexpr bool kColumnLines = kWgmmaColumnLines<kOp, T>;
  if constexpr (kOp == Op::kFprop) n += channel_of_group;
  if constexpr (kOp == Op::kDgrad) channel += channel_of_group;
#pragma unroll
  for (int i = 0; i < Tile::kTileN / 64; ++i) {
    if (i >= boxes) break;
    const int32_t column = n + i * 64;
    CopyTile3d<kTarget>(shared + i * 8192, map, barrier, kColumnLines ? column : channel,
                        kColumnLines ? channel : column, tap);
  }
}

// A phase without taps (channel0 > 0) is stored as zeros, and nothing is loaded: strided dgrad of a
// small filter has many such tiles. In fprop and in rows they are rare, and the second call of the
// store cost fprop's short launches 3 %: there, and with pixels as columns, they are a step of
// zeros.
template <Op kOp, class Tile>
inline constexpr bool kStoresZeros = kOp == Op::kDgrad && !Tile::kRows && !Tile::kColumns;

// A CTA's tiles: by turns or, drawn, the next that no CTA has taken yet. A filter that stays keeps
// a CTA to its columns, and each range of columns has a counter.
template <class Tile>
struct WgmmaTileOrder {
  int32_t index = blockIdx.x;
  int32_t next = 0, turn = 0;

  // One tap: what is drawn takes a microsecond to come, so it is asked for while a tile is loaded,
  // and not before the kernel in front has ended, which clears the counters.
  __device__ __forceinline__ void Ask(const IgemmWgmmaParams& params) {
    if constexpr (Tile::kOneTap) next = Draw(params);
  }
  __device__ __forceinline__ void Next() {
    if constexpr (Tile::kOneTap) {
      index = next;
    } else {
      index += gridDim.x;
    }
  }
  __device__ __forceinline__ int32_t Draw(const IgemmWgmmaParams& params) {
    if (params.drawn == nullptr) return blockIdx.x + ++turn * gridDim.x;
    const int32_t ranges = Tile::kResident > 0 ? params.n_tiles.divisor : 1;
    const int32_t range = blockIdx.x % ranges;
    return gridDim.x + range + atomicAdd(params.drawn + range, 1) * ranges;
  }
};

// The thread that issues the copies.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ void ProduceWgmmaStages(const IgemmWgmmaParams& params,
                                                   const WgmmaMaps& maps, uint32_t ring,
                                                   const WgmmaBarriers<Tile>& barriers) {
  RingPlace<Tile::kStages> stage;
  RingPlace<(Tile::kSlotsB > 0 ? Tile::kSlotsB : 1)> slot;
  for (WgmmaTileOrder<Tile> order; order.index < params.tiles; order.Next()) {
    const int32_t index = order.index;
    const WgmmaTilePlace place(params, index);
    const WgmmaPhase& phase = params.phase[place.phase];
    if constexpr (!Tile::kOneTap) {  // that has one phase, of all tiles
      if (place.m_tile * Tile::kTileM >= phase.rows) continue;
      if (kStoresZeros<kOp, Tile> && phase.channel0 > 0) continue;
    }
    const WgmmaPixel pixel(params, phase, place.m_tile * Tile::kTileM, phase.rows, place.batch);
    const int32_t n_first = place.n_tile * Tile::kTileN;
    const int boxes = WgmmaFilterBoxes<Tile>(params, n_first);
    const int32_t first = place.slice * params.steps_per_slice;
    const int32_t steps = min(params.steps_per_slice, phase.steps - first);
    const int32_t tap_of_batch = place.batch * params.filter_taps;
    const int32_t a_channel = place.group * params.a_group + phase.channel0;
    const int32_t b_channel = place.group * params.b_group;
    WgmmaStep<Tile::kRows> step(phase, first);
    if (index == blockIdx.x) {
      // The first pixels and a tap of the filter, each CTA another one, while the kernel before
      // this one ends.
      CopyWgmmaPixels<T, BoxTarget::kL2>(params, phase, step, 0, &maps.a[place.phase], 0, a_channel,
                                         pixel);
      CopyWgmmaFilter<kOp, T, Tile, BoxTarget::kL2>(
          0, &maps.b, 0, boxes, n_first, phase.channel0 + step.slab * kWgmmaStepChannels<T>,
          b_channel, tap_of_batch + blockIdx.x % params.filter_taps);
    }
    // So late, because nothing before reads what that kernel may write.
    WaitForPrecedingGrids();
    order.Ask(params);
    for (int32_t i = 0; i < steps; ++i) {
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      if (Tile::kOneTap && i == 0) StoreWord(barriers.TileAt(stage.slot), index);
      BarrierArriveExpect(barrier, Tile::kBytesA + (Tile::kFilterApart ? 0 : boxes * 8192));
      CopyWgmmaPixels<T>(params, phase, step, shared, &maps.a[place.phase], barrier, a_channel,
                         pixel);
      stage.Next();
      const int32_t channel = phase.channel0 + step.slab * kWgmmaStepChannels<T>;
      const int32_t tap = tap_of_batch + step.Tap(phase);
      if constexpr (!Tile::kFilterApart) {
        CopyWgmmaFilter<kOp, T, Tile>(shared + Tile::kBytesA, &maps.b, barrier, boxes, n_first,
                                      channel, b_channel, tap);
      } else if constexpr (Tile::kSlotsB > 0) {
        for (int32_t t = 0; t < phase.taps[0]; ++t) {
          BarrierWait(barriers.EmptyB(slot.slot), slot.parity ^ 1);
          BarrierArriveExpect(barriers.FullB(slot.slot), boxes * 8192);
          CopyWgmmaFilter<kOp, T, Tile>(ring + Tile::kFilterAt + slot.slot * Tile::kBytesB, &maps.b,
                                        barriers.FullB(slot.slot), boxes, n_first, channel,
                                        b_channel, tap + t * phase.filter_step[0]);
          slot.Next();
        }
      } else if (index == blockIdx.x) {
        // A resident filter comes with the first tile's activations, tap by tap, so that the first
        // product waits for one tap and not for all. The grid is a multiple of n_tiles: all tiles
        // of a CTA have the same columns.
        for (int32_t t = 0; t < phase.taps[0]; ++t) {
          const uint32_t at = i * phase.taps[0] + t;
          BarrierArriveExpect(barriers.Resident(at), boxes * 8192);
          CopyWgmmaFilter<kOp, T, Tile>(ring + Tile::kFilterAt + at * Tile::kBytesB, &maps.b,
                                        barriers.Resident(at), boxes, n_first, channel, b_channel,
                                        tap + t * phase.filter_step[0]);
        }
      }
      step.Next(phase);
    }
  }
  if constexpr (Tile::kOneTap) {
    BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
    StoreWord(barriers.TileAt(stage.slot), params.tiles);
    BarrierArrive(barriers.Full(stage.slot));
  }
}

// The same for wgrad. A tile's rows are kTileM / 64 boxes of the list of taps times slabs of 64
// channels; a step is 64 output pixels: of each box those pixels of x under its tap, and of dy the
// tile's columns.
template <class Tile>
__device__ __forceinline__ void ProduceWgmmaWgradStages(const IgemmWgmmaParams& params,
                                                        const WgmmaMaps& maps, uint32_t ring,
                                                        const WgmmaBarriers<Tile>& barriers) {
  static_assert(!Tile::kRows);
  constexpr int kBoxesA = Tile::kTileM / 64;
  const WgmmaPhase& phase = params.phase[0];
  const CUtensorMap* map_a = &maps.a[0];
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const WgmmaTilePlace place(params, index);
    const int32_t n_first = place.n_tile * Tile::kTileN;
    const int32_t k = place.group * params.b_group + n_first;
    const int boxes = min(Tile::kTileN / 64, (params.gemm_n - n_first + 63) / 64);
    const int boxes_a =
        min(kBoxesA, params.filter_taps * static_cast<int32_t>(params.slabs.divisor) -
                         place.m_tile * kBoxesA);
    int32_t channel[kBoxesA];
    uint16_t offset[kBoxesA][3];
#pragma unroll
    for (int i = 0; i < kBoxesA; ++i) {
      int32_t tap, slab, t1;
      params.slabs.Divmod(place.m_tile * kBoxesA + i, &tap, &slab);
      channel[i] = place.group * params.a_group + slab * 64;
      t1 = tap / phase.taps[0];
      offset[i][0] = phase.offset0[0] + (tap - t1 * phase.taps[0]) * phase.offset_step[0];
      offset[i][2] = phase.offset0[2] + t1 / phase.taps[1] * phase.offset_step[2];
      offset[i][1] = phase.offset0[1] + t1 % phase.taps[1] * phase.offset_step[1];
    }
    const int32_t first = place.slice * params.steps_per_slice;
    const int32_t steps = min(params.steps_per_slice, phase.steps - first);
    WaitForPrecedingGrids();
    for (int32_t step = 0; step < steps; ++step) {
      const int32_t pixel = (first + step) * 64;
      const WgmmaPixel at(params, phase, pixel, params.pixels, place.batch);
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, (boxes_a + boxes) * 8192);
#pragma unroll
      for (int i = 0; i < kBoxesA; ++i) {
        if (i >= boxes_a) break;
        CopyWgmmaBox(params.rank, shared + i * 8192, map_a, barrier, channel[i], at, offset[i][0],
                     offset[i][1], offset[i][2]);
      }
      for (int i = 0; i < boxes; ++i) {
        CopyTile3d(shared + Tile::kBytesA + i * 8192, &maps.b, barrier, k + i * 64, pixel,
                   place.batch);
      }
      stage.Next();
    }
  }
}

// Row m of a phase as a row of the output, or -1.
template <Op kOp>
__device__ __forceinline__ int32_t WgmmaOutputRow(const IgemmWgmmaParams& params,
                                                  const WgmmaPhase& phase, int32_t m) {
  if (m >= phase.rows) return -1;
  if constexpr (kOp == Op::kWgrad) {
    int32_t tap, slab;
    params.slabs.Divmod(m / 64, &tap, &slab);
    const int32_t channel = slab * 64 + m % 64;
    if (channel >= params.row_channels) return -1;
    m = tap * params.row_channels + channel;
  } else if (!params.dense_rows) {
    int32_t j0, j1, j2, image;
    phase.count[0].Divmod(m, &m, &j0);
    phase.count[1].Divmod(m, &m, &j1);
    phase.count[2].Divmod(m, &image, &j2);
    if (j0 >= phase.width) return -1;
    m = ((image * params.out_extent[2] + phase.phase[2] + j2 * params.period[2]) *
             params.out_extent[1] +
         phase.phase[1] + j1 * params.period[1]) *
            params.out_extent[0] +
        phase.phase[0] + j0 * params.period[0];
  }
  return m;
}

// A warpgroup's part of a finished tile -> the output.
template <Op kOp, typename T, class Tile, class Epilogue>
__device__ __forceinline__ void StoreWgmmaTile(const IgemmWgmmaParams& params,
                                               const WgmmaTilePlace& place, const WgmmaPhase& phase,
                                               const typename Tile::Accumulators& acc,
                                               int32_t m_first, uint32_t staging) {
  const int lane = Lane();
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int64_t base = place.slice * params.slice_elements + place.batch * params.out_batch +
                       int64_t{place.group} * params.out_group + n_first;
  // A warp's rows are decoded once, a row a lane, and handed round.
  int32_t decoded[(Tile::kBlocks + 1) / 2];
#pragma unroll
  for (int i = 0; i < (Tile::kBlocks + 1) / 2; ++i) {
    decoded[i] = WgmmaOutputRow<kOp>(params, phase, m_first + (2 * i + lane / 16) * 64 + lane % 16);
  }
  auto row_offset = [&](int block, int row) -> int64_t {
    const int32_t m = __shfl_sync(0xffffffff, decoded[block / 2], block % 2 * 16 + row);
    return m < 0 ? -1 : base + int64_t{m} * params.out_channels;
  };
  const Epilogue epilogue(params.epilogue);
  const int channel0 = place.group * params.gemm_n + n_first;
  __syncwarp();
  constexpr bool kPlain = std::is_same_v<Epilogue, PlainEpilogue>;
  constexpr bool kWholeRows = sizeof(T) == 2 && Tile::kWholeRows;
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; ++i) {
    if constexpr (sizeof(T) == 4 && Tile::kPingpong) {
      const int64_t upper = row_offset(i, lane / 4), lower = row_offset(i, lane / 4 + 8);
#pragma unroll
      for (int c = 0; c < Tile::kTileN / 64; ++c) {
        const float* chunk =
            c * 64 < Tile::kN0 ? &acc.first[i][c * 32] : &acc.second[i][c * 32 - Tile::kN0 / 2];
        const int columns = params.gemm_n - n_first - c * 64;
        if (columns <= 0) break;
        StoreFragments(chunk, static_cast<float*>(params.out) + c * 64, epilogue, upper, lower,
                       columns, channel0 + c * 64);
      }
    } else if (kPlain && (sizeof(T) == 4 || !params.out_is_f32)) {
      if constexpr (kWholeRows) {
        static_assert(Tile::kTileN == 256);
        StoreRoundedRows(
            acc.first[i], staging, static_cast<T*>(params.out),
            [&](int row) { return row_offset(i, row); }, params.gemm_n - n_first);
      } else {
        constexpr int kColumns = 128 / sizeof(T), kVector = 16 / sizeof(T);
        int64_t dst[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          dst[p] = row_offset(i, 4 * p + lane / 8);
          if (dst[p] >= 0) dst[p] += lane % 8 * kVector;
        }
#pragma unroll
        for (int c = 0; c < Tile::kTileN / kColumns; ++c) {
          const float* chunk = c * kColumns < Tile::kN0
                                   ? &acc.first[i][c * kColumns / 2]
                                   : &acc.second[i][(c * kColumns - Tile::kN0) / 2];
          if (n_first + c * kColumns >= params.gemm_n) break;
          // Of two stretches, the other one was in use since.
          if constexpr (Tile::kStagingBytes < 4096) __syncwarp();
          StoreRounded(chunk, staging + (i + c) * 2048 % Tile::kStagingBytes,
                       static_cast<T*>(params.out) + c * kColumns, dst,
                       n_first + c * kColumns + lane % 8 * kVector < params.gemm_n);
        }
      }
    } else if constexpr (!kPlain || sizeof(T) == 2) {
#pragma unroll
      for (int c = 0; c < Tile::kTileN / 64; ++c) {
        const float* chunk =
            c * 64 < Tile::kN0 ? &acc.first[i][c * 32] : &acc.second[i][c * 32 - Tile::kN0 / 2];
        const int columns = params.gemm_n - n_first - c * 64;
        if (columns <= 0) break;
        auto offset = [&](int row) {
          const int64_t at = row_offset(i, row);
          return at < 0 ? at : at + c * 64;
        };
        if constexpr (Tile::kStagingBytes < 4096) {
          static_assert(kPlain, "the fused terms pass through 4 KB");
          StoreFragments(chunk, static_cast<float*>(params.out) + c * 64, epilogue,
                         row_offset(i, lane / 4), row_offset(i, lane / 4 + 8), columns,
                         channel0 + c * 64);
        } else if (params.out_is_f32) {
          StoreFinished(chunk, staging, static_cast<float*>(params.out), epilogue, offset, columns,
                        channel0 + c * 64);
        } else if constexpr (!kPlain) {
          StoreFinished(chunk, staging, static_cast<T*>(params.out), epilogue, offset, columns,
                        channel0 + c * 64);
        }
      }
    }
  }
}

// The same of a tile whose columns are pixels.
template <Op kOp, typename T, class Tile, class Epilogue, int kWarpgroup>
__device__ __forceinline__ void StoreWgmmaColumns(const IgemmWgmmaParams& params,
                                                  const WgmmaTilePlace& place,
                                                  const WgmmaPhase& phase,
                                                  const typename Tile::Accumulators& acc,
                                                  uint32_t staging) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int channels = params.gemm_n - n_first;
  const int64_t base = place.slice * params.slice_elements + place.batch * params.out_batch +
                       int64_t{place.group} * params.out_group + n_first;
  // Of every 16 pixels a warp stores four, decoded once, a pixel a lane, and handed round.
  constexpr int kDecoded = (Tile::kTileM / 16 + 7) / 8;
  int32_t decoded[kDecoded];
#pragma unroll
  for (int i = 0; i < kDecoded; ++i) {
    decoded[i] = WgmmaOutputRow<kOp>(
        params, phase, place.m_tile * Tile::kTileM + (i * 8 + lane / 4) * 16 + warp * 4 + lane % 4);
  }
  auto row = [&](int sixteen, int pixel) {
    return __shfl_sync(0xffffffff, decoded[sixteen / 8], sixteen % 8 * 4 + pixel);
  };
  // Nobody is reading the staging of the tile before: the warpgroup met since, when its turn came.
  constexpr int kBarrier = 3 + kWarpgroup;
  if (std::is_same_v<Epilogue, PlainEpilogue> && !params.out_is_f32) {
    StoreRoundedColumns<kBarrier>(acc.of, staging, static_cast<T*>(params.out) + base,
                                  params.out_channels * sizeof(T), row, channels);
    return;
  }
  const Epilogue epilogue(params.epilogue);
  const int channel0 = place.group * params.gemm_n + n_first;
  auto pixel_offset = [&](int sixteen, int pixel) -> int64_t {
    const int32_t m = row(sixteen, pixel);
    return m < 0 ? -1 : base + int64_t{m} * params.out_channels;
  };
  if (params.out_is_f32) {
    StoreFinishedColumns<kBarrier>(acc.of, staging, static_cast<float*>(params.out), epilogue,
                                   pixel_offset, channels, channel0);
  } else if constexpr (!std::is_same_v<Epilogue, PlainEpilogue>) {
    StoreFinishedColumns<kBarrier>(acc.of, staging, static_cast<T*>(params.out), epilogue,
                                   pixel_offset, channels, channel0);
  }
}

// A math warpgroup's way through the tiles. Its number is a template parameter, so that everything
// that becomes a descriptor is the same in all threads as the compiler sees it, and stays in
// uniform registers: moved there from others before every wgmma, it cost the narrow tiles half
// their rate.
template <Op kOp, typename T, class Tile, class Epilogue, int kWarpgroup>
__device__ __forceinline__ void ConsumeWgmmaStages(const IgemmWgmmaParams& params, uint32_t ring,
                                                   const WgmmaBarriers<Tile>& barriers) {
  constexpr bool kMnMajorA = kOp == Op::kWgrad, kMnMajorB = kWgmmaColumnLines<kOp, T>;
  constexpr uint32_t kOwnPixels = kWarpgroup * Tile::kOwnPixels;
  const bool signals = threadIdx.x % 128 == 0;
  auto release = [&](uint32_t barrier) {
    if (signals) BarrierArrive(barrier);
  };
  RingPlace<Tile::kStages> stage;
  RingPlace<(Tile::kSlotsB > 0 ? Tile::kSlotsB : 1)> slot;
  // Pingpong: warpgroup 0 has the first turn.
  if (Tile::kPingpong && kWarpgroup == 1) NamedBarrierArrive(1, 256);
  bool first_tile = true;
  auto steps_of = [&](const WgmmaTilePlace& place) -> int32_t {
    const WgmmaPhase& phase = params.phase[place.phase];
    if (place.m_tile * Tile::kTileM >= phase.rows) return 0;
    if (kStoresZeros<kOp, Tile> && phase.channel0 > 0) return 0;
    return min(params.steps_per_slice, phase.steps - place.slice * params.steps_per_slice);
  };
  auto taps_of = [&](const WgmmaTilePlace& place) {
    return Tile::kRows ? params.phase[place.phase].taps[0] : 1;
  };
  // In pingpong a warpgroup strides over its own tiles: where it walked over all and counted turns,
  // the compiler took what one of the two made into descriptors for different in its threads.
  const int32_t stride = gridDim.x;
  for (int32_t index = blockIdx.x + (Tile::kPingpong ? kWarpgroup * stride : 0);
       index < params.tiles; index += Tile::kPingpong ? 2 * stride : stride) {
    if (Tile::kPingpong && index >= stride) {  // the other's tile before
      const WgmmaTilePlace other(params, index - stride);
      const int32_t steps = steps_of(other);
      stage.Skip(steps);
      if constexpr (Tile::kSlotsB > 0) slot.Skip(steps * taps_of(other));
    }
    const WgmmaTilePlace place(params, index);
    const WgmmaPhase& phase = params.phase[place.phase];
    const int32_t steps = steps_of(place), taps = taps_of(place);
    if constexpr (Tile::kPingpong) NamedBarrierSync(1 + kWarpgroup, 256);
    auto store = [&](const typename Tile::Accumulators& results) {
      if constexpr (Tile::kColumns) {
        StoreWgmmaColumns<kOp, T, Tile, Epilogue, kWarpgroup>(
            params, place, phase, results,
            ring + Tile::kStagingAt + kWarpgroup * 4 * Tile::kStagingBytes);
      } else {
        StoreWgmmaTile<kOp, T, Tile, Epilogue>(
            params, place, phase, results,
            place.m_tile * Tile::kTileM + kOwnPixels + threadIdx.x / 32 % 4 * 16,
            ring + Tile::kStagingAt + (threadIdx.x / 32 - 4) * Tile::kStagingBytes);
      }
    };
    if (steps == 0) {
      if constexpr (Tile::kPingpong) NamedBarrierArrive(2 - kWarpgroup, 256);
      if constexpr (kStoresZeros<kOp, Tile>) {
        // A call of its own: zeros joined with the accumulators below would spill them.
        if (place.m_tile * Tile::kTileM < phase.rows) store({});
      }
      continue;
    }
    typename Tile::Accumulators acc;
    if constexpr (!Tile::kRows) {
      uint32_t last = 0;
      for (int32_t step = 0; step < steps; ++step) {
        BarrierWait(barriers.Full(stage.slot), stage.parity);
        const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
        uint32_t b = shared + Tile::kBytesA;
        if constexpr (Tile::kResident > 0) {
          if (first_tile) BarrierWait(barriers.Resident(step), 0);
          b = ring + Tile::kFilterAt + step * Tile::kBytesB;
        }
        Tile::template Multiply<T, kMnMajorA, kMnMajorB>(acc, shared + kOwnPixels * 128, b,
                                                         step > 0);
        WgmmaWait<1>();
        if (step > 0) release(barriers.Empty(last));
        last = stage.slot;
        stage.Next();
      }
      if constexpr (Tile::kPingpong) NamedBarrierArrive(2 - kWarpgroup, 256);
      WgmmaWait<0>();
      release(barriers.Empty(last));
    } else {
      const uint32_t tap0 = phase.offset0[0], tap_step = phase.offset_step[0];
      uint32_t last = 0, last_b = 0, resident = 0;
      for (int32_t step = 0; step < steps; ++step) {
        BarrierWait(barriers.Full(stage.slot), stage.parity);
        uint32_t a = ring + stage.slot * Tile::kStageBytes + (kOwnPixels + tap0) * 128;
        for (int32_t t = 0; t < taps; ++t) {
          const uint32_t b = Tile::kSlotsB > 0 ? slot.slot : resident;
          if constexpr (Tile::kSlotsB > 0) {
            BarrierWait(barriers.FullB(b), slot.parity);
          } else if (first_tile) {
            BarrierWait(barriers.Resident(b), 0);
          }
          Tile::template Multiply<T, kMnMajorA, kMnMajorB>(
              acc, a, ring + Tile::kFilterAt + b * Tile::kBytesB, step > 0 || t > 0);
          // A resident filter has nothing to give back: between rows three taps may be under way.
          if (Tile::kSlotsB > 0 || t == 0) {
            WgmmaWait<1>();
          } else {
            WgmmaWait<2>();
          }
          if (step > 0 || t > 0) {
            if constexpr (Tile::kSlotsB > 0) release(barriers.EmptyB(last_b));
            // The row before has been read by its last tap.
            if (t == 0) release(barriers.Empty(last));
          }
          a += tap_step * 128;
          ++resident;
          last_b = slot.slot;
          if constexpr (Tile::kSlotsB > 0) slot.Next();
        }
        last = stage.slot;
        stage.Next();
      }
      if constexpr (Tile::kPingpong) NamedBarrierArrive(2 - kWarpgroup, 256);
      WgmmaWait<0>();
      if constexpr (Tile::kSlotsB > 0) release(barriers.EmptyB(last_b));
      release(barriers.Empty(last));
    }
    first_tile = false;
    store(acc);
  }
}

// One tap: as above, but which tiles are this CTA's is for the thread that issues the copies to
// say, and all have the same steps. A tile's number lies beside the stage at which it begins, and
// is read before the product that gives the stage back. The warpgroup that meets one past the last
// tile tells the other.
template <Op kOp, typename T, class Tile, class Epilogue, int kWarpgroup>
__device__ __forceinline__ void ConsumeOneTapStages(const IgemmWgmmaParams& params,
                                                    const WgmmaMaps& maps, uint32_t ring,
                                                    const WgmmaBarriers<Tile>& barriers) {
  static_assert(Tile::kPingpong && !Tile::kRows);
  constexpr bool kBoxes = Tile::kColumns && std::is_same_v<Epilogue, PlainEpilogue>;
  const int32_t steps = params.phase[0].steps;
  RingPlace<Tile::kStages> stage;
  if (kWarpgroup == 1) {
    NamedBarrierArrive(1, 256);
    stage.Skip(steps);
  }
  for (bool first = true;; first = false) {
    NamedBarrierSync(1 + kWarpgroup, 256);
    if (LoadWord(barriers.Ended()) != 0) break;
    BarrierWait(barriers.Full(stage.slot), stage.parity);
    const int32_t index = __shfl_sync(0xffffffff, LoadWord(barriers.TileAt(stage.slot)), 0);
    if (index >= params.tiles) {
      if (threadIdx.x % 128 == 0) StoreWord(barriers.Ended(), 1);
      NamedBarrierArrive(2 - kWarpgroup, 256);
      break;
    }
    typename Tile::Accumulators acc;
    uint32_t last = 0;
    for (int32_t step = 0; step < steps; ++step) {
      BarrierWait(barriers.Full(stage.slot), stage.parity);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      uint32_t b = shared + Tile::kBytesA;
      if constexpr (Tile::kResident > 0) {
        if (first) BarrierWait(barriers.Resident(step), 0);
        b = ring + Tile::kFilterAt + step * Tile::kBytesB;
      }
      Tile::template Multiply<T, false, kWgmmaColumnLines<kOp, T>>(acc, shared, b, step > 0);
      WgmmaWait<1>();
      if (step > 0 && threadIdx.x % 128 == 0) BarrierArrive(barriers.Empty(last));
      last = stage.slot;
      stage.Next();
    }
    NamedBarrierArrive(2 - kWarpgroup, 256);
    WgmmaWait<0>();
    if (threadIdx.x % 128 == 0) BarrierArrive(barriers.Empty(last));
    const WgmmaTilePlace place(params, index);
    if constexpr (Tile::kColumns) {
      const uint32_t staging = ring + Tile::kStagingAt + kWarpgroup * 4 * Tile::kStagingBytes;
      if (kBoxes && !params.out_is_f32) {
        StoreColumnBoxes<3 + kWarpgroup, T>(acc.of, staging, &maps.out, place.n_tile * 64,
                                            place.m_tile * Tile::kTileM);
      } else {
        StoreWgmmaColumns<kOp, T, Tile, Epilogue, kWarpgroup>(params, place, params.phase[0], acc,
                                                              staging);
      }
    } else {
      StoreWgmmaTile<kOp, T, Tile, Epilogue>(
          params, place, params.phase[0], acc,
          place.m_tile * Tile::kTileM + threadIdx.x / 32 % 4 * 16,
          ring + Tile::kStagingAt + (threadIdx.x / 32 - 4) * Tile::kStagingBytes);
    }
    stage.Skip(steps);
  }
  if constexpr (kBoxes) WaitForStoresToRead();
}

// wgrad by mma.sync, the thread that issues the copies. A tile's rows are boxes of the list of taps
// times slabs of 32 channels; a step is 32 output pixels: of each box those pixels of x under its
// tap, and of dy, in one copy, the tile's columns. What is known of a box is kept in shared memory:
// in registers it would be spilled.
template <class Tile>
__device__ __forceinline__ void ProduceMmaWgradStages(const IgemmWgmmaParams& params,
                                                      const WgmmaMaps& maps, uint32_t ring,
                                                      const WgmmaBarriers<Tile>& barriers) {
  constexpr int kBoxesA = Tile::kTileM / 32;
  static_assert(Tile::kBoxesAt + kBoxesA * 16 <= Tile::kRingAt);
  const WgmmaPhase& phase = params.phase[0];
  const CUtensorMap* map_a = &maps.a[0];
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const WgmmaTilePlace place(params, index);
    const int32_t k_slab = (place.group * params.b_group + place.n_tile * Tile::kTileN) / 32;
    const int boxes = min(kBoxesA, params.filter_taps * static_cast<int32_t>(params.slabs.divisor) -
                                       place.m_tile * kBoxesA);
    for (int i = 0; i < boxes; ++i) {
      int32_t tap, slab;
      params.slabs.Divmod(place.m_tile * kBoxesA + i, &tap, &slab);
      const int32_t t1 = tap / phase.taps[0];
      const uint32_t box[4] = {
          static_cast<uint32_t>(place.group * params.a_group + slab * 32),
          static_cast<uint32_t>(phase.offset0[0] +
                                (tap - t1 * phase.taps[0]) * phase.offset_step[0]),
          static_cast<uint32_t>(phase.offset0[1] + t1 % phase.taps[1] * phase.offset_step[1]),
          static_cast<uint32_t>(phase.offset0[2] + t1 / phase.taps[1] * phase.offset_step[2])};
      StoreChunk(ring + Tile::kBoxesAt + i * 16, box);
    }
    const int32_t first = place.slice * params.steps_per_slice;
    const int32_t steps = min(params.steps_per_slice, phase.steps - first);
    WaitForPrecedingGrids();
    for (int32_t step = 0; step < steps; ++step) {
      const int32_t pixel = (first + step) * Tile::kPixels;
      const WgmmaPixel at(params, phase, pixel, params.pixels, place.batch);
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + Tile::kRingAt + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, boxes * Tile::kBoxBytes + Tile::kBytesB);
      CopyTile4d(shared + Tile::kBytesA, &maps.b, barrier, 0, pixel, k_slab, place.batch);
#pragma unroll 1
      for (int i = 0; i < boxes; ++i) {
        const uint4 box = LoadChunk(ring + Tile::kBoxesAt + i * 16);
        CopyWgmmaBox(params.rank, shared + i * Tile::kBoxBytes, map_a, barrier,
                     static_cast<int32_t>(box.x), at, box.y, box.z, box.w);
      }
      stage.Next();
    }
  }
}

// And its math warps, which all work on every stage. The fragments of a step are read while those
// of the step before are multiplied, over the edges of stages too.
template <class Tile>
__device__ __forceinline__ void ConsumeMmaWgradStages(const IgemmWgmmaParams& params, uint32_t ring,
                                                      const WgmmaBarriers<Tile>& barriers) {
  const int warp = threadIdx.x / 32 - 4;
  const int32_t m_warp = warp / Tile::kWarpsN * Tile::kWarpM;
  const int32_t n_warp = warp % Tile::kWarpsN * Tile::kWarpN;
  uint32_t a[2], b[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    a[half] = ring + Tile::kRingAt + m_warp / 32 * Tile::kBoxBytes + Tile::LaneOffset(half, 8);
    b[half] = ring + Tile::kRingAt + Tile::kBytesA + n_warp / 32 * Tile::kBoxBytes +
              Tile::LaneOffset(half, 4);
  }
  const WgmmaPhase& phase = params.phase[0];
  RingPlace<Tile::kStages> stage;
  typename Tile::Fragments fragments[2];
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const WgmmaTilePlace place(params, index);
    const int32_t steps =
        min(params.steps_per_slice, phase.steps - place.slice * params.steps_per_slice);
    typename Tile::Accumulators acc = {};
    BarrierWait(barriers.Full(stage.slot), stage.parity);
    uint32_t at = stage.slot * Tile::kStageBytes;
    Tile::Read(a, b, at, 0, fragments[0]);
    for (int32_t step = 0; step < steps; ++step) {
#pragma unroll
      for (int s = 0; s < Tile::kSteps; ++s) {
        if (s + 1 < Tile::kSteps) {
          Tile::Read(a, b, at, s + 1, fragments[(s + 1) % 2]);
          Tile::Multiply(fragments[s % 2], acc);
        } else {
          const uint32_t empty = barriers.Empty(stage.slot);
          stage.Next();
          at = stage.slot * Tile::kStageBytes;
          if (step + 1 < steps) {
            BarrierWait(barriers.Full(stage.slot), stage.parity);
            Tile::Read(a, b, at, 0, fragments[0]);
          }
          Tile::Multiply(fragments[s % 2], acc);
          // What was multiplied last has been read.
          __syncwarp();
          if (threadIdx.x % 32 == 0) BarrierArrive(empty);
        }
      }
    }
    const int32_t n_first = place.n_tile * Tile::kTileN + n_warp;
    const int64_t base = place.slice * params.slice_elements + place.batch * params.out_batch +
                         int64_t{place.group} * params.out_group + n_first;
    auto row_offset = [&](int box, int64_t* first) {
      const int32_t m = place.m_tile * Tile::kTileM + m_warp + box * 32;
      int32_t tap, slab;
      params.slabs.Divmod(m / 32, &tap, &slab);
      *first = base + (int64_t{tap} * params.row_channels + slab * 32) * params.out_channels;
      return m < phase.rows ? params.row_channels - slab * 32 : 0;
    };
    Tile::Store(acc, static_cast<float*>(params.out), params.out_channels, params.gemm_n - n_first,
                row_offset);
  }
}

template <Op kOp, typename T, WgmmaTileId kTile, class Epilogue>
__global__ void __launch_bounds__(WgmmaTileOf<kTile>::kThreads, 1)
    IgemmWgmma(const __grid_constant__ IgemmWgmmaParams params,
               const __grid_constant__ WgmmaMaps maps) {
  using Tile = WgmmaTileOf<kTile>;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[WgmmaBarriers<Tile>::kWords];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  WgmmaBarriers<Tile> barriers{SharedAddress(barrier_words)};
  // Of one base address: with two, the uniform registers overflow.
  if constexpr (Tile::kMma) barriers.first = ring;
  if (threadIdx.x == 0) {
    constexpr int kReaders = Tile::kMma        ? Tile::kWarpgroups * 4
                             : Tile::kPingpong ? 1
                                               : Tile::kWarpgroups;
    for (int s = 0; s < Tile::kStages; ++s) {
      BarrierInit(barriers.Full(s), 1);
      BarrierInit(barriers.Empty(s), kReaders);
    }
    for (int s = 0; s < Tile::kSlotsB; ++s) {
      BarrierInit(barriers.FullB(s), 1);
      BarrierInit(barriers.EmptyB(s), kReaders);
    }
    for (int s = 0; s < Tile::kResident; ++s) BarrierInit(barriers.Resident(s), 1);
    BarrierInitFence();
    if constexpr (Tile::kOneTap) StoreWord(barriers.Ended(), 0);
    PrefetchTensorMap(&maps.a[0]);
    PrefetchTensorMap(&maps.b);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    LowerRegisters<Tile::kProducerRegisters>();
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && ElectOne()) {
      if constexpr (Tile::kMma) {
        ProduceMmaWgradStages<Tile>(params, maps, ring, barriers);
      } else if constexpr (kOp == Op::kWgrad) {
        ProduceWgmmaWgradStages<Tile>(params, maps, ring, barriers);
      } else {
        ProduceWgmmaStages<kOp, T, Tile>(params, maps, ring, barriers);
      }
    }
  } else {
    RaiseRegisters<Tile::kMathRegisters>();
    WaitForPrecedingGrids();
    LetNextGridStart();
    if constexpr (Tile::kMma) {
      ConsumeMmaWgradStages<Tile>(params, ring, barriers);
    } else if constexpr (Tile::kOneTap) {
      if (warpgroup == 1) {
        ConsumeOneTapStages<kOp, T, Tile, Epilogue, 0>(params, maps, ring, barriers);
      } else {
        ConsumeOneTapStages<kOp, T, Tile, Epilogue, 1>(params, maps, ring, barriers);
      }
    } else if (warpgroup == 1) {
      ConsumeWgmmaStages<kOp, T, Tile, Epilogue, 0>(params, ring, barriers);
    } else if (Tile::kWarpgroups == 2 || warpgroup == 2) {
      ConsumeWgmmaStages<kOp, T, Tile, Epilogue, 1>(params, ring, barriers);
    } else {
      ConsumeWgmmaStages<kOp, T, Tile, Epilogue, 2>(params, ring, barriers);
    }
  }
}

template <Op kOp, DType kType, WgmmaTileId kTile>
Status EncodeWgmmaMaps(const IgemmWgmmaParams& params, const WgmmaOperands& operands,
                       WgmmaMaps* maps) {
  using Tile = WgmmaTileOf<kTile>;
  constexpr int kLine = kWgmmaStepChannels<typename ElementOf<kType>::Type>;
  constexpr int kPixels =
      kOp == Op::kWgrad ? kWgmmaStepPixels<typename ElementOf<kType>::Type> : Tile::kPixels;
  DenseTensor a;
  a.dtype = kType;
  a.address = operands.a;
  a.extent[0] = operands.a_channels;
  if (params.rank == 0) {
    a.rank = 2;
    a.extent[1] =
        operands.a_images * operands.a_extent[0] * operands.a_extent[1] * operands.a_extent[2];
    const int32_t box[2] = {kLine, kPixels};
    JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(a, box, &maps->a[0]));
  } else {
    a.rank = params.rank + 2;
    for (int axis = 0; axis < params.rank; ++axis) a.extent[axis + 1] = operands.a_extent[axis];
    a.extent[params.rank + 1] = operands.a_images;
    for (int p = 0; p < params.phases; ++p) {
      JAXCONV_RETURN_IF_ERROR(EncodeIm2colMap(a, params.phase[p].lower, operands.a_upper[p],
                                              params.src_step, kPixels, &maps->a[p]));
    }
  }
  DenseTensor b;
  b.dtype = kType;
  b.rank = 3;
  b.address = operands.b;
  b.extent[0] = operands.b_columns;
  b.extent[1] = operands.b_rows;
  b.extent[2] = operands.b_taps;
  b.stride[1] = operands.b_row_stride;
  b.stride[2] = operands.b_tap_stride;
  if constexpr (Tile::kMma) {
    // Columns in slabs of a line, pixels, slabs: one copy brings a tile's boxes.
    b.rank = 4;
    b.extent[0] = kLine;
    b.extent[2] = operands.b_columns / kLine;
    b.extent[3] = operands.b_taps;
    b.stride[1] = operands.b_columns;
    b.stride[2] = kLine;
    b.stride[3] = operands.b_rows * operands.b_columns;
    const int32_t box[4] = {kLine, kPixels, Tile::kTileN / kLine, 1};
    return EncodeTiledMap(b, box, &maps->b);
  }
  if (Tile::kOneTap && Tile::kColumns && !params.out_is_f32) {
    DenseTensor out;
    out.dtype = kType;
    out.rank = 2;
    out.address = params.out;
    out.extent[0] = params.gemm_n;
    out.extent[1] = params.phase[0].rows;
    const int32_t out_box[2] = {kLine, kStoredPixels};
    JAXCONV_RETURN_IF_ERROR(EncodeTiledMap(out, out_box, &maps->out));
  }
  const int32_t box[3] = {kLine, 64, 1};
  return EncodeTiledMap(b, box, &maps->b);
}

template <Op kOp, DType kType, WgmmaTileId kTile, class Epilogue = PlainEpilogue>
Status LaunchIgemmWgmmaWith(const IgemmWgmmaParams& params, const WgmmaOperands& operands,
                            void* stream) {
  using T = typename ElementOf<kType>::Type;
  using Tile = WgmmaTileOf<kTile>;
  WgmmaMaps maps{};
  const Status encoded = EncodeWgmmaMaps<kOp, kType, kTile>(params, operands, &maps);
  if (!encoded.ok()) return encoded;
  int sm_count = 0;
  JAXCONV_RETURN_IF_ERROR(CountMultiprocessors(&sm_count));
  // With a resident filter a CTA keeps its columns.
  const int columns = Tile::kResident > 0 ? static_cast<int>(params.n_tiles.divisor) : 1;
  OverlappingLaunch launch;
  launch.grid = std::min(params.tiles, std::max(1, sm_count / columns) * columns);
  launch.threads = Tile::kThreads;
  launch.shared_bytes = Tile::kSharedBytes;
  return Launch(IgemmWgmma<kOp, T, kTile, Epilogue>, launch, stream, params, maps);
}

template <Op kOp, DType kType, WgmmaTileId kTile>
Status LaunchIgemmWgmma(const IgemmWgmmaParams& params, const WgmmaOperands& operands,
                        void* stream) {
  return LaunchIgemmWgmmaWith<kOp, kType, kTile>(params, operands, stream);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_SM90_CUH_
