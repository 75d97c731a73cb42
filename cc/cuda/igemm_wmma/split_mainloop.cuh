// The mainloop of float32 as three TF32 products (common/split_tf32.cuh).
//
// Operands lie in shared memory as float32 and are split in registers just before they are
// multiplied. Runs have separate accumulators, which limits warp tiles to 64x32.
//
// In the pass of stage s a thread waits for its copies of that stage. After the following barrier,
// all threads' copies have arrived and all have read stage s - 1, whose slot receives the copies of
// stage s + kStages - 1, in parts, each during the products of 16 rows of a run. Stage s stays
// until the next barrier, so that a run whose sums are not finite can be read again. After the last
// stage, zeros are copied.
#ifndef JAXCONV_CUDA_IGEMM_WMMA_SPLIT_MAINLOOP_CUH_
#define JAXCONV_CUDA_IGEMM_WMMA_SPLIT_MAINLOOP_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/mma_tile.cuh"
#include "cuda/common/split_tf32.cuh"
#include "cuda/ptx/cp_async.cuh"

namespace jaxconv::igemm_wmma {

// acc += A B over `stages` k-blocks; Loader as for MmaMainloop.
template <class Tile, class OperandA, class OperandB, class Loader>
__device__ __forceinline__ void SplitMainloop(Loader& loader, uint32_t shared, int stages,
                                              float (&acc)[Tile::kBlocksM][Tile::kBlocksN][4]) {
#pragma unroll 1
  for (int s = 0; s < Tile::kStages - 1; ++s) {
    if (s < stages) {
      loader.Prepare();
      loader.template IssuePart<0, 1>(shared + s * Tile::kStageBytes);
      loader.Advance();
      loader.Finish(shared + s * Tile::kStageBytes);
    }
    CopyAsyncCommit();
  }
  FragmentReader<float, OperandA, false> reader_a(shared, Tile::WarpM());
  FragmentReader<float, OperandB, true> reader_b(shared + Tile::kBytesOfA, Tile::WarpN());
  uint32_t write = shared + (Tile::kStages - 1) * Tile::kStageBytes;
  const uint32_t end = shared + Tile::kStages * Tile::kStageBytes;
  uint32_t read = shared;
  auto read_b = [&](int step, uint32_t (&words)[Tile::kBlocksN][2]) {
    uint32_t quads[Tile::kBlocksN / 2][4];
    reader_b.Read(step, quads);
#pragma unroll
    for (int j = 0; j < Tile::kBlocksN; ++j) {
      words[j][0] = quads[j / 2][j % 2 * 2];
      words[j][1] = quads[j / 2][j % 2 * 2 + 1];
    }
  };
  constexpr int kRuns = Tile::kSteps / kSplitRunSteps, kParts = Tile::kSteps - 1;
  static_assert(kRuns * kSplitRunSteps == Tile::kSteps);
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    CopyAsyncWait<Tile::kStages - 2>();
    __syncthreads();
    loader.Prepare();
    uint32_t left = 0;  // blocks of runs that are not finite
    Unroll<kRuns>([&](auto run) {
      constexpr int first = decltype(run)::value * kSplitRunSteps;
      uint32_t a[kSplitRunSteps][4], b[kSplitRunSteps][Tile::kBlocksN][2];
      auto read_a = [&](int i, auto& words) {
#pragma unroll
        for (int s = 0; s < kSplitRunSteps; ++s) reader_a.ReadBlock(first + s, i, words[s]);
      };
#pragma unroll
      for (int s = 0; s < kSplitRunSteps; ++s) read_b(first + s, b[s]);
      read_a(0, a);
      auto beside = [&](auto block) {
        // The parts of the copies are spread evenly over the blocks of the stage, none during the
        // last.
        constexpr int at = decltype(run)::value * Tile::kBlocksM + decltype(block)::value;
        constexpr int kEvery = kRuns * Tile::kBlocksM / (kParts + 1);
        if constexpr (at % kEvery == kEvery - 1 && at / kEvery < kParts) {
          loader.template IssuePart<at / kEvery, kParts>(write);
          if constexpr (at / kEvery + 1 == kParts) loader.Advance();
        }
      };
      left |= MultiplySplitRun(b, a, acc, read_a, beside)
              << (decltype(run)::value * Tile::kBlocksM);
    });
    loader.Finish(write);
    write = write + Tile::kStageBytes == end ? shared : write + Tile::kStageBytes;
    CopyAsyncCommit();
    if (__any_sync(0xffffffff, left != 0)) {
#pragma unroll 1
      for (int run = 0; run < kRuns; ++run) {
        PromoteWithCare(left >> (run * Tile::kBlocksM), acc, [&](int step, auto& a, auto& b) {
          reader_a.Read(run * kSplitRunSteps + step, a);
          read_b(run * kSplitRunSteps + step, b);
        });
      }
    }
    const int32_t flip = read + Tile::kStageBytes == end ? -(Tile::kStages - 1) * Tile::kStageBytes
                                                         : Tile::kStageBytes;
    read += flip;
    reader_a.Flip(flip);
    reader_b.Flip(flip);
  }
  CopyAsyncWait<0>();
  __syncthreads();
}

}  // namespace jaxconv::igemm_wmma

#endif  // JAXCONV_CUDA_IGEMM_WMMA_SPLIT_MAINLOOP_CUH_
