// Applies the fused epilogue to sums in shared memory and stores 16 bytes of output a lane.
//
// All vectors of a lane have the same channels, so that scale and bias are loaded once for them.
// All residuals are loaded before the sums are stored to shared memory, so a warp waits for them
// once. A slow activation (activation.cuh) takes a second pass: t replaces the sum in shared
// memory, and a loop that is not unrolled finishes one vector at a time.
#ifndef JAXCONV_CUDA_COMMON_FINISH_STAGED_CUH_
#define JAXCONV_CUDA_COMMON_FINISH_STAGED_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv {

// Finishes a lane's kVectors vectors. With kAhead, scale and bias are loaded once and kept in
// registers, and the residuals are loaded in advance. Without kAhead, if there are too few
// registers, they are loaded for each vector, kUnroll vectors in flight, and a vector may have 8
// bytes. A functor offset_of(i) returns the output offset of vector i, or a negative number if
// nothing is stored; all lanes of the warp call it.
template <typename Out, int kVectors, bool kAhead = true, int kUnroll = kVectors, int kBytes = 16>
struct StagedVectors {
  static constexpr int kWidth = kBytes / sizeof(Out);
  ChannelTerms<kAhead ? kWidth : 4> terms;
  int32_t first_channel;
  Neighbours<Out, kWidth> residual[kAhead ? kVectors : 1];
  bool slow;

  // Loads scale, bias and residuals from global memory. `inside`: whether the channels exist.
  template <typename OffsetOf>
  __device__ __forceinline__ StagedVectors(const FusedEpilogue& epilogue, int32_t channel,
                                           bool inside, OffsetOf offset_of)
      : first_channel(inside ? channel : 0), slow(!IsQuick(epilogue.params.activation)) {
    if constexpr (kAhead) {
      terms = epilogue.Terms<kWidth>(first_channel);
      if (epilogue.params.residual == nullptr) return;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int64_t offset = offset_of(i);
        if (offset >= 0) residual[i] = epilogue.Residual<Out, kWidth>(offset);
      }
    }
  }

  // quad(i, q): the shared address of vector i's sums 4 q to 4 q + 3.
  template <typename OffsetOf, typename QuadOf>
  __device__ __forceinline__ void Finish(const FusedEpilogue& epilogue, Out* out,
                                         OffsetOf offset_of, QuadOf quad) const {
#pragma unroll(kUnroll)
    for (int i = 0; i < kVectors; ++i) {
      const int64_t offset = offset_of(i);
      float values[kWidth];
#pragma unroll
      for (int q = 0; q < kWidth / 4; ++q) LoadShared<0>(quad(i, q), &values[4 * q]);
      if constexpr (kAhead) {
        epilogue.Scale(terms, values);
      } else {
#pragma unroll
        for (int e = 0; e < kWidth; e += 4) {
          epilogue.Scale(epilogue.Terms<4>(first_channel + e), values + e);
        }
      }
      if (offset >= 0) {
        if constexpr (kAhead) {
          epilogue.Add<Out>(values, residual[i], offset);
        } else {
          Neighbours<Out, kWidth> late;
          if (epilogue.params.residual != nullptr) {
            late = epilogue.Residual<Out, kWidth>(offset);
          }
          epilogue.Add<Out>(values, late, offset);
        }
      }
      if (slow) {
#pragma unroll
        for (int q = 0; q < kWidth / 4; ++q) {
          const float t[4] = {values[4 * q], values[4 * q + 1], values[4 * q + 2],
                              values[4 * q + 3]};
          StoreShared(quad(i, q), t);
        }
      } else {
        ActivateQuick(epilogue.params.activation, epilogue.params.negative_slope, values);
        if (offset >= 0) Neighbours<Out, kWidth>::Rounded(values).Store(out + offset);
      }
    }
    if (!slow) return;
#pragma unroll 1
    for (int i = 0; i < kVectors; ++i) {
      float values[kWidth];
#pragma unroll
      for (int q = 0; q < kWidth / 4; ++q) LoadShared<0>(quad(i, q), &values[4 * q]);
      const int64_t offset = offset_of(i);
      ActivateSlow<Out>(epilogue.params.activation, values);
      if (offset >= 0) Neighbours<Out, kWidth>::Rounded(values).Store(out + offset);
    }
  }
};

// Sixteen rows of kColumns (32 or 64) accumulators of a warp in shared memory, 2 or 4 KB, without
// bank conflicts for the pairs of the fragments and for vectors of 16 bytes of output.
template <typename Out, int kColumns, int kBytes = 16>
struct StagedRows {
  static constexpr int kWidth = kBytes / sizeof(Out), kLanesOfRow = kColumns / kWidth;
  static constexpr int kVectors = 16 * kLanesOfRow / 32;  // of a lane
  uint32_t staging;

  __device__ __forceinline__ uint32_t Quad(int row, int chunk) const {
    const int swizzled =
        kColumns == 64 ? chunk ^ chunk / 8 ^ row % 4 * 2 : chunk ^ (row % 4 * 2 + row % 2);
    return staging + row * (kColumns * 4) + swizzled * 16;
  }
  // `fragments`: for each 8 columns, columns 2 t and 2 t + 1 of rows g and g + 8, with lane = 4 g +
  // t.
  __device__ __forceinline__ void Store(int lane, const float* fragments) const {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const uint32_t at = Quad(lane / 4, 2 * j + lane % 4 / 2) + lane % 2 * 8;
      StorePair(at, fragments[4 * j], fragments[4 * j + 1]);
      StorePair(at + 8 * kColumns * 4, fragments[4 * j + 2], fragments[4 * j + 3]);
    }
  }
  // Row, Column: the row of a lane's vector i and its first column.
  static __device__ __forceinline__ int Row(int lane, int i) {
    return i * (32 / kLanesOfRow) + lane / kLanesOfRow;
  }
  static __device__ __forceinline__ int Column(int lane) { return lane % kLanesOfRow * kWidth; }
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_FINISH_STAGED_CUH_
