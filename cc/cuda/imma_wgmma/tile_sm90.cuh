// Shared by the device kernels of imma_wgmma: a CTA's position, the copies of a unit of
// activations, the products of an instruction, and the epilogue (sm_90a).
#ifndef JAXCONV_CUDA_IMMA_WGMMA_TILE_SM90_CUH_
#define JAXCONV_CUDA_IMMA_WGMMA_TILE_SM90_CUH_

#include <cstdint>

#include "cuda/common/requantize.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/imma_wgmma/params.h"
#include "cuda/imma_wgmma/tensor_maps.h"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::imma_wgmma {

template <class Tile>
struct RowResults;

// The ring and the registers of a CTA with two consumer warpgroups. Together they compute a tile of
// kTileM pixels by kTileN channels (cooperative), or each computes its own (pingpong).
//
// kFilterRow: a stage holds the activations of a filter row's taps, kTileM + kMaxSpan pixels; the
// filter has kFilterSlots slots of its own, or kStationary k-blocks that stay in shared memory.
template <bool kPingpong_, int kTileM_, int kTileN_, int kStages_, bool kFilterRow_,
          int kFilterSlots_, int kStationary_>
struct TileRing {
  static constexpr bool kPingpong = kPingpong_, kFilterRow = kFilterRow_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_;
  static constexpr int kPixels = kTileM + (kFilterRow ? kMaxSpan : 0);  // pixels of a copy
  static constexpr int kStages = kStages_;
  static constexpr int kFilterSlots = kFilterSlots_, kStationary = kStationary_;
  static constexpr int kThreads = 3 * 128;
  static constexpr int kBytesA = kPixels * kKBlockBytes, kBytesB = kTileN * kKBlockBytes;
  static constexpr int kStageBytes = kBytesA + (kFilterRow ? 0 : kBytesB);
  static constexpr int kFilterAt = kStages * kStageBytes;
  static constexpr int kRingBytes = kFilterAt + (kFilterSlots + kStationary) * kBytesB;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  // The ring, `behind` bytes after it, and 1024 to align it.
  static constexpr int SharedBytes(int behind) { return kRingBytes + behind + 1024; }
  static constexpr bool Fits(int shared_bytes) {
    return shared_bytes + 1024 <= 232448;  // 227 KB a CTA, barriers among them
  }
};

// A warpgroup multiplies kBlocks x 64 pixels by kTileN channels.
template <bool kPingpong, int kBlocks_, int kTileN, int kStages, bool kFilterRow = false,
          int kFilterSlots = 0, int kStationary = 0>
struct Int8Tile : TileRing<kPingpong, (kPingpong ? 1 : 2) * kBlocks_ * 64, kTileN, kStages,
                           kFilterRow, kFilterSlots, kStationary> {
  static constexpr int kBlocks = kBlocks_;  // blocks of 64 rows in a warpgroup
  // Each consumer warpgroup has two buffers, for the tile that it stores and for the next.
  using Terms = SharedTerms<kTileN>;
  static constexpr int kTermsAt = Int8Tile::kRingBytes;
  static constexpr int kSharedBytes = Int8Tile::SharedBytes(4 * Terms::kBytes);
  static_assert(Int8Tile::Fits(kSharedBytes));
  static constexpr int kAccumulators = kBlocks * kTileN / 2;
  using Sums = int32_t[kAccumulators];  // kTileN / 2 for each block
  using Results = RowResults<Int8Tile>;

  // The low words of a warpgroup's descriptors of the activations and of the filter, at their
  // addresses in shared memory.
  static __device__ __forceinline__ uint32_t Pixels(const Params& params, uint32_t shared,
                                                    int warpgroup) {
    return KMajorDescriptorLow(shared) +
           (kPingpong ? 0 : warpgroup * kBlocks * params.block_offset);
  }
  static __device__ __forceinline__ uint32_t Filter(uint32_t shared, int) {
    return KMajorDescriptorLow(shared);
  }
  // Multiplies 32 bytes of the reduction.
  template <typename T>
  static __device__ __forceinline__ void Multiply(const Params& params, Sums& sums, uint32_t pixels,
                                                  uint32_t filter, bool accumulate) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      WgmmaInt8(T{}, int8_t{}, reinterpret_cast<int32_t (&)[kTileN / 2]>(sums[i * (kTileN / 2)]),
                DescriptorOf(pixels + i * params.block_offset, params.descriptor),
                DescriptorOf(filter, KMajorDescriptorHigh()), accumulate);
    }
  }
};

// The digits of a tile index.
struct TilePlace {
  int32_t n_tile, m_tile, group;
  __device__ __forceinline__ TilePlace(const Params& params, int32_t index) {
    params.n_tiles.Divmod(index, &index, &n_tile);
    params.m_tiles.Divmod(index, &group, &m_tile);
  }
};

// The base pixel of output pixel m, the start of a box.
struct BasePixel {
  int32_t x = 0, y = 0, z = 0, image = 0;
  __device__ __forceinline__ BasePixel(const Params& params, int32_t m) {
    if (params.rank == 0) {
      x = m;
    } else {
      params.count[0].Divmod(m, &m, &x);
      params.count[1].Divmod(m, &m, &y);
      params.count[2].Divmod(m, &image, &z);
      x = params.lower[0] + x * params.step[0];
      y = params.lower[1] + y * params.step[1];
      z = params.lower[2] + z * params.step[2];
    }
  }
};

// A unit of the reduction: a tap and a run of channels.
struct Unit {
  UnitDigits at;

  // Without branches, because each delays the producer's thread.
  __device__ __forceinline__ void Advance(const Params& params, const UnitDigits& by) {
    int32_t carry = 0;
    auto add = [&carry](int32_t& digit, int32_t by, int32_t radix) {
      digit += by + carry;
      carry = digit >= radix;
      digit -= carry ? radix : 0;
    };
    const bool taps_first = params.taps_first;
    if (!taps_first) add(at.channels, by.channels, params.channel_units);
    add(at.tap[0], by.tap[0], params.taps[0]);
    add(at.tap[1], by.tap[1], params.taps[1]);
    add(at.tap[2], by.tap[2], params.taps[2]);
    if (taps_first) at.channels += by.channels + carry;
  }
  __device__ __forceinline__ int32_t Tap(const Params& params) const {
    return (at.tap[2] * params.taps[1] + at.tap[1]) * params.taps[0] + at.tap[0];
  }
};

// One unit's box of pixels.
__device__ __forceinline__ void LoadUnit(const Params& params, const CUtensorMap* map,
                                         uint32_t shared, uint32_t barrier, const Unit& unit,
                                         const BasePixel& at, int32_t group) {
  const int32_t c = group * params.group_channels + unit.at.channels * params.unit_channels;
  const auto off0 =
      static_cast<uint16_t>(params.offset0[0] + unit.at.tap[0] * params.offset_step[0]);
  const auto off1 =
      static_cast<uint16_t>(params.offset0[1] + unit.at.tap[1] * params.offset_step[1]);
  if (params.nchw32) {
    CopyIm2col2d(shared, map, barrier, at.x, at.y, c, at.image, off0, off1);
    return;
  }
  // Comparisons, the most frequent case first, because a jump table would be read from memory.
  if (params.rank == 2) {
    CopyIm2col2d(shared, map, barrier, c, at.x, at.y, at.image, off0, off1);
  } else if (params.rank == 0) {
    CopyTile2d(shared, map, barrier, c, at.x);
  } else if (params.rank == 1) {
    CopyIm2col1d(shared, map, barrier, c, at.x, at.image, off0);
  } else {
    CopyIm2col3d(shared, map, barrier, c, at.x, at.y, at.z, at.image, off0, off1,
                 static_cast<uint16_t>(params.offset0[2] + unit.at.tap[2] * params.offset_step[2]));
  }
}

// Issues the first kCount instructions of a k-block as one committed group. The code is straight:
// at a branch before the commit, ptxas would close a group, and waiting for all groups but one
// would then wait for the whole k-block. `pixels`, `filter`: from Tile::Pixels and Tile::Filter;
// `offsets`: those of the instructions' pixels.
template <typename T, class Tile, int kCount>
__device__ __forceinline__ void MultiplySteps(const Params& params, typename Tile::Sums& sums,
                                              uint32_t pixels, uint32_t filter,
                                              const uint32_t* offsets, bool accumulate) {
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    Tile::template Multiply<T>(params, sums, pixels + offsets[k], filter + k * (kStepBytes >> 4),
                               accumulate || k > 0);
  }
  WgmmaCommit();
}

// The same for `steps` instructions, 1 to kSteps.
template <typename T, class Tile>
__device__ __forceinline__ void MultiplyKBlock(const Params& params, typename Tile::Sums& sums,
                                               uint32_t pixels, uint32_t filter,
                                               const uint32_t* offsets, int32_t steps,
                                               bool accumulate) {
  static_assert(kSteps == 4);
  if (steps >= 4) {
    MultiplySteps<T, Tile, 4>(params, sums, pixels, filter, offsets, accumulate);
  } else if (steps == 3) {
    MultiplySteps<T, Tile, 3>(params, sums, pixels, filter, offsets, accumulate);
  } else if (steps == 2) {
    MultiplySteps<T, Tile, 2>(params, sums, pixels, filter, offsets, accumulate);
  } else {
    MultiplySteps<T, Tile, 1>(params, sums, pixels, filter, offsets, accumulate);
  }
}

// The output pixel of row m, or -1. With filter-row reuse the rows are the base pixels that TMA
// loads, some of which lie between two rows of the output.
template <class Tile>
__device__ __forceinline__ int32_t OutputPixelOf(const Params& params, int32_t m) {
  if (m >= params.rows) return -1;
  if constexpr (Tile::kFilterRow) {
    int32_t line, x;
    params.count[0].Divmod(m, &line, &x);
    return x < params.width ? line * params.width + x : -1;
  }
  return m;
}

// The scales and biases of a warpgroup's tiles: one tile's in use, the next tile's being loaded.
template <class Tile>
struct TermsOfTiles {
  const Params& params;
  const uint32_t ring;
  const int warpgroup;
  int32_t turn = 0;

  // Starts to load those of tile `index`, if it exists.
  __device__ __forceinline__ void Begin(int32_t index) {
    if (index < params.tiles) {
      const TilePlace place(params, index);
      At(place).Copy(params.requantize, threadIdx.x % 128, (place.group + 1) * params.columns);
    }
  }
  // Called by all threads of the warpgroup: waits for those of tile `place` and starts to load
  // those of tile `next`.
  __device__ __forceinline__ typename Tile::Terms Take(const TilePlace& place, int32_t next) {
    const typename Tile::Terms terms = At(place);
    terms.Wait(3 + warpgroup);
    ++turn;
    Begin(next);
    return terms;
  }

 private:
  __device__ __forceinline__ typename Tile::Terms At(const TilePlace& place) const {
    return {ring + Tile::kTermsAt + (warpgroup * 2 + turn % 2) * Tile::Terms::kBytes,
            place.group * params.columns + place.n_tile * Tile::kTileN};
  }
};

// A thread's output pixels in a warpgroup's tile, two of each 64 rows. `m`: the tile's first row.
// The four lanes of a row have the same pixels: each decodes some of them and passes them to the
// others.
template <class Tile>
struct PixelsOf {
  static constexpr int kCount = 2 * Tile::kBlocks;
  // Pixels that a path with a residual processes at once; more would spill.
  static constexpr int kAtOnce = kCount < 4 ? kCount : 4;
  static constexpr int kParts = kCount / kAtOnce;
  OutputPixel of[kParts][kAtOnce];

  __device__ __forceinline__ PixelsOf(const Params& params, int32_t m) {
    constexpr int kDecoded = (kCount + 3) / 4;
    const int32_t row = m + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    OutputPixel mine[kDecoded];
#pragma unroll
    for (int i = 0; i < kDecoded; ++i) {
      const int32_t which = i * 4 + threadIdx.x % 4;
      const int32_t at = OutputPixelOf<Tile>(params, row + which / 2 * 64 + which % 2 * 8);
      mine[i] = OutputPixel(params.requantize, at, at >= 0);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      of[i / kAtOnce][i % kAtOnce].at = __shfl_sync(0xffffffff, mine[i / 4].at, i % 4, 4);
    }
  }
};

// The residual of a thread's outputs. It is loaded before the tile is multiplied, because two
// warpgroups cannot hide its latency in the epilogue.
template <class Tile>
struct ResidualOf {
  static constexpr int kGroups = Tile::kTileN / 32;
  using Pixels = PixelsOf<Tile>;
  Residual<Pixels::kAtOnce> of[kGroups][Pixels::kParts];  // for each 32 channels

  __device__ __forceinline__ ResidualOf(const Params& params, const TilePlace& place,
                                        const Pixels& pixels) {
    if (!HasResidual(params.requantize.path)) return;
    const int32_t n_first = place.n_tile * Tile::kTileN;
    const int32_t channel = place.group * params.columns + n_first + threadIdx.x % 4 * 8;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int part = 0; part < Pixels::kParts; ++part) {
        LoadResidual(params.requantize, pixels.of[part], channel + group * 32,
                     n_first + group * 32 < params.columns, &of[group][part]);
      }
    }
  }
};

// Stores a warpgroup's tile and destroys the sums.
template <class Tile>
__device__ __forceinline__ void StoreTile(const Params& params, const TilePlace& place,
                                          const typename Tile::Terms& terms,
                                          const PixelsOf<Tile>& pixels,
                                          const ResidualOf<Tile>& residual,
                                          typename Tile::Sums& sums) {
  using Pixels = PixelsOf<Tile>;
  constexpr int kGroups = Tile::kTileN / 32, kPixels = Pixels::kCount;
  const int32_t m_first = place.m_tile * Tile::kTileM, n_first = place.n_tile * Tile::kTileN;
  const int32_t channel = terms.first + threadIdx.x % 4 * 8;
  auto inside = [&](int group) { return n_first + group * 32 < params.columns; };
  ForRequantizePath(params.requantize, [&](auto path) {
    constexpr RequantizePath kPath = decltype(path)::value;
    if constexpr (kPath == RequantizePath::kGeneral) {
      // One copy of the code: the pixels and the sums move through it.
      const Residual<2> none{};
      Pixels copy = pixels;
      auto& left = reinterpret_cast<OutputPixel(&)[kPixels]>(copy.of);
#pragma unroll 1
      for (int block = 0; block < Tile::kBlocks; ++block) {
        const OutputPixel two[2] = {left[0], left[1]};
#pragma unroll
        for (int i = 0; i + 2 < kPixels; ++i) left[i] = left[i + 2];
#pragma unroll 1
        for (int group = 0; group < kGroups; ++group) {
          RequantizeEight<kPath>(params.requantize, two, channel + group * 32, inside(group), terms,
                                 none,
                                 [&](int r, int e) { return sums[e / 2 * 4 + r * 2 + e % 2]; });
#pragma unroll
          for (int s = 0; s + 16 < Tile::kAccumulators; ++s) sums[s] = sums[s + 16];
        }
      }
    } else {
      constexpr int kAtOnce = HasResidual(kPath) ? Pixels::kAtOnce : kPixels;
      using Parts = OutputPixel[kPixels / kAtOnce][kAtOnce];
      const auto& parts = reinterpret_cast<const Parts&>(pixels.of);
      const Residual<kAtOnce> none{};
#pragma unroll
      for (int part = 0; part < kPixels / kAtOnce; ++part) {
        // These branches keep the compiler from moving code across them: all channels' terms at
        // once would spill.
        if (part > 0 && m_first + part * 128 >= params.rows) break;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          if (!inside(group)) break;
          const Residual<kAtOnce>* of_part = &none;
          if constexpr (HasResidual(kPath)) of_part = &residual.of[group][part];
          RequantizeEight<kPath>(
              params.requantize, parts[part], channel + group * 32, true, terms, *of_part,
              [&](int i, int e) {
                const int row = part * kAtOnce + i;
                return sums[(row / 2 * kGroups + group) * 16 + e / 2 * 4 + row % 2 * 2 + e % 2];
              });
        }
      }
    }
  });
}

// A consumer warpgroup's epilogue: one object for each warpgroup, one Output for each tile.
template <class Tile>
struct RowResults {
  TermsOfTiles<Tile> terms;
  struct Output {
    PixelsOf<Tile> pixels;
    ResidualOf<Tile> residual;
    __device__ __forceinline__ Output(const Params& params, const TilePlace& place, int32_t m)
        : pixels(params, m), residual(params, place, pixels) {}
  };

  __device__ __forceinline__ RowResults(const Params& params, uint32_t ring, int warpgroup)
      : terms{params, ring, warpgroup} {}
  // Called before the first tile, `index`.
  __device__ __forceinline__ void Begin(int32_t index) { terms.Begin(index); }
  // Called before a tile is multiplied; starts loads whose latency would delay the epilogue.
  __device__ __forceinline__ Output Prepare(const TilePlace& place) const {
    const int block = Tile::kPingpong ? 0 : terms.warpgroup * Tile::kBlocks;
    return Output(terms.params, place, place.m_tile * Tile::kTileM + block * 64);
  }
  // `next`: the following tile.
  __device__ __forceinline__ void Store(const TilePlace& place, int32_t next, const Output& output,
                                        typename Tile::Sums& sums) {
    StoreTile<Tile>(terms.params, place, terms.Take(place, next), output.pixels, output.residual,
                    sums);
  }
};

}  // namespace jaxconv::imma_wgmma

#endif  // JAXCONV_CUDA_IMMA_WGMMA_TILE_SM90_CUH_
