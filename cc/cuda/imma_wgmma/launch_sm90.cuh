// The kernel of every form, and its launch (sm_90a).
#ifndef JAXCONV_CUDA_IMMA_WGMMA_LAUNCH_SM90_CUH_
#define JAXCONV_CUDA_IMMA_WGMMA_LAUNCH_SM90_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/imma_wgmma/params.h"
#include "cuda/imma_wgmma/tensor_maps.h"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"

namespace jaxconv::imma_wgmma {

// One producer warpgroup and two consumer warpgroups. Tag: Tile, kType, Produce, called by one
// thread of each warp of the producer, and Consume<T>, by all threads of the consumers.
template <class Tag>
__global__ void __launch_bounds__(Tag::kThreads, 1)
    Int8Kernel(const __grid_constant__ Params params, const __grid_constant__ Maps maps) {
  using Tile = typename Tag::Tile;
  using T = std::conditional_t<Tag::kType == DType::kS8, int8_t, uint8_t>;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ __align__(8) uint64_t barrier_words[Barriers<Tile>::kCount];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const Barriers<Tile> barriers{SharedAddress(barrier_words)};
  if (threadIdx.x == 0) {
    barriers.Init(Tile::kPingpong ? 1 : 2);
    PrefetchTensorMap(&maps.x);
    PrefetchTensorMap(&maps.filter);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    LowerRegisters<Tile::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (ElectOne()) Tag::Produce(params, maps, ring, barriers, warp);
  } else {
    RaiseRegisters<Tile::kConsumerRegisters>();
    WaitForInputs();
    Tag::template Consume<T>(params, ring, barriers, warpgroup - 1);
  }
}

// A base of the tags.
template <DType kType_>
struct LaunchOf {
  static constexpr DType kType = kType_;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    using Tile = typename Tag::Tile;
    const auto& launch = plan.As<LaunchParams>();
    Params params = launch.kernel;
    BindRequantize(operands, &params.requantize);
    Maps maps;
    JAXCONV_RETURN_IF_ERROR(EncodeMaps(launch, operands, Tile::kPixels, Tile::kTileN, &maps));
    LaunchConfig config;
    config.grid = launch.ctas;
    config.threads = Tile::kThreads;
    config.shared_bytes = Tile::kSharedBytes;
    config.overlaps = true;
    return jaxconv::Launch<Int8Kernel<Tag>>(plan.kernel->name, config, stream, params, maps);
  }
};

}  // namespace jaxconv::imma_wgmma

#endif  // JAXCONV_CUDA_IMMA_WGMMA_LAUNCH_SM90_CUH_
