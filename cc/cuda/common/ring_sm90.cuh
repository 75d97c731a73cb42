// The ring of stages in shared memory between a producer and consumer warpgroups, and the setup of
// kernels with a ring.
//
// Full(s): the producer announces a stage's bytes, TMA delivers them, consumers wait. Empty(s):
// each consumer warpgroup that reads the stage arrives when its wgmma has retired; the producer
// waits. Filter slots and stationary k-blocks of the filter have their own barriers.
#ifndef JAXCONV_CUDA_COMMON_RING_SM90_CUH_
#define JAXCONV_CUDA_COMMON_RING_SM90_CUH_

#include <cstdint>

#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/ptx/mbarrier_sm90.cuh"

namespace jaxconv {

// Whether a kernel lets the next one in the stream start while it still computes: the next kernel
// then sets up its barriers and tensor maps, and prefetches its first loads to L2, before this
// kernel has ended (common/launch.cuh). One switch for all these kernels.
inline constexpr bool kLetsNextGridStart = true;

// Called by every thread that accesses global memory, before its first access.
__device__ __forceinline__ void WaitForInputs() {
  WaitForPrecedingGrids();
  if constexpr (kLetsNextGridStart) LetNextGridStart();
}

// The mbarriers' addresses in shared memory.
template <class Tile>
struct Barriers {
  static constexpr int kCount = 2 * Tile::kStages + 2 * Tile::kFilterSlots + Tile::kStationary;
  uint32_t first;
  __device__ __forceinline__ uint32_t Full(uint32_t stage) const { return first + stage * 8; }
  __device__ __forceinline__ uint32_t Empty(uint32_t stage) const {
    return first + (Tile::kStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t FullFilter(uint32_t slot) const {
    return first + (2 * Tile::kStages + slot) * 8;
  }
  __device__ __forceinline__ uint32_t EmptyFilter(uint32_t slot) const {
    return first + (2 * Tile::kStages + Tile::kFilterSlots + slot) * 8;
  }
  __device__ __forceinline__ uint32_t Stationary(uint32_t k_block) const {
    return first + (2 * Tile::kStages + 2 * Tile::kFilterSlots + k_block) * 8;
  }

  // One thread; `readers`: arrivals that free a slot.
  __device__ __forceinline__ void Init(int readers) const {
    for (int s = 0; s < Tile::kStages; ++s) {
      BarrierInit(Full(s), 1);
      BarrierInit(Empty(s), readers);
    }
    for (int s = 0; s < Tile::kFilterSlots; ++s) {
      BarrierInit(FullFilter(s), 1);
      BarrierInit(EmptyFilter(s), readers);
    }
    for (int s = 0; s < Tile::kStationary; ++s) BarrierInit(Stationary(s), 1);
    BarrierInitFence();
  }
};

// Frees slots for a consumer warpgroup, by one of its threads.
struct Release {
  const bool signals = threadIdx.x % 128 == 0;
  __device__ __forceinline__ void operator()(uint32_t barrier) const {
    if (signals) BarrierArrive(barrier);
  }
};

// A slot of a ring and the parity of its round.
struct RingTurn {
  uint32_t slot = 0, parity = 0;
  __device__ __forceinline__ void Next(uint32_t size) {
    if (++slot == size) slot = 0, parity ^= 1;
  }
};
// Advances in a ring of kSize slots.
template <int kSize>
struct RingPlace : RingTurn {
  __device__ __forceinline__ void Next() { RingTurn::Next(kSize); }
  __device__ __forceinline__ void Skip(uint32_t count) {
    const uint32_t at = slot + count;
    parity ^= at / kSize & 1;
    slot = at % kSize;
  }
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_RING_SM90_CUH_
