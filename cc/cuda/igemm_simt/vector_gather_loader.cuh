// Global memory -> registers -> shared memory, for fprop and dgrad with channel counts that are
// multiples of 4.
//
// The reduction runs tap by tap. Within a tap a load is a pointer and an increment. When the tap
// changes, rows whose pixel lies in the padding get a pointer to zeros.
#ifndef JAXCONV_CUDA_IGEMM_SIMT_VECTOR_GATHER_LOADER_CUH_
#define JAXCONV_CUDA_IGEMM_SIMT_VECTOR_GATHER_LOADER_CUH_

#include <cstdint>

#include "core/implicit_gemm.h"
#include "cuda/common/element.cuh"
#include "cuda/igemm_simt/gather_tile.cuh"
#include "cuda/igemm_simt/params.h"
#include "cuda/igemm_simt/simt_tile.cuh"

namespace jaxconv::igemm_simt {

// kTransposeB: the filter is contiguous along the reduction (dgrad), not along gemm_n.
template <typename T, class Tile, bool kTransposeB>
class VectorGatherLoader {
 public:
  __device__ __forceinline__ VectorGatherLoader(const Params& params, const GatherTile<Tile>& tile,
                                                const SimtStage<Tile>& stage)
      : params_(params), tile_(tile) {
    const int k = threadIdx.x % 2 * 4;
    a_store_ = SharedAddress(&stage.a[k][threadIdx.x / 2]);
    b_store_ =
        SharedAddress(kTransposeB ? &stage.b[k][threadIdx.x / 2]
                                  : &stage.b[threadIdx.x / kQuadsOfB][threadIdx.x % kQuadsOfB * 4]);
  }

  __device__ __forceinline__ void Fetch() {
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) a_pack_[i].Load(a_[i]);
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) b_pack_[i].Load(b_[i]);
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) a_[i] = AddBytes(a_[i], a_step_[i]);
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) b_[i] = AddBytes(b_[i], params_.b_step_bytes);
  }

  // A run is the full stages of a tap, or its tail of 4 channels; the last run is the one
  // additional Fetch.
  __device__ __forceinline__ int FirstRun() {
    const int run = NextTap();
    return position_ < kEnd ? run : 0;
  }
  __device__ __forceinline__ int NextRun() {
    if (position_ >= kEnd) return 0;
    const bool in_tail = position_ % 2 == 1;
    if (!in_tail && params_.gemm.reduce_channels % kTileK != 0) return EnterTail();
    return NextTap();
  }

  __device__ __forceinline__ void Commit() const {
    float quad[4];
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      a_pack_[i].Unpack(quad);
      StoreTransposed(a_store_ + i * (Tile::kThreads / 2) * 4, Tile::kStrideA * 4, quad);
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      b_pack_[i].Unpack(quad);
      if constexpr (kTransposeB) {
        StoreTransposed(b_store_ + i * (Tile::kThreads / 2) * 4, Tile::kStrideB * 4, quad);
      } else {
        StoreShared(b_store_ + i * kRowsOfB * Tile::kStrideB * 4, quad);
      }
    }
  }

  __device__ __forceinline__ void FlipStage(int32_t bytes) {
    a_store_ += bytes;
    b_store_ += bytes;
  }

 private:
  static constexpr int32_t kEnd = 1 << 30;
  static constexpr int kPassesA = Tile::kTileM * 2 / Tile::kThreads;
  static constexpr int kPassesB = Tile::kTileN * 2 / Tile::kThreads;
  static constexpr int kQuadsOfB = Tile::kTileN / 4;
  static constexpr int kRowsOfB = Tile::kThreads / kQuadsOfB;
  static_assert(kPassesA >= 1 && kPassesB >= 1);

  // An unsigned 32-bit increment costs one register and two additions; a signed or 64-bit one costs
  // more.
  __device__ static const T* AddBytes(const T* pointer, uint32_t bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(pointer) + bytes);
  }

  // Stores four contiguous elements to four rows of the stage.
  __device__ static void StoreTransposed(uint32_t address, int row_bytes, const float (&quad)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float value[1] = {quad[e]};
      StoreShared(address + e * row_bytes, value);
    }
  }

  // The last stage of a tap holds only 4 channels: the other half multiplies zeros by zeros.
  __device__ __forceinline__ int EnterTail() {
    ++position_;
    const bool upper = threadIdx.x % 2 == 1;
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      if (upper) a_[i] = Zeros<T>();
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      if (kTransposeB ? upper : threadIdx.x / kQuadsOfB + i * kRowsOfB >= 4) b_[i] = Zeros<T>();
    }
    return 1;
  }

  __device__ __forceinline__ int NextTap() {
    const ImplicitGemm& gemm = params_.gemm;
    const int32_t taps = ImplicitGemm::TapCount(tile_.phase);
    int32_t tap = position_ / 2 + 1;
    if (taps <= 32) {
      const uint32_t rest = tap < 32 ? tile_.tap_mask >> tap : 0;
      tap = rest != 0 ? tap + __ffs(rest) - 1 : taps;
    }
    if (tap >= taps) {
      position_ = kEnd;
#pragma unroll
      for (int i = 0; i < kPassesA; ++i) a_[i] = Zeros<T>();
#pragma unroll
      for (int i = 0; i < kPassesB; ++i) b_[i] = Zeros<T>();
      return 1;
    }
    position_ = 2 * tap;
    int32_t t[3], filter_tap[3];
    gemm.DecodeTap(tile_.phase, tap, t);
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      filter_tap[a] = tile_.phase[a].first_tap + t[a] * gemm.axis[a].tap_period;
      t[a] *= gemm.axis[a].src_per_t;
    }
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      const int4 row = tile_.row[threadIdx.x / 2 + i * (Tile::kThreads / 2)];
      const int32_t src0 = row.x + t[0], src1 = row.y + t[1], src2 = row.z + t[2];
      const bool valid = gemm.InSource(src0, src1, src2);
      // A tensor has less than 2^31 pixels. Outside the source the sum may wrap; it is then not
      // used.
      const uint32_t pixel = row.w +
                             (static_cast<uint32_t>(src0) * gemm.axis[1].src_extent + src1) *
                                 static_cast<uint32_t>(gemm.axis[2].src_extent) +
                             src2;
      a_step_[i] = valid ? kTileK * sizeof(T) : 0;
      a_[i] = valid ? static_cast<const T*>(tile_.a) +
                          static_cast<uint64_t>(pixel) * static_cast<uint32_t>(gemm.src_channels) +
                          threadIdx.x % 2 * 4
                    : Zeros<T>();
    }
    const T* filter = static_cast<const T*>(tile_.b) +
                      gemm.TapIndex(filter_tap[0], filter_tap[1], filter_tap[2]) * gemm.b_tap;
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      // Columns past the last read the last quad (or column) instead; their sums are not stored.
      const int column = min(
          tile_.n_first + static_cast<int>(kTransposeB ? threadIdx.x / 2 + i * (Tile::kThreads / 2)
                                                       : threadIdx.x % kQuadsOfB * 4),
          gemm.gemm_n - (kTransposeB ? 1 : 4));
      const int k = kTransposeB ? threadIdx.x % 2 * 4 : threadIdx.x / kQuadsOfB + i * kRowsOfB;
      b_[i] = filter + k * gemm.b_reduce + column * gemm.b_column;
    }
    const int run = gemm.reduce_channels / kTileK;
    return run > 0 ? run : EnterTail();
  }

  const Params& params_;
  const GatherTile<Tile>& tile_;
  const T* a_[kPassesA];
  const T* b_[kPassesB];
  uint32_t a_step_[kPassesA];   // bytes
  uint32_t a_store_, b_store_;  // shared-memory addresses of the stage that Commit fills
  Pack<T, 4> a_pack_[kPassesA];
  Pack<T, 4> b_pack_[kPassesB];
  int32_t position_ = -2;  // 2 * tap, and 1 more in its tail; kEnd after the last
};

}  // namespace jaxconv::igemm_simt

#endif  // JAXCONV_CUDA_IGEMM_SIMT_VECTOR_GATHER_LOADER_CUH_
