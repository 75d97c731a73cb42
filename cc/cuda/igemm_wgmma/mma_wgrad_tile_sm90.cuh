// A tile of wgrad in TF32: mma.sync out of boxes that the copy engine laid down.
//
// wgmma takes TF32 from shared memory along the reduction only, and both of wgrad's operands lie
// across it (a line is 32 channels of one pixel). Fragments of mma.sync come from registers, so
// any order will do: of rows, because the way out undoes it, and of the reduction, because both
// operands are read in the same. Lane 4 g + t reads pixel 2 t for the first half of an
// instruction's reduction and 2 t + 1 for the other:
//
//     A: 8 bytes, channels 2 g and 2 g + 1, which are rows g and g + 8: the halves of a fragment
//     B: 4 bytes, column g
//
// Chunk c (16 bytes) of pixel p lies at c ^ p % 8: what is read together differs in 2 t, so there
// are no bank conflicts, and registers come in the order in which the instruction wants them.
#ifndef JAXCONV_CUDA_DEVICE_MMA_WGRAD_TILE_SM90_CUH_
#define JAXCONV_CUDA_DEVICE_MMA_WGRAD_TILE_SM90_CUH_

#include <cstdint>

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv {

// kWarpsM x kWarpsN warps of kWarpM x kWarpN, two math warpgroups in all. A step is 32 pixels: of
// every 32 channels of both operands a box of 4 KB.
template <int kWarpsM_, int kWarpsN_, int kWarpM_, int kWarpN_, int kStages_>
struct MmaWgradTile {
  static constexpr bool kMma = true;
  static constexpr int kWarpgroups = 2;
  static constexpr bool kPingpong = false, kRows = false, kOneTap = false, kColumns = false;
  static constexpr int kSlotsB = 0, kResident = 0;
  static constexpr int kWarpsN = kWarpsN_, kWarpM = kWarpM_, kWarpN = kWarpN_;
  static_assert(kWarpsM_ * kWarpsN_ == kWarpgroups * 4);
  static constexpr int kTileM = kWarpsM_ * kWarpM, kTileN = kWarpsN * kWarpN;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kStages = kStages_;
  static constexpr int kBoxBytes = 4096;
  static constexpr int kBytesA = kTileM / 32 * kBoxBytes, kBytesB = kTileN / 32 * kBoxBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kPixels = 32;
  static constexpr int kBoxesAt = 512;  // what the producer knows of the boxes; before, barriers
  static constexpr int kRingAt = 1024;
  // And the way from the dynamic segment's start to a multiple of 1024.
  static constexpr int kSharedBytes = kRingAt + kStages * kStageBytes + 1024;
  static_assert(kSharedBytes + 1024 <= 232448, "227 KB a CTA, barriers among them");
  static constexpr int kProducerRegisters = 56, kMathRegisters = 224;
  static constexpr int kSteps = 4;  // instructions' worth of reduction in a stage

  struct Accumulators {
    float value[kWarpM / 16][kWarpN / 8][4];
  };
  struct Fragments {
    uint32_t a[kWarpM / 16][4], b[kWarpN / 8][2];
  };

  // Where a lane's first elements of A or B lie in a box; later ones differ in the chunk's bits.
  static __device__ __forceinline__ uint32_t LaneOffset(int half, int bytes) {
    const int g = threadIdx.x % 32 / 4, pixel = threadIdx.x % 4 * 2 + half;
    return pixel * 128 + ((g * bytes / 16) ^ pixel) * 16 + g * bytes % 16;
  }

  // `a`, `b`: LaneOffset of both halves in the first boxes of this warp.
  static __device__ __forceinline__ void Read(const uint32_t (&a)[2], const uint32_t (&b)[2],
                                              uint32_t stage, int step, Fragments& to) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kWarpM / 16; ++i) {
        LoadPair((a[half] ^ (i % 2 * 64)) + stage + i / 2 * kBoxBytes + step * 1024,
                 &to.a[i][2 * half], &to.a[i][2 * half + 1]);
      }
#pragma unroll
      for (int j = 0; j < kWarpN / 8; ++j) {
        to.b[j][half] =
            LoadWord((b[half] ^ (j % 4 * 32)) + stage + j / 4 * kBoxBytes + step * 1024);
      }
    }
  }

  static __device__ __forceinline__ void Multiply(const Fragments& from, Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i) {
#pragma unroll
      for (int jj = 0; jj < kWarpN / 8; ++jj) {
        // There and back again: neighbouring instructions share an operand.
        const int j = i % 2 == 0 ? jj : kWarpN / 8 - 1 - jj;
        MultiplyAdd<float>(acc.value[i][j], from.a[i], from.b[j][0], from.b[j][1]);
      }
    }
  }

  // row_offset(box): where the first column of the first channel of the warp's box of rows goes,
  // and how many of the box's channels exist; `pitch`: from one channel to the next.
  template <typename RowOffset>
  static __device__ __forceinline__ void Store(const Accumulators& acc, float* out, int32_t pitch,
                                               int columns, RowOffset row_offset) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int box = 0; box < kWarpM / 32; ++box) {
      int64_t first;
      const int channels = row_offset(box, &first);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = r / 2 * 16 + 2 * g + r % 2;
        if (row >= channels) continue;
        float* const to = out + first + int64_t{row} * pitch + 2 * t;
        const float (&rows)[kWarpN / 8][4] = acc.value[2 * box + r / 2];
#pragma unroll
        for (int j = 0; j < kWarpN / 8; ++j) {
          if (j * 8 >= columns) break;
          *reinterpret_cast<float2*>(to + j * 8) =
              make_float2(rows[j][r % 2 * 2], rows[j][r % 2 * 2 + 1]);
        }
      }
    }
  }
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_DEVICE_MMA_WGRAD_TILE_SM90_CUH_
