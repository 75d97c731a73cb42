// What a store does to a tile's sums, the first of its three parts (sm_90a). staging_sm90.cuh has the
// second, how results pass through shared memory; destination_sm90.cuh the third, where they go.
//
// A finish makes 16-bit results of a lane's part of a fragment, 16 by 16 sums. The part is eight
// sums; the results are four words of two neighbours, in the order of stmatrix. A finish is called
// with the fragment's first column (swap-AB: pixel), the sums and the words. If kAdds, the words
// hold the residual, and the results replace it.
//
//     Round              no epilogue, or partial sums
//     Clamp              scale, bias, perhaps a residual, an activation that is a clamp. The code is
//                        straight: a jump waits longer for the instruction cache than the store
//                        waits for memory.
//     ActivateFragments  every other fused epilogue, in a loop over one copy of the code, because
//                        ten activations of 128 sums would be 13,000 instructions
//
// Float32 results without an epilogue are the sums. With one they pass through StagedVectors
// (common/finish_staged.cuh), because they are finished after the staging, not before. Statistics
// are formed of results that are already staged or stored (statistics_sm90.cuh).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_FINISH_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_FINISH_SM90_CUH_

#include <cstdint>

#include "cuda/common/activation.cuh"
#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_wgmma/tile_walk.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::igemm_wgmma {

// A lane's scale and bias for eight columns of a fragment: those of columns 2 t and 2 t + 1, t =
// lane % 4, in two words for two rows.
struct PairTerms {
  float pair[4];

  __device__ __forceinline__ float Scale(int, int e) const { return pair[e]; }
  __device__ __forceinline__ float Bias(int, int e) const { return pair[2 + e]; }
};

// Scale and bias of kColumns columns in shared memory: 16 bytes for each pair of columns, two
// factors and two summands. Each warp has its own copy, so that no warp waits for another.
template <int kColumns>
struct StagedTerms {
  uint32_t at;

  // Loads the terms of the output's columns from n on; beyond the last they are arbitrary.
  __device__ __forceinline__ void Load(const Params& params, const TilePlace& place,
                                       int32_t n) const {
    const FusedEpilogue epilogue(params.epilogue);
    const int32_t channel = place.group * params.gemm_n + n, columns = params.gemm_n - n;
#pragma unroll
    for (int first = 0; first < kColumns; first += 128) {
      const int column = first + Lane() * 4;
      if (column >= kColumns) continue;
      const ChannelTerms<4> terms = epilogue.Terms<4>(channel + (column < columns ? column : 0));
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        StoreShared(at + (column + e) * 8,
                    {terms.scale[e], terms.scale[e + 1], terms.bias[e], terms.bias[e + 1]});
      }
    }
  }
};

// A lane's view of staged terms.
struct LaneTerms {
  uint32_t staged, lane;

  __device__ __forceinline__ PairTerms Of(int column) const {
    PairTerms of;
    LoadShared<0>(staged + (column + lane % 4 * 2) * 8, of.pair);
    return of;
  }
};

// The terms of 64 columns, loaded before they are needed.
struct LoadedTerms {
  PairTerms of[8];

  __device__ __forceinline__ LoadedTerms(const LaneTerms& terms, int column) {
#pragma unroll
    for (int j = 0; j < 8; ++j) of[j] = terms.Of(column + j * 8);
  }
  __device__ __forceinline__ const PairTerms& Of(int column) const { return of[column / 8]; }
};

// A thread's scale and bias for a swap-AB tile: it has two channels, g and g + 8 of its warp's
// sixteen, in words of even and odd number. They are loaded before the tile is multiplied, or once
// if all tiles have the same channels.
template <class Epilogue>
struct SwapAbTerms {
  float scale[2], bias[2];

  __device__ __forceinline__ void Load(const Params& params, const TilePlace& place) {
    const FusedEpilogue epilogue(params.epilogue);
    const int channel = place.n_tile * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = channel + half * 8 < params.gemm_n;
      const ChannelTerms<1> terms =
          epilogue.Terms<1>(inside ? place.group * params.gemm_n + channel + half * 8 : 0);
      scale[half] = terms.scale[0];
      bias[half] = terms.bias[0];
    }
  }
  __device__ __forceinline__ const SwapAbTerms& Of(int) const { return *this; }
  __device__ __forceinline__ float Scale(int r, int) const { return scale[r]; }
  __device__ __forceinline__ float Bias(int r, int) const { return bias[r]; }
};
template <>
struct SwapAbTerms<PlainEpilogue> {
  __device__ __forceinline__ void Load(const Params&, const TilePlace&) {}
};

template <typename T>
struct Round {
  static constexpr bool kAdds = false;

  __device__ __forceinline__ void operator()(int, const float* sums, uint32_t (&words)[4]) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) words[q] = PackPair<T>(sums[q * 2], sums[q * 2 + 1]);
  }
};

template <typename T, class Terms, bool kAdds_>
struct Clamp {
  static constexpr bool kAdds = kAdds_;
  const Terms& terms;
  const PairBounds<T>& bounds;

  __device__ __forceinline__ void operator()(int at, const float* sums,
                                             uint32_t (&words)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& of = terms.Of(at + h * 8);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* const pair = sums + h * 4 + r * 2;
        float t[2] = {fmaf(pair[0], of.Scale(r, 0), of.Bias(r, 0)),
                      fmaf(pair[1], of.Scale(r, 1), of.Bias(r, 1))};
        if constexpr (kAdds) Neighbours<T, 2>{words[h * 2 + r]}.AddTo(t);
        words[h * 2 + r] = bounds.Clamp(PackPair<T>(t[0], t[1]));
      }
    }
  }
};

// The turns of a loop over the parts of a tile: one turn for each part, which activates; if the
// pre-activation is stored too, a turn before it, which does not.
struct FusedTurns {
  const EpilogueParams& with;
  const int32_t end;
  int32_t turn;

  __device__ __forceinline__ FusedTurns(const EpilogueParams& with, int32_t parts)
      : with(with), end(parts * 2), turn(with.pre == nullptr) {}
  __device__ __forceinline__ bool More() const { return turn < end; }
  __device__ __forceinline__ void Next() { turn += with.pre == nullptr ? 2 : 1; }
  __device__ __forceinline__ int32_t Part() const { return turn / 2; }
  __device__ __forceinline__ bool Activates() const { return turn % 2 != 0; }
};

// Finishes the sums `t` of kCount / 8 fragments, in place, and stages their results, from fragment
// `first` of `staged` on. `at`: the first fragment's place among the terms. `ready()` is called
// before the staged residual is read.
template <typename T, int kCount, class Terms, class Staging, typename Ready>
__device__ __forceinline__ void ActivateFragments(const EpilogueParams& with, bool activates,
                                                  const Terms& terms, int at, float (&t)[kCount],
                                                  const Staging& staged, int first, Ready ready) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const auto& of = terms.Of(at + j * 8);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      t[j * 4 + e] = fmaf(t[j * 4 + e], of.Scale(e / 2, e % 2), of.Bias(e / 2, e % 2));
    }
  }
  if (with.residual != nullptr) {
    ready();
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      uint32_t added[4];
      staged.Read(first + i, added);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        float (&pair)[2] = reinterpret_cast<float (&)[2]>(t[i * 8 + q * 2]);
        Neighbours<T, 2>{added[q]}.AddTo(pair);
      }
    }
  }
  if (activates) Activate<T>(with.activation, with.negative_slope, t);
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    uint32_t words[4];
    Round<T>()(0, t + i * 8, words);
    staged.Write(first + i, words);
  }
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_FINISH_SM90_CUH_
