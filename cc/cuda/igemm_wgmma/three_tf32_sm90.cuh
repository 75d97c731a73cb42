// igemm_wgmma, 3xTF32: float32 operands as sums of two TF32 numbers each, three products on the
// tensor cores, more accurate than FP32 FMA in order (sm_90a). The map from convolution to GEMM,
// the loads of activations and what is refused are those of cooperative_sm90.cuh.
//
//     a b = small_a big_b + big_a small_b + big_a big_b      over one k-block, 32 of the reduction
//     sums += a b, by FADD: tensor cores truncate when they add, harmlessly within a k-block
//
//     consumer 0   | 12 wgmma           | FADD; load, split A | 12 wgmma            | ...
//     consumer 1   | load, split A      | 12 wgmma            | FADD; load, split A | 12 wgmma
//
// A separate kernel splits the filter ahead (filter_split.h), K-major for both operations. The
// activations are loaded unsplit; each consumer warpgroup loads its fragments to registers and
// splits them there, and wgmma takes A from registers. Two or three consumer warpgroups share a
// tile, 64 rows each. The tensor cores execute products in order of issue, so one warpgroup
// multiplies while another adds, loads and splits.
//
// Fragments: a lane loads four neighbours of 16 channels, 16 bytes. The filter's columns are
// permuted so that these four are the lane's columns t and t + 4 of two instructions. Eight lanes
// of a load read two rows; the swizzle puts their chunks into different banks if the row numbers
// differ in bit 2, so row g of a fragment is pixel PixelOf(g).
//
// Persistent, as cooperative. Shared memory of 128x128: 4 stages of (16 + 2 x 16) KB, 32 KB of
// staging, barriers. Registers: producer 40, consumers 232, of which 64 sums, 64 accumulators and
// 32 for fragments; with three warpgroups 32 and 160, with half as many sums.
//
// Full(s) and Empty(s) as in cooperative_sm90.cuh.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_THREE_TF32_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_THREE_TF32_SM90_CUH_

#include <cstdint>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/split_tf32.cuh"
#include "cuda/igemm_wgmma/mainloop_sm90.cuh"
#include "cuda/igemm_wgmma/ring_form_sm90.cuh"
#include "cuda/igemm_wgmma/store_tile_sm90.cuh"
#include "cuda/igemm_wgmma/wgmma_tile_sm90.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// kWarpgroups x 64 rows by kN columns. A stage holds the activations and both parts of the filter.
template <int kWarpgroups, int kN_, int kStages_>
struct ThreeTf32Tile : WgmmaTile<kWarpgroups, false, 1, kN_, 0, kStages_> {
  using Base = WgmmaTile<kWarpgroups, false, 1, kN_, 0, kStages_>;
  static constexpr int kN = kN_;
  static constexpr int kStageBytes = Base::kBytesA + 2 * Base::kBytesB;
  static constexpr int kStagingAt = kStages_ * kStageBytes;
  static constexpr int kSharedBytes = kStagingAt + kWarpgroups * 4 * Base::kStagingBytes + 1024;
  static_assert(kSharedBytes + 1024 <= 232448, "227 KB a CTA, barriers among them");
  static __device__ __forceinline__ int PixelOf(int row) {
    return (row & 8) | (row & 1) << 2 | (row & 7) >> 1;
  }

  // A lane's fragments of a k-block of A for four instructions, in big and small parts.
  struct Fragments {
    uint32_t big[4][4], small[4][4];

    // `at`: the lane's offset in a stage (FragmentAt).
    __device__ __forceinline__ void Load(uint32_t stage, uint32_t at) {
      uint32_t word[4][4];  // [instruction][register]
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        // Channels from 16 (q / 2) on, row g + 8 (q % 2).
        const uint4 quad = LoadChunk(stage + (at ^ q / 2 * 64) + q % 2 * 1024);
        word[q / 2 * 2][q % 2] = quad.x;
        word[q / 2 * 2][2 + q % 2] = quad.y;
        word[q / 2 * 2 + 1][q % 2] = quad.z;
        word[q / 2 * 2 + 1][2 + q % 2] = quad.w;
      }
      Split(word);
    }

    __device__ __forceinline__ void Split(const uint32_t (&word)[4][4]) {
      auto split = [&](auto function) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int r = 0; r < 4; ++r) function(word[k][r], &big[k][r], &small[k][r], r % 2);
        }
      };
      float zero[2] = {};  // or NaN
      split([&](uint32_t x, uint32_t* to_big, uint32_t* to_small, int which) {
        SplitTf32(x, to_big, to_small);
        zero[which] = fmaf(__uint_as_float(*to_small), 0.f, zero[which]);
      });
      if (zero[0] + zero[1] != 0) {
        split([](uint32_t x, uint32_t* to_big, uint32_t* to_small, int) {
          SplitTf32Finite(x, to_big, to_small);
        });
      }
    }
  };
  // The offset in a stage of a consumer lane's first 16 bytes of A. The other 16 channels lie 64
  // bytes further, modulo 128.
  static __device__ __forceinline__ uint32_t FragmentAt() {
    const int lane = Lane();
    const int row = PixelOf(lane / 4);
    return (threadIdx.x / 32 - 4) * 2048 + row * 128 + ((lane % 4) ^ row) * 16;
  }

  // Starts the three products of a k-block, `part` = A B. `b`: the address of the big parts; the
  // small parts follow.
  static __device__ __forceinline__ void Multiply(float (&part)[kN / 2], const Fragments& a,
                                                  uint32_t b) {
    const uint64_t b_big = KMajorDescriptor(b), b_small = KMajorDescriptor(b + Base::kBytesB);
    WgmmaFence();
    auto products = [&](const uint32_t (&of)[4][4], uint64_t with, bool first) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        WgmmaFromRegisters<kN>(part, of[k], with + k * (32 >> 4), !first || k > 0);
      }
    };
    products(a.small, b_big, true);
    products(a.big, b_small, false);
    products(a.big, b_big, false);
    WgmmaCommit();
  }
};

// A consumer warpgroup's sums over a tile's k-blocks. load(stage's address, &fragments) loads A.
template <class Products, class Tile, typename Load>
__device__ __forceinline__ void SumKBlocks(int32_t k_blocks, uint32_t ring,
                                           const Barriers<Tile>& barriers, const Release& release,
                                           RingPlace<Tile::kStages>& stage, Load load,
                                           float (&sums)[Products::kN / 2]) {
  for (int32_t i = 0; i < k_blocks; ++i) {
    BarrierWait(barriers.Full(stage.slot), stage.parity);
    const uint32_t at = ring + stage.slot * Tile::kStageBytes;
    typename Products::Fragments fragments;
    load(at, &fragments);
    float part[Products::kN / 2];
    Products::Multiply(part, fragments, at + Tile::kBytesA);
    WgmmaWait<0>();
    release(barriers.Empty(stage.slot));
    stage.Next();
#pragma unroll
    for (int j = 0; j < Products::kN / 2; ++j) sums[j] += WgmmaResult(part[j]);
  }
}

// A consumer warpgroup. All run the same code, because no descriptor depends on the warpgroup's
// number.
template <Op kOp, class Tile, class Epilogue>
__device__ __forceinline__ void ConsumeThreeTf32(const Params& params, uint32_t ring,
                                                 const Barriers<Tile>& barriers) {
  const Release release;
  const uint32_t fragment_at = Tile::FragmentAt();
  const int32_t warp = threadIdx.x / 32 - 4;
  RingPlace<Tile::kStages> stage;
  const int32_t stride = gridDim.x;
  for (int32_t index = blockIdx.x; index < params.tiles; index += stride) {
    const TilePlace place(params, index);
    const ResidueClass& of = params.residue_class[place.residue_class];
    const int32_t k_blocks = KBlocksOf<kOp, Tile>(params, place);
    auto store = [&](const typename Tile::Accumulators& results) {
      StoreTile(TileStore<kOp, float, Tile>{params, place, of, results,
                                            place.m_tile * Tile::kTileM + warp / 4 * 64,
                                            ring + Tile::kStagingAt + warp * Tile::kStagingBytes},
                MakeEpilogue<Epilogue>(params.epilogue, params.slice_elements > 0));
    };
    if (k_blocks == 0) {
      if constexpr (kStoresZeros<kOp, Tile>) {
        // A separate call: merging these zeros with the sums below would spill them.
        if (HasRows<Tile>(of, place)) store({});
      }
      continue;
    }
    typename Tile::Accumulators sums = {};
    SumKBlocks<Tile>(
        k_blocks, ring, barriers, release, stage,
        [&](uint32_t at, typename Tile::Fragments* to) { to->Load(at, fragment_at); },
        sums.first[0]);
    store(sums);
  }
}

template <Op kOp, DType kType, int kWarpgroups, int kN, int kStages>
struct ThreeTf32
    : RingForm<kOp, kType, ThreeTf32Tile<kWarpgroups, kN, kStages>, /*kWholeF32=*/true> {
  static_assert(kType == DType::kF32);
  using Tile = ThreeTf32Tile<kWarpgroups, kN, kStages>;

  static __device__ __forceinline__ void Produce(const Params& params, const Maps& maps,
                                                 uint32_t ring, const Barriers<Tile>& barriers) {
    ProduceStages<kOp, float, Tile, /*kParts=*/2>(params, maps, ring, barriers);
  }
  template <class Tag, bool /*kCounts*/>
  static __device__ __forceinline__ void Consume(const Params& params, uint32_t ring,
                                                 const Barriers<Tile>& barriers,
                                                 int /*warpgroup*/) {
    ConsumeThreeTf32<kOp, Tile, typename Tag::Epilogue>(params, ring, barriers);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_THREE_TF32_SM90_CUH_
