// Shared by the kernels of rows: the rows of a CTA, and their ring in shared memory.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_ROWS_RING_SM90_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_ROWS_RING_SM90_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/few_channels/rows_plan.h"
#include "cuda/ptx/mbarrier_sm90.cuh"

namespace jaxconv::few_channels {

// Consecutive rows (pairs of rows) in one strip of columns that a CTA computes.
struct Band {
  int32_t image, strip, row, count;

  __device__ __forceinline__ Band(const FastDivmod& rows, const FastDivmod& strips, int32_t unit,
                                  int32_t end) {
    int32_t of_all;
    rows.Divmod(unit, &of_all, &row);
    strips.Divmod(of_all, &image, &strip);
    count = min(static_cast<int32_t>(rows.divisor) - row, end - unit);
  }
};

// Slot i % kSlots holds element i of the sequence that a CTA loads. Every consumer releases each
// element.
template <int kSlotBytes, int kSlots>
struct RowRing {
  uint32_t first, barriers;

  __device__ __forceinline__ uint32_t Slot(uint32_t i) const {
    return first + i % kSlots * kSlotBytes;
  }
  __device__ __forceinline__ uint32_t Full(uint32_t i) const { return barriers + i % kSlots * 8; }
  __device__ __forceinline__ uint32_t Empty(uint32_t i) const {
    return barriers + (kSlots + i % kSlots) * 8;
  }
  static __device__ __forceinline__ uint32_t Parity(uint32_t i) { return i / kSlots & 1; }

  // Called by the whole CTA, which must synchronise afterwards.
  __device__ __forceinline__ void Init(int writers, int readers) const {
    if (threadIdx.x != 0) return;
    for (uint32_t i = 0; i < kSlots; ++i) {
      BarrierInit(Full(i), writers);
      BarrierInit(Empty(i), readers);
    }
    BarrierInitFence();
  }
};

// The elements of the ring that a consumer warpgroup has released.
template <class Ring>
class RowReader {
 public:
  __device__ __forceinline__ explicit RowReader(const Ring& ring)
      : ring_(ring), signals_(threadIdx.x % 128 == 0) {}

  // Releases all elements before `limit`; the threads of the warpgroup must have read them.
  __device__ __forceinline__ void FreeUntil(uint32_t limit) {
#pragma unroll 1
    for (; freed_ != limit; ++freed_) {
      if (signals_) BarrierArrive(ring_.Empty(freed_));
    }
  }

  // The same at the end of a band, where a warpgroup may not have waited for all of the last
  // kWindow elements. An element may be released only after it has arrived and all threads have
  // seen it; a late thread would find the slot in the next round.
  template <int kWindow>
  __device__ __forceinline__ void EndBand(uint32_t limit, int barrier) {
#pragma unroll
    for (uint32_t j = 1; j <= kWindow; ++j) {
      BarrierWait(ring_.Full(limit - j), ring_.Parity(limit - j));
    }
    NamedBarrierSync(barrier, 128);
    FreeUntil(limit);
  }

 private:
  const Ring& ring_;
  bool signals_;
  uint32_t freed_ = 0;
};

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_ROWS_RING_SM90_CUH_
