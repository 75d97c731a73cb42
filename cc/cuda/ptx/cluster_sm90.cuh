// Thread-block clusters: ranks, the cluster barrier, and the other CTAs' shared memory (sm_90).
#ifndef JAXCONV_CUDA_PTX_CLUSTER_SM90_CUH_
#define JAXCONV_CUDA_PTX_CLUSTER_SM90_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

// In a one-dimensional grid.
__device__ __forceinline__ int32_t ClusterId() {
  int32_t id;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
}
__device__ __forceinline__ int32_t ClusterRank() {
  int32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A thread's writes before its arrival, to its own or another CTA's shared memory, are visible to
// all threads that have waited. The required fence also waits for stores to global memory.
__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Arrives without the fence: signals only that the thread has reached this point.
__device__ __forceinline__ void ClusterArriveRelaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address in the shared memory of `rank` that corresponds to `address` in this CTA's.
__device__ __forceinline__ uint32_t AddressInCluster(uint32_t address, int32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ __forceinline__ float4 LoadCluster(uint32_t address) {
  float4 quad;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(quad.x), "=f"(quad.y), "=f"(quad.z), "=f"(quad.w)
               : "r"(address)
               : "memory");
  return quad;
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_CLUSTER_SM90_CUH_
