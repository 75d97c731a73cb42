// How a tile's results pass through shared memory, the second part of a store (sm_90a).
//
// A staging has places for fragments, which Read and Write access by ldmatrix and stmatrix, and for
// vectors of 16 bytes, of which a lane has kVectors; neither has bank conflicts. Sync() separates
// accesses of one kind from accesses of the other.
//
//     RoundedRows  a warp's sixteen rows of 32 or 64 16-bit elements
//     WholeRows    a warp's eight rows of 256
//     PixelLines   a warpgroup's 32 pixels of 64 channels, transposed from swap-AB's fragments
//     FloatRows    a warp's sixteen rows of 32 or 64 float32 sums
//     FloatLines   a warpgroup's sixteen pixels of 64 channels as float32 sums
//
// Float32 results of pingpong tiles with float32 operands have no staging.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_STAGING_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_STAGING_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/finish_staged.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// 1 or 2 KB. Fragment i has columns 16 i to 16 i + 15.
template <int kColumns_>
struct RoundedRows {
  static constexpr int kColumns = kColumns_;
  static constexpr int kLanesOfRow = kColumns / 8, kVectors = kLanesOfRow / 2;
  uint32_t staging, lane;

  __device__ __forceinline__ uint32_t Chunk(uint32_t row, uint32_t chunk) const {
    return staging + row * (kColumns * 2) + (chunk ^ (kColumns == 64 ? row % 8 : row / 2 % 4)) * 16;
  }
  __device__ __forceinline__ void Read(int i, uint32_t (&words)[4]) const {
    LoadMatrices(Chunk(lane % 16, i * 2 + lane / 16), words);
  }
  __device__ __forceinline__ void Write(int i, const uint32_t (&words)[4]) const {
    StoreMatrices(Chunk(lane % 16, i * 2 + lane / 16), words[0], words[1], words[2], words[3]);
  }
  // The row and the first column of the lane's vector i.
  __device__ __forceinline__ uint32_t Row(int i) const {
    return i * (32 / kLanesOfRow) + lane / kLanesOfRow;
  }
  __device__ __forceinline__ int Column() const { return static_cast<int>(lane % kLanesOfRow * 8); }
  __device__ __forceinline__ uint32_t Vector(int i) const {
    return Chunk(Row(i), lane % kLanesOfRow);
  }
  __device__ __forceinline__ void WriteVector(int i, const uint4& vector) const {
    StoreChunk(Vector(i), {vector.x, vector.y, vector.z, vector.w});
  }
  __device__ __forceinline__ void Sync() const { __syncwarp(); }
};

// 4 KB. A warp stores one run of 512 bytes, up to 5 % faster than four runs of 128.
struct WholeRows {
  static constexpr int kVectors = 8;
  uint32_t staging, lane;
  int half;  // 0: rows 0 to 7 of the warp's sixteen, 1: rows 8 to 15

  __device__ __forceinline__ uint32_t Chunk(uint32_t row, uint32_t chunk) const {
    return staging + row * 512 + (chunk ^ row % 8) * 16;
  }
  // The half of a fragment 16 by 32.
  template <typename T>
  __device__ __forceinline__ void Write(int i, const float* sums) const {
    const float* d = sums + 2 * half;
    StoreMatrices(Chunk(lane % 8, i * 4 + lane / 8), PackPair<T>(d[0], d[1]),
                  PackPair<T>(d[4], d[5]), PackPair<T>(d[8], d[9]), PackPair<T>(d[12], d[13]));
  }
  __device__ __forceinline__ uint32_t Row(int i) const { return half * 8 + i; }
  __device__ __forceinline__ int Column() const { return static_cast<int>(lane * 8); }
  __device__ __forceinline__ uint32_t Vector(int i) const { return Chunk(i, lane); }
  __device__ __forceinline__ void Sync() const { __syncwarp(); }
};

// 2 or 4 KB.
template <int kColumns_>
struct FloatRows : StagedRows<float, kColumns_> {
  using Base = StagedRows<float, kColumns_>;
  static constexpr int kColumns = kColumns_;
  uint32_t lane;

  __device__ __forceinline__ FloatRows(uint32_t staging, uint32_t lane)
      : Base{staging}, lane(lane) {}
  __device__ __forceinline__ void Write(const float* sums) const { Base::Store(lane, sums); }
  __device__ __forceinline__ uint32_t Row(int i) const { return Base::Row(lane, i); }
  __device__ __forceinline__ int Column() const { return Base::Column(lane); }
  __device__ __forceinline__ uint32_t Vector(int i) const {
    return Base::Quad(Row(i), Column() / 4);
  }
  __device__ __forceinline__ void Sync() const { __syncwarp(); }
};

// Two buffers of 4 KB alternate, so that one barrier a buffer is enough; or more buffers. A buffer
// has two fragments and two vectors of a lane, sixteen pixels each. kBarrier: of the warpgroup.
template <int kBarrier>
struct PixelLines {
  static constexpr int kVectors = 2;
  uint32_t lane, matrices, vectors;

  __device__ __forceinline__ PixelLines(uint32_t staging, uint32_t lane, uint32_t warp)
      : lane(lane),
        matrices(staging + (lane / 16 * 8 + lane % 8) * 128 +
                 ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16) {
    const uint32_t line = warp * 4 + lane / 8;
    vectors = staging + line * 128 + ((lane % 8) ^ (line % 8)) * 16;
  }
  __device__ __forceinline__ PixelLines Buffer(uint32_t bytes) const {
    PixelLines buffer = *this;
    buffer.matrices += bytes;
    buffer.vectors += bytes;
    return buffer;
  }
  __device__ __forceinline__ void Read(int i, uint32_t (&words)[4]) const {
    LoadMatricesTransposed(matrices + i * 2048, words);
  }
  __device__ __forceinline__ void Write(int i, const uint32_t (&words)[4]) const {
    StoreMatricesTransposed(matrices + i * 2048, words[0], words[1], words[2], words[3]);
  }
  __device__ __forceinline__ int Column() const { return static_cast<int>(lane % 8 * 8); }
  __device__ __forceinline__ uint32_t Vector(int i) const { return vectors + i * 2048; }
  __device__ __forceinline__ void Sync() const { NamedBarrierSync(kBarrier, 128); }
};

// Two buffers of 4 KB.
template <int kBarrier>
struct FloatLines {
  static constexpr int kVectors = 2;
  uint32_t staging, lane, warp;

  __device__ __forceinline__ uint32_t Chunk(uint32_t pixel, uint32_t chunk) const {
    return staging + pixel * 256 + (chunk ^ (pixel / 2 % 4 * 2)) * 16;
  }
  __device__ __forceinline__ void Write(const float* sums) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const uint32_t channel = warp * 16 + e / 2 % 2 * 8 + lane / 4;
      const uint32_t pixel = e / 4 * 8 + lane % 4 * 2 + e % 2;
      const float value[1] = {sums[e]};
      StoreShared(Chunk(pixel, channel / 4) + channel % 4 * 4, value);
    }
  }
  __device__ __forceinline__ int Column() const { return static_cast<int>(lane % 16 * 4); }
  // Vector i: pixel 2 i + lane / 16 of the warp's four.
  __device__ __forceinline__ uint32_t Vector(int i) const {
    return Chunk(warp * 4 + i * 2 + lane / 16, lane % 16);
  }
  __device__ __forceinline__ void Sync() const { NamedBarrierSync(kBarrier, 128); }
};

// Finishes kCount fragments of sums and stages them. `at`: the first fragment's place among the
// finish's terms. kReadsAhead: reads the residual of all fragments first.
template <int kCount, bool kReadsAhead = false, class Staging, class Finish>
__device__ __forceinline__ void StageFragments(const Staging& staged, const Finish& finish, int at,
                                               const float* sums) {
  constexpr int kWords = kReadsAhead ? kCount : 1;
  uint32_t words[kWords][4];
#pragma unroll
  for (int i = 0; Finish::kAdds && kReadsAhead && i < kCount; ++i) staged.Read(i, words[i]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    uint32_t (&of)[4] = words[i % kWords];
    if constexpr (Finish::kAdds && !kReadsAhead) staged.Read(i, of);
    finish(at + i * 16, sums + i * 8, of);
    staged.Write(i, of);
  }
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_STAGING_SM90_CUH_
