// Shared by WgmmaTile and SwapAbTile: the loops over one copy of a fused epilogue (sm_90a).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_FUSED_TURNS_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_FUSED_TURNS_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue_params.h"

namespace jaxconv::igemm_wgmma {

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

// Adds words of two elements, in ldmatrix order, to the sums of eight elements.
template <typename T>
__device__ __forceinline__ void AddFragments(const uint32_t (&added)[4], float* sums) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    float pair[2] = {sums[q * 2], sums[q * 2 + 1]};
    Neighbours<T, 2>{added[q]}.AddTo(pair);
    sums[q * 2] = pair[0], sums[q * 2 + 1] = pair[1];
  }
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_FUSED_TURNS_SM90_CUH_
