// Chunks of 16 bytes from global memory to swizzled shared memory, in copies of 16 bytes or less.
#ifndef JAXCONV_CUDA_IGEMM_WMMA_CHUNK_COPY_CUH_
#define JAXCONV_CUDA_IGEMM_WMMA_CHUNK_COPY_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_wmma {

// Distributes the chunks of an operand over a CTA's threads: each has one column and kPasses rows.
template <class Operand, int kThreads>
struct ChunkOwner {
  static constexpr int kRowsOfPass = kThreads / Operand::kChunks;
  static constexpr int kPasses = Operand::kRows / kRowsOfPass;
  static_assert(kPasses >= 1 && kRowsOfPass * Operand::kChunks == kThreads);
  static_assert((kRowsOfPass & (kRowsOfPass - 1)) == 0);

  __device__ static int Column() { return threadIdx.x % Operand::kChunks; }
  __device__ static int Row() { return threadIdx.x / Operand::kChunks; }
  // Offset of a pass's chunk from the operand's start in a stage. A pass of fewer rows than the
  // swizzle's period changes the swizzle in bits of the row number that are 0 in the thread's own
  // row.
  __device__ static uint32_t Offset() { return Operand::Offset(Row(), Column()); }
  __device__ static constexpr uint32_t OfPass(uint32_t first, int pass) {
    return (first + pass * kRowsOfPass * Operand::kRowBytes) ^
           (Operand::Swizzle(pass * kRowsOfPass) * 16);
  }
};

// Chunks loaded by 16-bit loads; they stay in registers from IssuePart to Finish.
template <class Operand, int kThreads, bool kEnabled>
struct HeldChunks {
  static constexpr int kPasses = ChunkOwner<Operand, kThreads>::kPasses;
  uint16_t value[kPasses][8];
  __device__ __forceinline__ void Store(uint32_t shared) const {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      uint32_t word[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) word[w] = value[i][2 * w] | uint32_t{value[i][2 * w + 1]} << 16;
      StoreChunk(ChunkOwner<Operand, kThreads>::OfPass(shared, i), word);
    }
  }
};
template <class Operand, int kThreads>
struct HeldChunks<Operand, kThreads, false> {};

// Issues one copy of kCopyBytes to part `part` of a chunk.
template <int kCopyBytes, class Held>
__device__ __forceinline__ void CopyPart(Held& held, int pass, int part, uint32_t chunk,
                                         const void* source, bool valid) {
  if constexpr (kCopyBytes == 2) {
    held.value[pass][part] =
        valid ? __ldg(static_cast<const unsigned short*>(source)) : uint16_t{0};
  } else {
    CopyAsync<kCopyBytes>(chunk + part * kCopyBytes, source, valid);
  }
}

// A copy width known only at run time.
inline constexpr int kAnyCopy = 0;

// Calls body with the copy width as a compile-time constant.
template <typename T, int kCopy, typename Body>
__device__ __forceinline__ void WithCopyBytes(int32_t bytes, Body body) {
  if constexpr (kCopy != kAnyCopy) {
    body(std::integral_constant<int, kCopy>());
  } else if (bytes == 16) {
    body(std::integral_constant<int, 16>());
  } else if (bytes == 8) {
    body(std::integral_constant<int, 8>());
  } else if (sizeof(T) == 4 || bytes == 4) {
    body(std::integral_constant<int, 4>());
  } else {
    body(std::integral_constant<int, sizeof(T) == 4 ? 4 : 2>());
  }
}

}  // namespace jaxconv::igemm_wmma

#endif  // JAXCONV_CUDA_IGEMM_WMMA_CHUNK_COPY_CUH_
