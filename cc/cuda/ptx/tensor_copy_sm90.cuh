// cp.async.bulk.tensor: boxes of a tensor -> shared memory (sm_90). One thread issues; the bytes
// arrive at an mbarrier. Coordinates and offsets run innermost first.
//
// im2col: the box's pixels are walked from (w, h, d, n) on inside the corners of the map, and each
// is displaced by the offsets, the filter tap. A base w, h or d outside the corners faults; an
// image past the last gives zeros.
#ifndef JAXCONV_CUDA_PTX_TENSOR_COPY_SM90_CUH_
#define JAXCONV_CUDA_PTX_TENSOR_COPY_SM90_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void CopyTile2d(uint32_t shared, const CUtensorMap* map,
                                           uint32_t barrier, int32_t c0, int32_t c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void CopyTile3d(uint32_t shared, const CUtensorMap* map,
                                           uint32_t barrier, int32_t c0, int32_t c1, int32_t c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void CopyTile4d(uint32_t shared, const CUtensorMap* map,
                                           uint32_t barrier, int32_t c0, int32_t c1, int32_t c2,
                                           int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void CopyIm2col1d(uint32_t shared, const CUtensorMap* map,
                                             uint32_t barrier, int32_t c, int32_t w, int32_t n,
                                             uint16_t offset_w) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2], {%6};" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(n), "h"(offset_w)
      : "memory");
}
__device__ __forceinline__ void CopyIm2col2d(uint32_t shared, const CUtensorMap* map,
                                             uint32_t barrier, int32_t c, int32_t w, int32_t h,
                                             int32_t n, uint16_t offset_w, uint16_t offset_h) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(offset_w), "h"(offset_h)
      : "memory");
}
__device__ __forceinline__ void CopyIm2col3d(uint32_t shared, const CUtensorMap* map,
                                             uint32_t barrier, int32_t c, int32_t w, int32_t h,
                                             int32_t d, int32_t n, uint16_t offset_w,
                                             uint16_t offset_h, uint16_t offset_d) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(offset_w), "h"(offset_h),
      "h"(offset_d)
      : "memory");
}

// The same boxes no further than to L2. Nobody is told; as L2 is where all SMs' writes meet, a box
// may be fetched before its tensor is finished.
__device__ __forceinline__ void PrefetchTile2d(const CUtensorMap* map, int32_t c0, int32_t c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map),
               "r"(c0), "r"(c1)
               : "memory");
}
__device__ __forceinline__ void PrefetchTile3d(const CUtensorMap* map, int32_t c0, int32_t c1,
                                               int32_t c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
__device__ __forceinline__ void PrefetchIm2col1d(const CUtensorMap* map, int32_t c, int32_t w,
                                                 int32_t n, uint16_t offset_w) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.3d.L2.global.im2col [%0, {%1, %2, %3}], {%4};" ::"l"(map),
      "r"(c), "r"(w), "r"(n), "h"(offset_w)
      : "memory");
}
__device__ __forceinline__ void PrefetchIm2col2d(const CUtensorMap* map, int32_t c, int32_t w,
                                                 int32_t h, int32_t n, uint16_t offset_w,
                                                 uint16_t offset_h) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.im2col [%0, {%1, %2, %3, %4}], {%5, %6};" ::"l"(
          map),
      "r"(c), "r"(w), "r"(h), "r"(n), "h"(offset_w), "h"(offset_h)
      : "memory");
}
__device__ __forceinline__ void PrefetchIm2col3d(const CUtensorMap* map, int32_t c, int32_t w,
                                                 int32_t h, int32_t d, int32_t n, uint16_t offset_w,
                                                 uint16_t offset_h, uint16_t offset_d) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global.im2col [%0, {%1, %2, %3, %4, %5}], {%6, %7, "
      "%8};" ::"l"(map),
      "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(offset_w), "h"(offset_h), "h"(offset_d)
      : "memory");
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_TENSOR_COPY_SM90_CUH_
