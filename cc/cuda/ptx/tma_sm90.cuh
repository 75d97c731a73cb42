// cp.async.bulk.tensor: copies boxes of a tensor to shared memory, and back (sm_90). One thread
// issues a copy; the bytes of a load arrive at an mbarrier. Coordinates and offsets run innermost
// first.
//
// cp.async.bulk.prefetch.tensor: prefetches the same boxes to L2. This is not a read in the memory
// model, so other threads may be writing the data.
//
// A box of a map without interleaving must begin at a multiple of 16 bytes of the innermost dimension,
// which may be negative; otherwise the instruction is illegal.
//
// im2col: the box's base pixels start at (w, h, d, n) and advance inside the corners of the map;
// the offsets of a filter tap displace each of them. A base w, h or d outside the corners faults;
// an image past the last reads zeros.
#ifndef JAXCONV_CUDA_PTX_TMA_SM90_CUH_
#define JAXCONV_CUDA_PTX_TMA_SM90_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

enum class BoxTarget { kShared, kL2 };  // kL2: shared address and barrier are not used

template <BoxTarget kTarget = BoxTarget::kShared>
__device__ __forceinline__ void CopyTile2d(uint32_t shared, const CUtensorMap* map,
                                           uint32_t barrier, int32_t c0, int32_t c1) {
  if constexpr (kTarget == BoxTarget::kL2) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map),
                 "r"(c0), "r"(c1)
                 : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
template <BoxTarget kTarget = BoxTarget::kShared>
__device__ __forceinline__ void CopyTile3d(uint32_t shared, const CUtensorMap* map,
                                           uint32_t barrier, int32_t c0, int32_t c1, int32_t c2) {
  if constexpr (kTarget == BoxTarget::kL2) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map),
                 "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
template <BoxTarget kTarget = BoxTarget::kShared>
__device__ __forceinline__ void CopyTile4d(uint32_t shared, const CUtensorMap* map,
                                           uint32_t barrier, int32_t c0, int32_t c1, int32_t c2,
                                           int32_t c3) {
  if constexpr (kTarget == BoxTarget::kL2) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
        "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void CopyTile5d(uint32_t shared, const CUtensorMap* map,
                                           uint32_t barrier, int32_t c0, int32_t c1, int32_t c2,
                                           int32_t c3, int32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// Multicasts a box to every CTA of the cluster whose bit is set in `ctas`, at the same
// shared-memory offset, and signals the barrier at the same offset in each.
__device__ __forceinline__ void CopyTile2dToCluster(uint32_t shared, const CUtensorMap* map,
                                                    uint32_t barrier, int32_t c0, int32_t c1,
                                                    uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "h"(ctas)
      : "memory");
}
__device__ __forceinline__ void CopyTile5dToCluster(uint32_t shared, const CUtensorMap* map,
                                                    uint32_t barrier, int32_t c0, int32_t c1,
                                                    int32_t c2, int32_t c3, int32_t c4,
                                                    uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(ctas)
      : "memory");
}
template <BoxTarget kTarget = BoxTarget::kShared>
__device__ __forceinline__ void CopyIm2col1d(uint32_t shared, const CUtensorMap* map,
                                             uint32_t barrier, int32_t c, int32_t w, int32_t n,
                                             uint16_t offset_w) {
  if constexpr (kTarget == BoxTarget::kL2) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.3d.L2.global.im2col [%0, {%1, %2, %3}], {%4};" ::"l"(map),
        "r"(c), "r"(w), "r"(n), "h"(offset_w)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2], {%6};" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(n), "h"(offset_w)
      : "memory");
}
template <BoxTarget kTarget = BoxTarget::kShared>
__device__ __forceinline__ void CopyIm2col2d(uint32_t shared, const CUtensorMap* map,
                                             uint32_t barrier, int32_t c, int32_t w, int32_t h,
                                             int32_t n, uint16_t offset_w, uint16_t offset_h) {
  if constexpr (kTarget == BoxTarget::kL2) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.im2col [%0, {%1, %2, %3, %4}], {%5, %6};" ::"l"(
            map),
        "r"(c), "r"(w), "r"(h), "r"(n), "h"(offset_w), "h"(offset_h)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(offset_w), "h"(offset_h)
      : "memory");
}
template <BoxTarget kTarget = BoxTarget::kShared>
__device__ __forceinline__ void CopyIm2col3d(uint32_t shared, const CUtensorMap* map,
                                             uint32_t barrier, int32_t c, int32_t w, int32_t h,
                                             int32_t d, int32_t n, uint16_t offset_w,
                                             uint16_t offset_h, uint16_t offset_d) {
  if constexpr (kTarget == BoxTarget::kL2) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.im2col [%0, {%1, %2, %3, %4, %5}], {%6, %7, "
        "%8};" ::"l"(map),
        "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(offset_w), "h"(offset_h), "h"(offset_d)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(offset_w), "h"(offset_h),
      "h"(offset_d)
      : "memory");
}
// Stores shared memory to a box of a tensor, clipped to the tensor. To make ordinary stores visible
// to it, every writing thread calls FenceForCopies(), and a barrier follows. Only the thread that
// issued the copies can wait for them: ElectOne() elects the same thread every time.
__device__ __forceinline__ void FenceForCopies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void StoreTile2d(const CUtensorMap* map, uint32_t shared, int32_t c0,
                                            int32_t c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void StoreTile4d(const CUtensorMap* map, uint32_t shared, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until the shared memory of all stores but the last kPending commits may be overwritten or
// released. The writes themselves complete with the grid.
template <int kPending = 0>
__device__ __forceinline__ void WaitForStoresToRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_TMA_SM90_CUH_
