// What the kernels of rows have in common: which rows a CTA has, and their ring in shared memory.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_ROWS_RING_SM90_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_ROWS_RING_SM90_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/few_channels/rows_plan.h"
#include "cuda/ptx/mbarrier_sm90.cuh"

namespace jaxconv::few_channels {

// Rows (pairs of rows) below each other that a CTA computes without a gap, of one strip of columns.
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

// Slot i % kSlots holds element i of all that a CTA loads. Every consumer gives back each.
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

  // The whole CTA, which synchronises afterwards.
  __device__ __forceinline__ void Init(int writers, int readers) const {
    if (threadIdx.x != 0) return;
    for (uint32_t i = 0; i < kSlots; ++i) {
      BarrierInit(Full(i), writers);
      BarrierInit(Empty(i), readers);
    }
    BarrierInitFence();
  }
};

// What a consumer, a warpgroup, has given back of the ring.
template <class Ring>
class RowReader {
 public:
  __device__ __forceinline__ explicit RowReader(const Ring& ring)
      : ring_(ring), signals_(threadIdx.x % 128 == 0) {}

  // All elements in front of `limit`, which its threads have read.
  __device__ __forceinline__ void FreeUntil(uint32_t limit) {
#pragma unroll 1
    for (; freed_ != limit; ++freed_) {
      if (signals_) BarrierArrive(ring_.Empty(freed_));
    }
  }

  // The same at the end of a band, of whose last kWindow elements a warpgroup may not have waited
  // for all: an element may be given back only after it has come, and after all threads have seen
  // it. One that is late would find the slot a round further.
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
