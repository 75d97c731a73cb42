// The tensor-core tile: its geometry, its swizzled shared memory, and the mainloop.
//
// A stage holds one k-block of both operands, each in the order in which it lies in global memory,
// so that every copy is 16 bytes of one row to 16 bytes of one row:
//
//     K-major    rows are gemm_m (gemm_n), bytes run along the reduction:
//                A of fprop and dgrad, B of dgrad; read by ldmatrix
//     MN-major   rows are the reduction, bytes run along gemm_m (gemm_n):
//                A of wgrad, B of fprop and wgrad; read by ldmatrix.trans, 32-bit elements by words
//
// Swizzle: chunk c (16 bytes) of row r lies at chunk c ^ f(r) of its row, without padding:
//     rows of 128 bytes and more   f = r % 8          eight rows of one chunk: eight bank groups
//     rows of 64 bytes             f = (r / 2) % 4    two rows share the 32 banks
//     rows of 32 bytes             f = (r / 4) % 2    four rows share them
//     MN-major 32-bit elements     f = 2 (r % 4)      four rows of two chunks, read word by word
//       of rows of 64 bytes        f = 2 (r / 2 % 2)
// All reads of fragments and all copies then run without bank conflicts. f depends on the lane
// only, because all other terms of a row number are multiples of 8. The blocks of a warp tile
// therefore differ in address bits outside the lane's, and an XOR with a constant moves between
// them.
#ifndef JAXCONV_CUDA_COMMON_MMA_TILE_CUH_
#define JAXCONV_CUDA_COMMON_MMA_TILE_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv {

// kTileKBytes: bytes of reduction in a stage (64 or 128), the same geometry for every type.
template <int kTileM_, int kTileN_, int kTileKBytes_, int kWarpsM_, int kWarpsN_, int kStages_,
          int kMinBlocks_>
struct MmaTile {
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kTileKBytes = kTileKBytes_;
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kThreads = 32 * kWarpsM_ * kWarpsN_;
  static constexpr int kStages = kStages_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kWarpM = kTileM / kWarpsM_;
  static constexpr int kWarpN = kTileN / kWarpsN_;
  static constexpr int kBlocksM = kWarpM / 16;  // blocks of one mma
  static constexpr int kBlocksN = kWarpN / 8;
  static constexpr int kSteps = kTileKBytes / 32;  // mma instructions along a stage's reduction
  static constexpr int kBytesOfA = kTileM * kTileKBytes;
  static constexpr int kBytesOfB = kTileN * kTileKBytes;
  static constexpr int kStageBytes = kBytesOfA + kBytesOfB;
  static_assert(kBlocksM * 16 * kWarpsM_ == kTileM && kBlocksN * 8 * kWarpsN_ == kTileN);
  static_assert(kBlocksM % 2 == 0 && kBlocksN % 2 == 0 && kStageBytes % 1024 == 0);

  __device__ static int WarpM() { return threadIdx.x / 32 / kWarpsN * kWarpM; }
  __device__ static int WarpN() { return threadIdx.x / 32 % kWarpsN * kWarpN; }
};

// body(0), body(1), ... with compile-time constants.
template <int kCount, int kFirst = 0, typename Body>
__device__ __forceinline__ void Unroll(Body&& body) {
  if constexpr (kFirst < kCount) {
    body(std::integral_constant<int, kFirst>());
    Unroll<kCount, kFirst + 1>(body);
  }
}

// One operand of a stage: kExtent rows or columns (gemm_m or gemm_n) times the reduction.
template <typename T, int kExtent, int kTileKBytes, bool kMnMajor_>
struct OperandTile {
  static constexpr bool kMnMajor = kMnMajor_;
  static constexpr int kTileK = kTileKBytes / sizeof(T);
  static constexpr int kRows = kMnMajor ? kTileK : kExtent;
  static constexpr int kRowBytes = kMnMajor ? kExtent * int{sizeof(T)} : kTileKBytes;
  static constexpr int kChunks = kRowBytes / 16;

  __device__ static constexpr int Swizzle(int row) {
    if constexpr (kMnMajor && sizeof(T) == 4) {
      return kRowBytes >= 128 ? row % 4 * 2 : row / 2 % 2 * 2;
    }
    return kRowBytes >= 128 ? row % 8 : kRowBytes == 64 ? row / 2 % 4 : row / 4 % 2;
  }
  __device__ static constexpr int Offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ Swizzle(row)) * 16;
  }
};

// The addresses from which a lane reads its fragments. kIsB: the operand's blocks are 8 columns,
// two to one ldmatrix; A's are 16 rows.
template <typename T, class Operand, bool kIsB>
class FragmentReader {
 public:
  // `first`: the warp's first row (column) in the tile; `base`: the operand in stage 0.
  __device__ __forceinline__ FragmentReader(uint32_t base, int first) {
    const int lane = threadIdx.x % 32;
    if constexpr (!Operand::kMnMajor) {
      const int row = kIsB ? lane % 8 + lane / 16 * 8 : lane % 16;
      const int chunk = kIsB ? lane / 8 % 2 : lane / 16;
      address_ = base + Operand::Offset(first + row, chunk);
    } else if constexpr (sizeof(T) == 2) {
      const int row = kIsB ? lane % 16 : lane % 8 + lane / 16 * 8;
      const int chunk = kIsB ? lane / 16 : lane / 8 % 2;
      address_ = base + Operand::Offset(row, first / 8 + chunk);
    } else {
      const int g = lane / 4, t = lane % 4;
      address_ = base + Operand::Offset(t, first / 4 + g / 4) + g % 4 * 4;
    }
  }

  __device__ __forceinline__ void Flip(int32_t bytes) { address_ += bytes; }

  // 16 rows of A, or 16 columns of B (b[0], b[1] of the first 8, then of the others).
  template <int kBlocks>
  __device__ __forceinline__ void Read(int step, uint32_t (&fragment)[kBlocks][4]) const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) ReadBlock(step, i, fragment[i]);
  }

  __device__ __forceinline__ void ReadBlock(int step, int i, uint32_t (&fragment)[4]) const {
    if constexpr (!Operand::kMnMajor) {
      LoadMatrices((address_ ^ (step * 32)) + i * 16 * Operand::kRowBytes, fragment);
    } else if constexpr (sizeof(T) == 2) {
      LoadMatricesTransposed((address_ ^ (i * 32)) + step * 16 * Operand::kRowBytes, fragment);
    } else {
      // e: b[0], b[1] along the reduction, then the next 8 columns; for A, rows first.
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int upper_half = kIsB ? e / 2 : e % 2, upper_k = kIsB ? e % 2 : e / 2;
        fragment[e] = LoadWord((address_ ^ (i * 64 + upper_half * 32)) +
                               (step * 8 + upper_k * 4) * Operand::kRowBytes);
      }
    }
  }

 private:
  uint32_t address_;
};

// 32-bit fragments to TF32, as late as possible: their loads may still be outstanding.
template <typename T>
__device__ __forceinline__ void RoundFragment(uint32_t (&fragment)[4]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int e = 0; e < 4; ++e) RoundToTf32(fragment[e]);
  }
}
template <typename T, int kBlocks>
__device__ __forceinline__ void RoundFragments(uint32_t (&fragment)[kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) RoundFragment<T>(fragment[i]);
}

// acc += A B over `stages` k-blocks.
//
// Loader, called in this order by all threads for every stage:
//     Prepare()                  work that needs branches
//     IssuePart<p, parts>(slot)  starts a part of the copies into a slot of shared memory
//     Advance()                  computes the components of the next stage's addresses
//     Finish(slot)               stores the chunks that were loaded into registers
// The last kStages - 1 passes issue no copies. They have a separate loop, so that the main loop has
// no branch between its MMAs.
//
// In the pass of stage s, the copies of stage s + kStages - 1 go to the slot of stage s - 1, a part
// of them between the MMAs of each step but the last. Then this thread waits for its copies of
// stage s + 1. After the barrier, all threads' copies have arrived and all threads have read stage
// s, whose last fragments are in registers. The first fragments of stage s + 1 are read while the
// last step is multiplied, so neither the barrier nor a read idles the tensor cores. Acc: float, or
// int32_t for 8-bit operands.
template <typename T, class Tile, class OperandA, class OperandB, class Loader, typename Acc>
__device__ __forceinline__ void MmaMainloop(Loader& loader, uint32_t shared, int stages,
                                            Acc (&acc)[Tile::kBlocksM][Tile::kBlocksN][4]) {
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
  FragmentReader<T, OperandA, false> reader_a(shared, Tile::WarpM());
  FragmentReader<T, OperandB, true> reader_b(shared + Tile::kBytesOfA, Tile::WarpN());
  uint32_t write = shared + (Tile::kStages - 1) * Tile::kStageBytes;
  const uint32_t end = shared + Tile::kStages * Tile::kStageBytes;
  uint32_t read = shared;
  uint32_t a[2][Tile::kBlocksM][4], b[2][Tile::kBlocksN / 2][4];
  CopyAsyncWait<Tile::kStages - 2>();
  __syncthreads();
  reader_a.Read(0, a[0]);
  reader_b.Read(0, b[0]);
  static_assert(Tile::kSteps % 2 == 0);
  auto pass = [&](auto issue) {
    constexpr bool kIssue = decltype(issue)::value;
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
      } else {
        CopyAsyncCommit();
        CopyAsyncWait<Tile::kStages - 2>();
        __syncthreads();
        const int32_t flip = read + Tile::kStageBytes == end
                                 ? -(Tile::kStages - 1) * Tile::kStageBytes
                                 : Tile::kStageBytes;
        read += flip;
        reader_a.Flip(flip);
        reader_b.Flip(flip);
        reader_a.Read(0, a[0]);
        reader_b.Read(0, b[0]);
      }
      RoundFragments<T>(b[step % 2]);
#pragma unroll
      for (int i = 0; i < Tile::kBlocksM; ++i) {
        RoundFragment<T>(a[step % 2][i]);
#pragma unroll
        for (int jj = 0; jj < Tile::kBlocksN; ++jj) {
          // Serpentine order: consecutive instructions share an operand.
          const int j = i % 2 == 0 ? jj : Tile::kBlocksN - 1 - jj;
          MultiplyAdd<T>(acc[i][j], a[step % 2][i], b[step % 2][j / 2][j % 2 * 2],
                         b[step % 2][j / 2][j % 2 * 2 + 1]);
        }
      }
    });
    if constexpr (kIssue) {
      loader.Finish(write);
      write = write + Tile::kStageBytes == end ? shared : write + Tile::kStageBytes;
    }
  };
  int s = 0;
#pragma unroll 1
  for (; s < stages - (Tile::kStages - 1); ++s) pass(std::true_type());
#pragma unroll 1
  for (; s < stages; ++s) pass(std::false_type());
  CopyAsyncWait<0>();
  __syncthreads();
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_MMA_TILE_CUH_
