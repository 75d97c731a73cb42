// Stores the sums of direct.cuh and direct_tma_sm90.cuh.
#ifndef JAXCONV_CUDA_DEPTHWISE_STORE_BLOCK_CUH_
#define JAXCONV_CUDA_DEPTHWISE_STORE_BLOCK_CUH_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/pick_sums.cuh"
#include "cuda/depthwise/params.h"
#include "cuda/ptx/min_max.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::depthwise {

template <class Tag>
__device__ __forceinline__ void ClearSums(float (&sums)[Tag::kRows][Tag::kStrip][Tag::kVec]) {
#pragma unroll
  for (int i = 0; i < Tag::kRows * Tag::kStrip * Tag::kVec; ++i) {
    sums[i / (Tag::kStrip * Tag::kVec)][i / Tag::kVec % Tag::kStrip][i % Tag::kVec] = 0;
  }
}

// Scale and bias of a lane's channels.
template <int kVec>
__device__ __forceinline__ ChannelTerms<kVec> LaneTerms(const FusedEpilogue& epilogue,
                                                        int32_t channel) {
  ChannelTerms<kVec> terms;
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    const ChannelTerms<1> of = epilogue.Terms<1>(channel + v);
    terms.scale[v] = of.scale[0], terms.bias[v] = of.bias[0];
  }
  return terms;
}

// An epilogue without residual, second result or costly activation, for a lane's channels: three
// instructions a sum.
template <int kVec>
struct LaneClamp {
  ChannelTerms<kVec> terms;
  float low, high;
  static __device__ __forceinline__ bool Takes(const FusedEpilogue& epilogue) {
    return epilogue.params.residual == nullptr && epilogue.params.pre == nullptr &&
           epilogue.params.activation <= Activation::kRelu6;
  }
  __device__ __forceinline__ LaneClamp(const FusedEpilogue& epilogue,
                                       const ChannelTerms<kVec>& of_channels)
      : terms(of_channels),
        low(epilogue.params.activation == Activation::kNone ? -INFINITY : 0.0f),
        high(epilogue.params.activation == Activation::kRelu6 ? 6.0f : INFINITY) {}
  __device__ __forceinline__ float operator()(float sum, int v) const {
    return MinNan(MaxNan(fmaf(sum, terms.scale[v], terms.bias[v]), low), high);
  }
};

// Stores finish(sum, v), for the lane's channel v, of a warp's block whose first output is `first`.
// Both channels of a lane exist or neither. An output takes a rounding, an address computation, a
// store and a comparison.
template <typename T, class Tag, typename Finish>
__device__ __forceinline__ void StoreInside(const Params& params, const TilePlace& first,
                                            int32_t channel,
                                            const float (&sums)[Tag::kRows][Tag::kStrip][Tag::kVec],
                                            Finish finish) {
  constexpr int kVec = Tag::kVec;
  const int32_t height = params.axis[1].out, width = params.axis[2].out;
  const bool exists = first.exists && channel < params.channels;
  // Columns before `begin` and from `end` on are not stored: a tile of a spread instance may begin
  // before the first output.
  const int32_t begin = Tag::kSpread == 1 ? 0 : -first.column;
  const int32_t end = exists ? width - first.column : 0;
  const int64_t pixel =
      ((int64_t{first.image} * params.axis[0].out + first.depth) * height + first.row) * width +
      first.column;
  // In bytes, with the pitch in a register: in elements the compiler needs five instructions an
  // output.
  const int64_t pitch = int64_t{ComputedHere(params.channels)} * int64_t{sizeof(T)};
  auto* line =
      static_cast<unsigned char*>(params.out) + pixel * pitch + channel * int64_t{sizeof(T)};
#pragma unroll
  for (int p = 0; p < Tag::kRows; ++p) {
    const int32_t row = first.row + p;
    if (row < height && (Tag::kSpread == 1 || row >= 0)) {
      unsigned char* at = line;
#pragma unroll
      for (int q = 0; q < Tag::kStrip; ++q) {
        float values[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v) values[v] = finish(sums[p][q][v], v);
        if (q < end && (Tag::kSpread == 1 || q >= begin)) {
          Neighbours<T, kVec>::Rounded(values).Store(reinterpret_cast<T*>(at));
        }
        at += pitch;
      }
    }
    line += width * pitch;
  }
}

// Stores the lane's channels of a warp's block, whose first output is `first`, and clears the sums.
// kPairs: both channels of a lane exist or neither, and are stored together.
template <typename Out, bool kPairs, class Tag, class Epilogue>
__device__ __forceinline__ void StoreBlock(const Params& params, const Epilogue& epilogue,
                                           const TilePlace& first, int32_t channel,
                                           float (&sums)[Tag::kRows][Tag::kStrip][Tag::kVec]) {
  constexpr int kVec = Tag::kVec;
  const int32_t height = params.axis[1].out, width = params.axis[2].out;
  const bool exists = first.exists && channel < params.channels;
  // A tile of a spread instance may begin before the first output.
  auto inside = [](int32_t at, int32_t extent) {
    return Tag::kSpread == 1 ? at < extent : Inside(at, extent);
  };
  const int64_t pixel =
      ((int64_t{first.image} * params.axis[0].out + first.depth) * height + first.row) * width +
      first.column;
  Out* line = static_cast<Out*>(params.out) + pixel * params.channels + channel;
#pragma unroll
  for (int p = 0; p < Tag::kRows; ++p) {
    const bool row_inside = exists && inside(first.row + p, height);
    Out* at = line;
#pragma unroll
    for (int q = 0; q < Tag::kStrip; ++q) {
      Out elements[kVec];
      const int64_t row = pixel + int64_t{p} * width + q;
      const bool stored = row_inside && inside(first.column + q, width);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const OutputPlace place{row * params.channels + channel + v, static_cast<int32_t>(row),
                                channel + v, stored && channel + v < params.channels};
        elements[v] = FromFloat<Out>(epilogue.template operator()<Out>(sums[p][q][v], place));
        sums[p][q][v] = 0;
      }
      if (stored) {
        if constexpr (kPairs) {
          using Pair = std::conditional_t<sizeof(Out) == 4, uint2, uint32_t>;
          Pair packed;
          memcpy(&packed, elements, sizeof(packed));
          *reinterpret_cast<Pair*>(at) = packed;
        } else {
#pragma unroll
          for (int v = 0; v < kVec; ++v) {
            if (v == 0 || channel + v < params.channels) at[v] = elements[v];
          }
        }
      }
      at += params.channels;
    }
    line += int64_t{width} * params.channels;
  }
}

// The same with the fused epilogue, row by row: the loop over the rows is not unrolled, so that the
// code has one copy of the epilogue, and a uniform branch picks the sums. Both channels of a lane
// exist or neither.
template <typename T, class Tag>
__device__ __forceinline__ void StoreFusedBlock(const Params& params, const FusedEpilogue& epilogue,
                                                const TilePlace& first, int32_t channel,
                                                float (&sums)[Tag::kRows][Tag::kStrip][Tag::kVec]) {
  constexpr int kVec = Tag::kVec, kStrip = Tag::kStrip;
  // Outputs in flight, as the registers left by the sums allow.
  constexpr int kPart = kVec == 2 ? 3 : Tag::kRows <= 4 ? kStrip : 2;
  static_assert(Tag::kSpread == 1);
  const int32_t height = params.axis[1].out, width = params.axis[2].out;
  const bool exists = first.exists && channel < params.channels;
  const int64_t pixel =
      ((int64_t{first.image} * params.axis[0].out + first.depth) * height + first.row) * width +
      first.column;
  const ChannelTerms<kVec> terms = LaneTerms<kVec>(epilogue, exists ? channel : 0);
#pragma unroll 1
  for (int p = 0; p < Tag::kRows; ++p) {
    const int columns = exists && first.row + p < height ? width - first.column : 0;
    const int64_t line = (pixel + int64_t{p} * width) * params.channels + channel;
#pragma unroll
    for (int q0 = 0; q0 < kStrip; q0 += kPart) {
      const int64_t at = line + q0 * params.channels;
      Neighbours<T, kVec> residual[kPart];
      if (epilogue.params.residual != nullptr) {
#pragma unroll
        for (int q = 0; q < kPart && q0 + q < kStrip; ++q) {
          if (q0 + q < columns) residual[q] = epilogue.Residual<T, kVec>(at + q * params.channels);
        }
      }
      float values[kPart * kVec];
      PickSums<0, Tag::kRows>(
          p,
          [&](int k, int i) {
            return q0 + i / kVec < kStrip ? sums[k][(q0 + i / kVec) % kStrip][i % kVec] : 0;
          },
          values);
#pragma unroll
      for (int q = 0; q < kPart && q0 + q < kStrip; ++q) {
        float t[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v) t[v] = values[q * kVec + v];
        epilogue.Scale(terms, t);
        if (q0 + q < columns) epilogue.Add<T>(t, residual[q], at + q * params.channels);
#pragma unroll
        for (int v = 0; v < kVec; ++v) values[q * kVec + v] = t[v];
      }
      Activate<T>(epilogue.params.activation, epilogue.params.negative_slope, values);
#pragma unroll
      for (int q = 0; q < kPart && q0 + q < kStrip; ++q) {
        float y[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v) y[v] = values[q * kVec + v];
        if (q0 + q < columns) {
          Neighbours<T, kVec>::Rounded(y).Store(static_cast<T*>(params.out) + at +
                                                q * params.channels);
        }
      }
    }
  }
  ClearSums<Tag>(sums);
}

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_STORE_BLOCK_CUH_
