// The mainloop of float32 as three TF32 products (common/split_tf32.cuh).
//
// Operands lie in shared memory as float32 and are split in registers, just before they are multiplied.
// Runs have accumulators of their own, which leave room for warp tiles of 64x32.
//
// In the pass of stage s a thread waits for its copies of that stage; one barrier then tells that all
// threads' have arrived, and that all have read stage s - 1, whose slot gets the copies of stage
// s + kStages - 1, a part between the products of each step. Stage s stays until the next barrier, so
// that a run whose sums are not finite can be read again.
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
  static_assert(Tile::kSteps % kSplitRunSteps == 0);
  auto pass = [&](auto issue) {
    constexpr bool kIssue = decltype(issue)::value;
    CopyAsyncWait<Tile::kStages - 2>();
    __syncthreads();
    uint32_t a[2][Tile::kBlocksM][4], b[2][Tile::kBlocksN / 2][4];
    float run[Tile::kBlocksM][Tile::kBlocksN][4];
    uint32_t not_finite = 0;  // a bit of each run
    reader_a.Read(0, a[0]);
    reader_b.Read(0, b[0]);
    if constexpr (kIssue) loader.Prepare();
    Unroll<Tile::kSteps>([&](auto step_constant) {
      constexpr int step = decltype(step_constant)::value;
      if constexpr (step + 1 < Tile::kSteps) {
        reader_a.Read(step + 1, a[(step + 1) % 2]);
        reader_b.Read(step + 1, b[(step + 1) % 2]);
        if constexpr (kIssue) {
          loader.template IssuePart<step, Tile::kSteps - 1>(write);
          if constexpr (step + 2 == Tile::kSteps) loader.Advance();
        }
      }
      constexpr int of_run = step % kSplitRunSteps;
      MultiplySplit<SplitProducts::kAll, of_run == 0, /*kCare=*/false>(a[step % 2], b[step % 2],
                                                                       run);
      if constexpr (of_run + 1 == kSplitRunSteps) {
        if (AnyNotFinite(run)) {
          not_finite |= 1u << step / kSplitRunSteps;
        } else {
          Promote(run, acc);
        }
      }
    });
    if constexpr (kIssue) {
      loader.Finish(write);
      write = write + Tile::kStageBytes == end ? shared : write + Tile::kStageBytes;
    }
    CopyAsyncCommit();
    if (not_finite != 0) {
#pragma unroll 1
      for (int first = 0; first < Tile::kSteps; first += kSplitRunSteps) {
        if ((not_finite >> first / kSplitRunSteps & 1) == 0) continue;
        PromoteWithCare(run, acc, [&](auto products) {
#pragma unroll 1
          for (int step = first; step < first + kSplitRunSteps; ++step) {
            reader_a.Read(step, a[0]);
            reader_b.Read(step, b[0]);
            MultiplySplit<decltype(products)::value, false, /*kCare=*/true>(a[0], b[0], run);
          }
        });
      }
    }
    const int32_t flip = read + Tile::kStageBytes == end ? -(Tile::kStages - 1) * Tile::kStageBytes
                                                         : Tile::kStageBytes;
    read += flip;
    reader_a.Flip(flip);
    reader_b.Flip(flip);
  };
  int s = 0;
#pragma unroll 1
  for (; s < stages - (Tile::kStages - 1); ++s) pass(std::true_type());
#pragma unroll 1
  for (; s < stages; ++s) pass(std::false_type());
  CopyAsyncWait<0>();
  __syncthreads();
}

}  // namespace jaxconv::igemm_wmma

#endif  // JAXCONV_CUDA_IGEMM_WMMA_SPLIT_MAINLOOP_CUH_
