// The kernel of the forms with a ring of stages, and what their tags share (sm_90a).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_RING_FORM_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_RING_FORM_SM90_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/igemm_wgmma/launch_sm90.cuh"
#include "cuda/igemm_wgmma/mainloop_sm90.cuh"
#include "cuda/igemm_wgmma/statistics_sm90.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// Warpgroup 0 loads, the others multiply. Tag: Tile; Produce, called by one thread; Consume<Tag,
// kCounts>, by all threads of a consumer warpgroup with its number from 1 on (kCounts: statistics of
// the results are requested).
template <class Tag>
__global__ void __launch_bounds__(Tag::kThreads, 1)
    RingKernel(const __grid_constant__ Params params, const __grid_constant__ Maps maps) {
  using Tile = typename Tag::Tile;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[Barriers<Tile>::kCount];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const Barriers<Tile> barriers{SharedAddress(barrier_words)};
  if (threadIdx.x == 0) {
    barriers.Init(Tile::kPingpong ? 1 : Tile::kWarpgroups);
    PrefetchTensorMap(&maps.a[0]);
    PrefetchTensorMap(&maps.b);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    LowerRegisters<Tile::kProducerRegisters>();
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && ElectOne()) {
      Tag::Produce(params, maps, ring, barriers);
    }
  } else {
    RaiseRegisters<Tile::kConsumerRegisters>();
    WaitForInputs();
    if constexpr (Tile::kPingpong) {
      CountingOrNot<Tag::kOp, typename Tag::T, Tile, typename Tag::Epilogue>(
          params, [&](auto counts) {
            Tag::template Consume<Tag, counts.value>(params, ring, barriers, warpgroup);
          });
    } else {
      Tag::template Consume<Tag, false>(params, ring, barriers, warpgroup);
    }
  }
}

// A base of the tags. kWholeF32: TMA does not round float32 to TF32.
template <Op kOp_, DType kType_, class Tile_, bool kWholeF32 = false>
struct RingForm : Tile_ {
  static constexpr Op kOp = kOp_;
  static constexpr DType kType = kType_;
  using T = typename ElementOf<kType>::Type;
  using Tile = Tile_;
  using Epilogue = PlainEpilogue;

  static __device__ __forceinline__ void Produce(const Params& params, const Maps& maps,
                                                 uint32_t ring, const Barriers<Tile>& barriers) {
    ProduceStages<kOp, T>(params, maps, ring, barriers);
  }
  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchForm<RingKernel<Tag>, Tag, kWholeF32>(plan, operands, stream);
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_RING_FORM_SM90_CUH_
