// The FP32 FMA tile: its geometry, its shared memory, and the mainloop that multiplies it.
//
// A thread has 8x8 outputs as four 4x4 quadrants (in a wide tile 8x16 outputs as eight); a warp has
// (8 lanes_m) x (8 lanes_n) outputs:
//
//        n ->  | quadrant 0 of all lanes | quadrant 1 of all lanes |
//      m       +-------------------------+-------------------------+
//      |       | lane grid, 4 x 4 each   |                         |
//      v       +-------------------------+-------------------------+
//              | quadrant 2              | quadrant 3              |
//
// One 16-byte shared-memory load therefore feeds 4 rows (or columns) of a quadrant, and the lanes
// of a warp read neighbouring quads. Lanes run in z order over the lane grid: lanes 2i and 2i+1
// differ in m, so the lanes that one shared-memory transaction serves read few distinct quads of A
// and of B, which the hardware broadcasts.
#ifndef JAXCONV_CUDA_IGEMM_SIMT_SIMT_TILE_CUH_
#define JAXCONV_CUDA_IGEMM_SIMT_SIMT_TILE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/igemm_simt/params.h"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_simt {

template <int kTileM_, int kTileN_, int kThreadN_, int kWarpsM_, int kWarpsN_, int kLanesM_,
          int kLanesN_, int kMinBlocks_>
struct SimtTile {
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kThreadN = kThreadN_;  // columns of one thread; its rows are 8
  static constexpr int kLanesM = kLanesM_;
  static constexpr int kLanesN = kLanesN_;
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kThreads = 32 * kWarpsM_ * kWarpsN_;
  static constexpr int kMinBlocks = kMinBlocks_;
  // Rows have 4 more floats than the tile. A transposed store writes 16 rows of m for two values of
  // k that differ by 4; 4 * stride = 16 modulo 32 banks, so the halves of the warp use disjoint
  // banks.
  static constexpr int kStrideA = kTileM + 4;
  static constexpr int kStrideB = kTileN + 4;
  static_assert(kLanesM * kLanesN == 32);
  static_assert(kTileM == kWarpsM_ * kLanesM * 8 && kTileN == kWarpsN_ * kLanesN * kThreadN);

  // The first row and column of this thread's quadrant 0; quadrants lie kLanes * 4 apart.
  __device__ static int FirstRow() {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int lane_m = kLanesM == 4 ? (lane & 1) | ((lane >> 4) << 1) : (lane & 1) | ((lane >> 3) << 1);
    return warp / kWarpsN * kLanesM * 8 + lane_m * 4;
  }
  __device__ static int FirstColumn() {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return warp % kWarpsN * kLanesN * kThreadN + ((lane >> 1) % kLanesN) * 4;
  }
};

template <class Tile>
struct alignas(16) SimtStage {
  float a[kTileK][Tile::kStrideA];
  float b[kTileK][Tile::kStrideB];
};

template <class Tile>
inline constexpr int kSimtStageBytes = sizeof(SimtStage<Tile>);

// One k of a stage: this thread's 8 values of A and of B.
template <class Tile, int kK>
__device__ __forceinline__ void ReadFragments(uint32_t a_address, uint32_t b_address, float (&a)[8],
                                              float (&b)[Tile::kThreadN]) {
  LoadShared<kK * Tile::kStrideA * 4>(a_address, &a[0]);
  LoadShared<kK * Tile::kStrideB * 4>(b_address, &b[0]);
  LoadShared<kK * Tile::kStrideA * 4 + Tile::kLanesM * 16>(a_address, &a[4]);
  LoadShared<kK * Tile::kStrideB * 4 + Tile::kLanesN * 16>(b_address, &b[4]);
  if constexpr (Tile::kThreadN == 16) {
    LoadShared<kK * Tile::kStrideB * 4 + Tile::kLanesN * 32>(b_address, &b[8]);
    LoadShared<kK * Tile::kStrideB * 4 + Tile::kLanesN * 48>(b_address, &b[12]);
  }
}

template <int kThreadN>
__device__ __forceinline__ void OuterProduct(const float (&a)[8], const float (&b)[kThreadN],
                                             float (&acc)[8][kThreadN]) {
  // Serpentine order: at each turn an FMA reuses the operand that the previous FMA left in the
  // operand cache. The inner direction is the one for which the compiler puts all three operands of
  // fewer FMAs in one register bank (11 of 512 against 14, 26 of 1024 against 86).
  constexpr bool kRowsInside = kThreadN == 16;
  constexpr int kOuter = kRowsInside ? kThreadN : 8;
  constexpr int kInner = kRowsInside ? 8 : kThreadN;
#pragma unroll
  for (int outer = 0; outer < kOuter; ++outer) {
#pragma unroll
    for (int step = 0; step < kInner; ++step) {
      const int inner = outer % 2 == 0 ? step : kInner - 1 - step;
      const int i = kRowsInside ? inner : outer, j = kRowsInside ? outer : inner;
      acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
    }
  }
}

// acc += A B over the stages of a loader.
//
// Loader: Fetch() loads the next stage from global memory into registers, Commit() stores them to
// shared memory, FlipStage(bytes) moves the address that Commit writes to. FirstRun() and NextRun()
// return the number of Fetches until the loader must branch (0: the reduction ends); their sum is
// the number of stages plus one, and the values of the last Fetch are not used. The hot loop is
// therefore one basic block. With a branch in it, the compiler moves more accumulators between
// registers in every pass, and FMAs conflict in the register banks.
//
// While a stage is multiplied, the next one is in the loader's registers, and the fragments of the
// next k are read one k ahead. One barrier a stage orders reads and writes, because the two stages
// alternate.
template <class Tile, class Loader>
__device__ __forceinline__ void SimtMainloop(Loader& loader, const SimtStage<Tile> (&stages)[2],
                                             float (&acc)[8][Tile::kThreadN]) {
  int run = loader.FirstRun();
  if (run == 0) return;
  loader.Fetch();
  loader.Commit();
  int32_t flip = kSimtStageBytes<Tile>;
  loader.FlipStage(flip);
  __syncthreads();

  float a[2][8], b[2][Tile::kThreadN];
  uint32_t a_address = SharedAddress(&stages[0].a[0][Tile::FirstRow()]);
  uint32_t b_address = SharedAddress(&stages[0].b[0][Tile::FirstColumn()]);
  ReadFragments<Tile, 0>(a_address, b_address, a[0], b[0]);

  --run;
#pragma unroll 1
  do {
#pragma unroll 1
    for (; run > 0; --run) {
      loader.Fetch();
      ReadFragments<Tile, 1>(a_address, b_address, a[1], b[1]);
      OuterProduct(a[0], b[0], acc);
      ReadFragments<Tile, 2>(a_address, b_address, a[0], b[0]);
      OuterProduct(a[1], b[1], acc);
      ReadFragments<Tile, 3>(a_address, b_address, a[1], b[1]);
      OuterProduct(a[0], b[0], acc);
      ReadFragments<Tile, 4>(a_address, b_address, a[0], b[0]);
      OuterProduct(a[1], b[1], acc);
      ReadFragments<Tile, 5>(a_address, b_address, a[1], b[1]);
      OuterProduct(a[0], b[0], acc);
      ReadFragments<Tile, 6>(a_address, b_address, a[0], b[0]);
      OuterProduct(a[1], b[1], acc);
      ReadFragments<Tile, 7>(a_address, b_address, a[1], b[1]);
      OuterProduct(a[0], b[0], acc);
      loader.Commit();
      a_address += flip;
      b_address += flip;
      flip = -flip;
      loader.FlipStage(flip);
      __syncthreads();
      // After the last stage these values are not used.
      ReadFragments<Tile, 0>(a_address, b_address, a[0], b[0]);
      OuterProduct(a[1], b[1], acc);
    }
    run = loader.NextRun();
  } while (run > 0);
}

}  // namespace jaxconv::igemm_simt

#endif  // JAXCONV_CUDA_IGEMM_SIMT_SIMT_TILE_CUH_
