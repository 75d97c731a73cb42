// The FP32 FMA tile: its geometry, its shared memory, and the mainloop that multiplies it.
//
// Every thread owns 8x8 outputs as four 4x4 quadrants; a warp owns (8 lanes_m) x (8 lanes_n) outputs:
//
//        n ->  | quadrant 0 of all lanes | quadrant 1 of all lanes |
//      m       +-------------------------+-------------------------+
//      |       | lane grid, 4 x 4 each   |                         |
//      v       +-------------------------+-------------------------+
//              | quadrant 2              | quadrant 3              |
//
// so one 16-byte shared-memory load feeds 4 rows (or columns) of a quadrant and the lanes of a warp read
// neighbouring quads. Lanes run in z order over the lane grid: lanes 2i and 2i+1 differ in m, so that the
// lanes served together read few distinct quads of A and of B and the hardware broadcasts them.
#ifndef JAXCONV_CUDA_DEVICE_SIMT_TILE_CUH_
#define JAXCONV_CUDA_DEVICE_SIMT_TILE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

// Reduction indices of one shared-memory stage. 8 keeps the two staged quads of a thread at 8 registers
// and still gives 512 FMAs between barriers.
inline constexpr int kSimtTileK = 8;

template <int kTileM_, int kTileN_, int kWarpsM_, int kWarpsN_, int kLanesM_, int kLanesN_,
          int kMinBlocks_>
struct SimtTile {
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kLanesM = kLanesM_;
  static constexpr int kLanesN = kLanesN_;
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kThreads = 32 * kWarpsM_ * kWarpsN_;
  static constexpr int kMinBlocks = kMinBlocks_;
  // Rows of 4 more floats than the tile: a transposed store puts 16 rows of m under two values of k that
  // differ by 4, and 4 * stride = 16 modulo 32 banks sends the two halves of the warp to disjoint banks.
  static constexpr int kStrideA = kTileM + 4;
  static constexpr int kStrideB = kTileN + 4;
  static_assert(kLanesM * kLanesN == 32);
  static_assert(kTileM == kWarpsM_ * kLanesM * 8 && kTileN == kWarpsN_ * kLanesN * 8);

  // The first row and column of this thread's quadrant 0; quadrants lie kLanes * 4 apart.
  __device__ static int FirstRow() {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int lane_m = kLanesM == 4 ? (lane & 1) | ((lane >> 4) << 1) : (lane & 1) | ((lane >> 3) << 1);
    return warp / kWarpsN * kLanesM * 8 + lane_m * 4;
  }
  __device__ static int FirstColumn() {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return warp % kWarpsN * kLanesN * 8 + ((lane >> 1) % kLanesN) * 4;
  }
};

template <class Tile>
struct alignas(16) SimtStage {
  float a[kSimtTileK][Tile::kStrideA];
  float b[kSimtTileK][Tile::kStrideB];
};

// acc += A B over `blocks` stages. Loader gives Fetch(block): global memory -> its registers, and
// Commit(stage): its registers -> shared memory. While a stage is multiplied, the next one travels
// through the loader's registers, and the fragments of the next k are read one k ahead; one barrier a
// stage orders both directions, because the two stages alternate.
template <class Tile, class Loader>
__device__ __forceinline__ void SimtMainloop(Loader& loader, int blocks,
                                             SimtStage<Tile> (&stages)[2], float (&acc)[8][8]) {
  if (blocks <= 0) return;
  loader.Fetch(0);
  loader.Commit(stages[0]);
  __syncthreads();

  float a[2][8], b[2][8];
  const int row = Tile::FirstRow(), column = Tile::FirstColumn();
  auto read_fragments = [&](const SimtStage<Tile>& stage, int k, int slot) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float4*>(&a[slot][half * 4]) =
          *reinterpret_cast<const float4*>(&stage.a[k][row + half * Tile::kLanesM * 4]);
      *reinterpret_cast<float4*>(&b[slot][half * 4]) =
          *reinterpret_cast<const float4*>(&stage.b[k][column + half * Tile::kLanesN * 4]);
    }
  };
  read_fragments(stages[0], 0, 0);

  int current = 0;
#pragma unroll 1
  for (int block = 1; block <= blocks; ++block) {
    const bool more = block < blocks;
    if (more) loader.Fetch(block);
#pragma unroll
    for (int k = 0; k < kSimtTileK; ++k) {
      if (k == kSimtTileK - 1) {
        if (more) loader.Commit(stages[current ^ 1]);
        __syncthreads();
        current ^= 1;
        // After the last stage this reads what nobody uses; a branch would cost more.
        read_fragments(stages[current], 0, 0);
      } else {
        read_fragments(stages[current], k + 1, (k + 1) % 2);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[i][j] = fmaf(a[k % 2][i], b[k % 2][j], acc[i][j]);
      }
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_DEVICE_SIMT_TILE_CUH_
