// A tile of pixels by channels on the tensor cores: its shared memory, its registers, and the
// product of one k-block (sm_90a).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGMMA_TILE_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGMMA_TILE_SM90_CUH_

#include <cstdint>

#include "cuda/igemm_wgmma/params.h"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// Shared memory and registers of a CTA that multiplies kTileM pixels by kTileN channels.
//
// A stage holds the activations and the filter of one k-block. kFilterRow: a stage holds the
// activations of a whole filter row, kTileM pixels and kMaxSpan more of the padded image, which
// every tap of the row reads one pixel further on. The filter then has kFilterSlots slots of its
// own, a k-block each. kStationary > 0: this many k-blocks of the filter stay in shared memory.
//
// kStagingBytes: shared memory in which a consumer warp reorders results before it stores them:
// 2048 for one buffer, 4096 for two or for 64 columns of 16 rows in float32. No staging serves
// float32 results of pingpong tiles with float32 operands, nor partial sums if kStagingBytes <
// 4096.
template <int kWarpgroups_, bool kPingpong_, int kTileM_, int kTileN_, int kStages_,
          bool kFilterRow_, int kFilterSlots_, int kStationary_, int kStagingBytes_>
struct TileLayout {
  static constexpr int kWarpgroups = kWarpgroups_;  // consumer warpgroups
  static constexpr bool kPingpong = kPingpong_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_;
  static constexpr int kStages = kStages_;
  static constexpr int kFilterSlots = kFilterSlots_, kStationary = kStationary_;
  static constexpr bool kFilterRow = kFilterRow_;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kPixels = kTileM + (kFilterRow ? kMaxSpan : 0);  // pixels of a load
  static constexpr int kBytesA = kPixels * 128;
  static constexpr int kBytesB = kTileN * 128;
  static constexpr int kStageBytes = kBytesA + (kFilterSlots > 0 || kStationary > 0 ? 0 : kBytesB);
  static constexpr int kFilterAt = kStages * kStageBytes;
  static constexpr int kStagingAt =
      kFilterAt + (kStationary > 0 ? kStationary : kFilterSlots) * kBytesB;
  static constexpr int kStagingBytes = kStagingBytes_;
  // 1024 more to align the ring.
  static constexpr int kSharedBytes = kStagingAt + kWarpgroups * 4 * kStagingBytes + 1024;
  static_assert(kSharedBytes + 1024 <= 232448, "227 KB a CTA, barriers among them");
  static_assert(kBytesA % 1024 == 0, "the swizzle's pattern starts with every slot");
  // The warpgroups share 65536 registers; the producer needs few.
  static constexpr int kAccumulators = kTileM * kTileN / (kPingpong ? 1 : kWarpgroups) / 128;
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : kAccumulators > 160 ? 24 : 40;
  static constexpr int kConsumerRegisters = kWarpgroups == 3      ? 160
                                            : kAccumulators > 160 ? 240
                                                                  : 232;
};

// kWarpgroups consumer warpgroups of kBlocks x 64 rows by kN0 + kN1 columns (two instructions where
// one cannot be so wide). Cooperative: the warpgroups share a tile, one above the other. Pingpong:
// each has a tile of its own, and they alternate on the tensor cores, so that one stores while the
// other multiplies. kSteps: the first kSteps of a k-block's 4 instructions (32 bytes of the
// reduction each) are issued.
template <int kWarpgroups_, bool kPingpong_, int kBlocks_, int kN0_, int kN1_, int kStages_,
          bool kFilterRow_ = false, int kFilterSlots_ = 0, int kStationary_ = 0,
          int kStagingBytes_ = 4096, int kSteps_ = 4>
struct WgmmaTile
    : TileLayout<kWarpgroups_, kPingpong_, (kPingpong_ ? 1 : kWarpgroups_) * kBlocks_ * 64,
                 kN0_ + kN1_, kStages_, kFilterRow_, kFilterSlots_, kStationary_, kStagingBytes_> {
  static constexpr bool kSwapAb = false;
  static constexpr bool kPatches = false;  // columns are elements of a patch
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kN0 = kN0_, kN1 = kN1_;
  // Rows of a cooperative tile from one warpgroup to the next.
  static constexpr int kRowsOfWarpgroup = kPingpong_ ? 0 : kBlocks * 64;

  // The pixel, among a warp's 16, that a row of the accumulators holds.
  static __device__ __forceinline__ int PixelOf(int row) { return row; }

  struct Accumulators {
    float first[kBlocks][kN0 / 2];
    float second[kBlocks][kN1 > 0 ? kN1 / 2 : 1];

    // The accumulators of 64 rows from a column on.
    __device__ __forceinline__ const float* Columns(int block, int column) const {
      return column < kN0 ? &first[block][column / 2] : &second[block][(column - kN0) / 2];
    }
  };

  // Multiplies one k-block, 128 bytes of the reduction. `a`: this warpgroup's rows; `b`: the whole
  // tile's columns.
  template <typename T, bool kMnMajorA, bool kMnMajorB>
  static __device__ __forceinline__ void Multiply(Accumulators& acc, uint32_t a, uint32_t b,
                                                  bool accumulate) {
    const uint64_t desc_a = kMnMajorA ? MnMajorDescriptor<8192>(a) : KMajorDescriptor(a);
    const uint64_t desc_b = kMnMajorB ? MnMajorDescriptor<8192>(b) : KMajorDescriptor(b);
    // From one instruction's 32 bytes of the reduction to the next.
    constexpr int kStepA = (kMnMajorA ? 2048 : 32) >> 4;
    constexpr int kStepB = (kMnMajorB ? 2048 : 32) >> 4;
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kSteps_; ++k) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const uint64_t block_a = desc_a + k * kStepA + i * (8192 >> 4);
        const int add = accumulate || k > 0;
        Wgmma<kN0, T, kMnMajorA, kMnMajorB>(acc.first[i], block_a, desc_b + k * kStepB, add);
        if constexpr (kN1 > 0) {
          Wgmma<kN1, T, kMnMajorA, kMnMajorB>(acc.second[i], block_a,
                                              desc_b + k * kStepB + kN0 * (128 >> 4), add);
        }
      }
    }
    WgmmaCommit();
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGMMA_TILE_SM90_CUH_
