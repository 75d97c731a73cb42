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
// multiplies by mma.sync (device/mma_wgrad_tile_sm90.cuh). A 1x1 convolution without stride and
// padding is a matrix, loaded as one.
//
//     CTA: one producer warpgroup, of which one thread issues the copies, and two or three math
//     warpgroups: one above the other in a tile (cooperative), or taking turns at tiles of their
//     own (pingpong). Persistent: a CTA takes every so-manieth tile, columns fastest. Shared
//     memory, 128x256: 4 stages of (16 + 32) KB, 32 KB to turn fragments into lines, barriers.
//     Registers: producer 40, math 232 (with three math warpgroups 32 and 160).
//
// "Rows": the taps of a filter row share one load. The pixels are those of the padded image, so a
// tap's operand begins that many lines further on; the padding's columns are computed and dropped.
//
// Full(s): the producer announces a stage's bytes, math waits. Empty(s): each math warpgroup that
// reads the stage arrives when its wgmma has retired, one step late, so that one step is always in
// flight; the producer waits. While math stores a tile, the producer fills the ring for the next.
//
// Refused, with a reason: channels not of 16-byte pitches, groups of channels that are not
// multiples of a step's, more than eight phases, corners or offsets beyond the maps' fields,
// strides above 8.
#ifndef JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_SM90_CUH_
#define JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_SM90_CUH_

#include <algorithm>
#include <string>
#include <type_traits>

#include "cuda/device/element.cuh"
#include "cuda/device/fused_epilogue.cuh"
#include "cuda/device/igemm_wgmma_params.h"
#include "cuda/device/mma_wgrad_tile_sm90.cuh"
#include "cuda/device/wgmma_tile_sm90.cuh"
#include "cuda/kernels/igemm_wgmma.h"
#include "cuda/kernels/tensor_map.h"
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
struct WgmmaTileOf<WgmmaTileId::k128x64Pingpong> : WgmmaTile<2, true, 2, 64, 0, 7> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x128PingpongRows> : WgmmaTile<2, true, 2, 128, 0, 3, 8> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x64PingpongResident> : WgmmaTile<2, true, 2, 64, 0, 6, 0, 9> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k256x64PingpongResident> : WgmmaTile<2, true, 4, 64, 0, 3, 0, 9> {};
template <>
struct WgmmaTileOf<WgmmaTileId::k128x64PingpongResidentF32>
    : WgmmaTile<2, true, 2, 64, 0, 4, 0, 18, 0> {};

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
  static constexpr int kCount =
      2 * Tile::kStages + 2 * Tile::kSlotsB + (Tile::kResident > 0 ? 1 : 0);
  uint32_t first;
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
  __device__ __forceinline__ uint32_t Resident() const { return first + (kCount - 1) * 8; }
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

// The thread that issues the copies.
template <Op kOp, typename T, class Tile>
__device__ __forceinline__ void ProduceWgmmaStages(const IgemmWgmmaParams& params,
                                                   const WgmmaMaps& maps, uint32_t ring,
                                                   const WgmmaBarriers<Tile>& barriers) {
  constexpr int32_t kStepChannels = kWgmmaStepChannels<T>;
  const int32_t slabs = params.slabs.divisor;
  auto copy_filter = [&](uint32_t shared, uint32_t barrier, int boxes, int32_t n, int32_t channel,
                         int32_t channel_of_group, int32_t tap) {
    // fprop walks K (n) by C (channel), dgrad K (channel) by C (n); the map is (K, C, tap), or
    // (C, K, tap) for fprop in float32. A group's part begins somewhere along K.
    if constexpr (kOp == Op::kFprop) n += channel_of_group;
    if constexpr (kOp == Op::kDgrad) channel += channel_of_group;
    for (int i = 0; i < boxes; ++i) {
      const int32_t column = n + i * 64;
      CopyTile3d(shared + i * 8192, &maps.b, barrier, kWgmmaColumnLines<kOp, T> ? column : channel,
                 kWgmmaColumnLines<kOp, T> ? channel : column, tap);
    }
  };
  // Boxes wholly past the last column are not loaded; what lies in their place is not stored.
  auto boxes_of = [&](int32_t n_first) {
    return min(Tile::kTileN / 64, (params.gemm_n - n_first + 63) / 64);
  };
  if constexpr (Tile::kResident > 0) {
    const WgmmaPhase& phase = params.phase[0];
    const int boxes = boxes_of(0);
    BarrierArriveExpect(barriers.Resident(), phase.steps * phase.taps[0] * boxes * 8192);
    uint32_t shared = ring + Tile::kFilterAt;
    for (int32_t t2 = 0; t2 < phase.taps[2]; ++t2) {
      for (int32_t t1 = 0; t1 < phase.taps[1]; ++t1) {
        for (int32_t slab = 0; slab < slabs; ++slab) {
          for (int32_t t0 = 0; t0 < phase.taps[0]; ++t0) {
            copy_filter(shared, barriers.Resident(), boxes, 0, slab * kStepChannels, 0,
                        phase.filter0 + t0 * phase.filter_step[0] + t1 * phase.filter_step[1] +
                            t2 * phase.filter_step[2]);
            shared += Tile::kBytesB;
          }
        }
      }
    }
  }
  RingPlace<Tile::kStages> stage;
  RingPlace<(Tile::kSlotsB > 0 ? Tile::kSlotsB : 1)> slot;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const WgmmaTilePlace place(params, index);
    const WgmmaPhase& phase = params.phase[place.phase];
    if (place.m_tile * Tile::kTileM >= phase.rows) continue;
    int32_t m = place.m_tile * Tile::kTileM;
    const int32_t n_first = place.n_tile * Tile::kTileN;
    const int boxes = boxes_of(n_first);
    const int32_t first = place.slice * params.steps_per_slice;
    const int32_t steps = min(params.steps_per_slice, phase.steps - first);
    int32_t x = 0, y = 0, z = 0, image = 0;
    if (params.rank == 0) {
      x = place.batch * phase.rows + m;
    } else {
      phase.count[0].Divmod(m, &m, &x);
      phase.count[1].Divmod(m, &m, &y);
      phase.count[2].Divmod(m, &image, &z);
      x = phase.lower[0] + x * params.src_step[0];
      y = phase.lower[1] + y * params.src_step[1];
      z = phase.lower[2] + z * params.src_step[2];
      image += place.batch * params.images;
    }
    // Of the first step: slab fastest, then taps. In rows, t0 is the inner loop's.
    int32_t slab = 0, t0 = 0, t1 = 0, t2 = 0;
    if (first > 0) {
      int32_t tap = first / slabs;
      slab = first - tap * slabs;
      if constexpr (!Tile::kRows) t0 = tap % phase.taps[0], tap /= phase.taps[0];
      t2 = tap / phase.taps[1];
      t1 = tap - t2 * phase.taps[1];
    }
    const int32_t tap_of_batch = place.batch * params.filter_taps + phase.filter0;
    const int32_t a_channel = place.group * params.a_group;
    const int32_t b_channel = place.group * params.b_group;
    const CUtensorMap* map_a = &maps.a[place.phase];
    for (int32_t step = 0; step < steps; ++step) {
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, Tile::kBytesA + (Tile::kRows ? 0 : boxes * 8192));
      const int32_t channel = phase.channel0 + slab * kStepChannels;
      const int32_t c = a_channel + channel;
      const uint16_t off0 = Tile::kRows ? 0 : phase.offset0[0] + t0 * phase.offset_step[0];
      const uint16_t off1 = phase.offset0[1] + t1 * phase.offset_step[1];
      const uint16_t off2 = phase.offset0[2] + t2 * phase.offset_step[2];
      switch (params.rank) {
        case 0:
          CopyTile2d(shared, map_a, barrier, c, x);
          break;
        case 1:
          CopyIm2col1d(shared, map_a, barrier, c, x, image, off0);
          break;
        case 2:
          CopyIm2col2d(shared, map_a, barrier, c, x, y, image, off0, off1);
          break;
        default:
          CopyIm2col3d(shared, map_a, barrier, c, x, y, z, image, off0, off1, off2);
      }
      stage.Next();
      const int32_t tap = tap_of_batch + t1 * phase.filter_step[1] + t2 * phase.filter_step[2];
      if constexpr (!Tile::kRows) {
        copy_filter(shared + Tile::kBytesA, barrier, boxes, n_first, channel, b_channel,
                    tap + t0 * phase.filter_step[0]);
      } else if constexpr (Tile::kSlotsB > 0) {
        for (int32_t t = 0; t < phase.taps[0]; ++t) {
          BarrierWait(barriers.EmptyB(slot.slot), slot.parity ^ 1);
          BarrierArriveExpect(barriers.FullB(slot.slot), boxes * 8192);
          copy_filter(ring + Tile::kFilterAt + slot.slot * Tile::kBytesB, barriers.FullB(slot.slot),
                      boxes, n_first, channel, b_channel, tap + t * phase.filter_step[0]);
          slot.Next();
        }
      }
      if (++slab == slabs) {
        slab = 0;
        if (Tile::kRows || ++t0 == phase.taps[0]) {
          t0 = 0;
          if (++t1 == phase.taps[1]) t1 = 0, ++t2;
        }
      }
    }
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
    for (int32_t step = 0; step < steps; ++step) {
      const int32_t pixel = (first + step) * 64;
      int32_t m = pixel, x, y, z, image;
      phase.count[0].Divmod(m, &m, &x);
      phase.count[1].Divmod(m, &m, &y);
      phase.count[2].Divmod(m, &image, &z);
      x = phase.lower[0] + x * params.src_step[0];
      y = phase.lower[1] + y * params.src_step[1];
      z = phase.lower[2] + z * params.src_step[2];
      image += place.batch * params.images;
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, (boxes_a + boxes) * 8192);
#pragma unroll
      for (int i = 0; i < kBoxesA; ++i) {
        if (i >= boxes_a) break;
        const uint32_t to = shared + i * 8192;
        switch (params.rank) {
          case 0:
            CopyTile2d(to, map_a, barrier, channel[i], place.batch * params.pixels + pixel);
            break;
          case 1:
            CopyIm2col1d(to, map_a, barrier, channel[i], x, image, offset[i][0]);
            break;
          case 2:
            CopyIm2col2d(to, map_a, barrier, channel[i], x, y, image, offset[i][0], offset[i][1]);
            break;
          default:
            CopyIm2col3d(to, map_a, barrier, channel[i], x, y, z, image, offset[i][0], offset[i][1],
                         offset[i][2]);
        }
      }
      for (int i = 0; i < boxes; ++i) {
        CopyTile3d(shared + Tile::kBytesA + i * 8192, &maps.b, barrier, k + i * 64, pixel,
                   place.batch);
      }
      stage.Next();
    }
  }
}

// A warpgroup's part of a finished tile -> the output.
template <Op kOp, typename T, class Tile, class Epilogue>
__device__ __forceinline__ void StoreWgmmaTile(const IgemmWgmmaParams& params,
                                               const WgmmaTilePlace& place, const WgmmaPhase& phase,
                                               const typename Tile::Accumulators& acc,
                                               int32_t m_first, uint32_t staging) {
  const int lane = threadIdx.x % 32;
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int64_t base = place.slice * params.slice_elements + place.batch * params.out_batch +
                       int64_t{place.group} * params.out_group + n_first;
  // Row of the output, or -1.
  auto row_of = [&](int32_t m) -> int32_t {
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
  };
  // A warp's rows are decoded once, a row a lane, and handed round.
  int32_t decoded[(Tile::kBlocks + 1) / 2];
#pragma unroll
  for (int i = 0; i < (Tile::kBlocks + 1) / 2; ++i) {
    decoded[i] = row_of(m_first + (2 * i + lane / 16) * 64 + lane % 16);
  }
  auto row_offset = [&](int block, int row) -> int64_t {
    const int32_t m = __shfl_sync(0xffffffff, decoded[block / 2], block % 2 * 16 + row);
    return m < 0 ? -1 : base + int64_t{m} * params.out_channels;
  };
  const Epilogue epilogue(params.epilogue);
  const int channel0 = place.group * params.gemm_n + n_first;
  __syncwarp();
  constexpr bool kPlain = std::is_same_v<Epilogue, PlainEpilogue>;
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
        StoreRounded(chunk, staging + (i + c) % 2 * 2048,
                     static_cast<T*>(params.out) + c * kColumns, dst,
                     n_first + c * kColumns + lane % 8 * kVector < params.gemm_n);
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
        if (params.out_is_f32) {
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

// A math warpgroup's way through the tiles. Its number is a template parameter, so that everything
// that becomes a descriptor is the same in all threads as the compiler sees it, and stays in
// uniform registers: moved there from others before every wgmma, it cost the narrow tiles half
// their rate.
template <Op kOp, typename T, class Tile, class Epilogue, int kWarpgroup>
__device__ __forceinline__ void ConsumeWgmmaStages(const IgemmWgmmaParams& params, uint32_t ring,
                                                   const WgmmaBarriers<Tile>& barriers) {
  constexpr bool kMnMajorA = kOp == Op::kWgrad, kMnMajorB = kWgmmaColumnLines<kOp, T>;
  const uint32_t staging = ring + Tile::kStagingAt + (threadIdx.x / 32 - 4) * Tile::kStagingBytes;
  constexpr uint32_t kOwnRows = Tile::kPingpong ? 0 : kWarpgroup * Tile::kBlocks * 64;
  const bool signals = threadIdx.x % 128 == 0;
  auto release = [&](uint32_t barrier) {
    if (signals) BarrierArrive(barrier);
  };
  RingPlace<Tile::kStages> stage;
  RingPlace<(Tile::kSlotsB > 0 ? Tile::kSlotsB : 1)> slot;
  if constexpr (Tile::kResident > 0) BarrierWait(barriers.Resident(), 0);
  // Pingpong: warpgroup 0 has the first turn.
  if (Tile::kPingpong && kWarpgroup == 1) NamedBarrierArrive(1, 256);
  int turn = 0;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const WgmmaTilePlace place(params, index);
    const WgmmaPhase& phase = params.phase[place.phase];
    if (place.m_tile * Tile::kTileM >= phase.rows) continue;
    const int32_t steps =
        min(params.steps_per_slice, phase.steps - place.slice * params.steps_per_slice);
    const int32_t taps = Tile::kRows ? phase.taps[0] : 1;
    if constexpr (Tile::kPingpong) {
      turn ^= 1;
      if (turn == kWarpgroup) {  // the other's tile
        stage.Skip(steps);
        if constexpr (Tile::kSlotsB > 0) slot.Skip(steps * taps);
        continue;
      }
      NamedBarrierSync(1 + kWarpgroup, 256);
    }
    typename Tile::Accumulators acc;
    if constexpr (!Tile::kRows) {
      uint32_t last = 0;
      for (int32_t step = 0; step < steps; ++step) {
        BarrierWait(barriers.Full(stage.slot), stage.parity);
        const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
        Tile::template Multiply<T, kMnMajorA, kMnMajorB>(acc, shared + kOwnRows * 128,
                                                         shared + Tile::kBytesA, step > 0);
        WgmmaWait<1>();
        if (step > 0) release(barriers.Empty(last));
        last = stage.slot;
        stage.Next();
      }
      if constexpr (Tile::kPingpong) NamedBarrierArrive(2 - kWarpgroup, 256);
      WgmmaWait<0>();
      release(barriers.Empty(last));
    } else {
      uint32_t last = 0, last_b = 0, resident = ring + Tile::kFilterAt;
      for (int32_t step = 0; step < steps; ++step) {
        BarrierWait(barriers.Full(stage.slot), stage.parity);
        uint32_t a = ring + stage.slot * Tile::kStageBytes + (kOwnRows + phase.offset0[0]) * 128;
        for (int32_t t = 0; t < taps; ++t) {
          if constexpr (Tile::kSlotsB > 0) BarrierWait(barriers.FullB(slot.slot), slot.parity);
          Tile::template Multiply<T, kMnMajorA, kMnMajorB>(
              acc, a,
              Tile::kSlotsB > 0 ? ring + Tile::kFilterAt + slot.slot * Tile::kBytesB : resident,
              step > 0 || t > 0);
          WgmmaWait<1>();
          if (step > 0 || t > 0) {
            if constexpr (Tile::kSlotsB > 0) release(barriers.EmptyB(last_b));
            // The row before has been read by its last tap.
            if (t == 0) release(barriers.Empty(last));
          }
          a += phase.offset_step[0] * 128;
          resident += Tile::kBytesB;
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
    const int32_t m_first = place.m_tile * Tile::kTileM + kOwnRows + threadIdx.x / 32 % 4 * 16;
    StoreWgmmaTile<kOp, T, Tile, Epilogue>(params, place, phase, acc, m_first, staging);
  }
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
    for (int32_t step = 0; step < steps; ++step) {
      const int32_t pixel = (first + step) * Tile::kPixels;
      int32_t m = pixel, x, y, z, image;
      phase.count[0].Divmod(m, &m, &x);
      phase.count[1].Divmod(m, &m, &y);
      phase.count[2].Divmod(m, &image, &z);
      x = phase.lower[0] + x * params.src_step[0];
      y = phase.lower[1] + y * params.src_step[1];
      z = phase.lower[2] + z * params.src_step[2];
      image += place.batch * params.images;
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + Tile::kRingAt + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, boxes * Tile::kBoxBytes + Tile::kBytesB);
      CopyTile4d(shared + Tile::kBytesA, &maps.b, barrier, 0, pixel, k_slab, place.batch);
#pragma unroll 1
      for (int i = 0; i < boxes; ++i) {
        const uint32_t to = shared + i * Tile::kBoxBytes;
        uint32_t box[4];
        LoadChunk(ring + Tile::kBoxesAt + i * 16, box);
        const int32_t c = static_cast<int32_t>(box[0]);
        switch (params.rank) {
          case 0:
            CopyTile2d(to, map_a, barrier, c, place.batch * params.pixels + pixel);
            break;
          case 1:
            CopyIm2col1d(to, map_a, barrier, c, x, image, box[1]);
            break;
          case 2:
            CopyIm2col2d(to, map_a, barrier, c, x, y, image, box[1], box[2]);
            break;
          default:
            CopyIm2col3d(to, map_a, barrier, c, x, y, z, image, box[1], box[2], box[3]);
        }
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
  __shared__ __align__(8) uint64_t barrier_words[WgmmaBarriers<Tile>::kCount];
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
    if constexpr (Tile::kResident > 0) BarrierInit(barriers.Resident(), 1);
    BarrierInitFence();
    PrefetchTensorMap(&maps.a[0]);
    PrefetchTensorMap(&maps.b);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    LowerRegisters<Tile::kProducerRegisters>();
    if (threadIdx.x == 0) {
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
    if constexpr (Tile::kMma) {
      ConsumeMmaWgradStages<Tile>(params, ring, barriers);
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
  auto kernel = IgemmWgmma<kOp, T, kTile, Epilogue>;
  int device = 0, sm_count = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Tile::kSharedBytes);
  }
  if (error == cudaSuccess) {
    kernel<<<std::min(params.tiles, sm_count), Tile::kThreads, Tile::kSharedBytes,
             static_cast<cudaStream_t>(stream)>>>(params, maps);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) {
    cudaGetLastError();
    return Status::Internal(std::string("igemm_wgmma: ") + cudaGetErrorString(error));
  }
  return {};
}

template <Op kOp, DType kType, WgmmaTileId kTile>
Status LaunchIgemmWgmma(const IgemmWgmmaParams& params, const WgmmaOperands& operands,
                        void* stream) {
  return LaunchIgemmWgmmaWith<kOp, kType, kTile>(params, operands, stream);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_IGEMM_WGMMA_SM90_CUH_
