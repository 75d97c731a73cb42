// Thread-block clusters: ranks, the barrier of all threads, and the shared memory of the others
// (sm_90).
#ifndef JAXCONV_CUDA_PTX_CLUSTER_SM90_CUH_
#define JAXCONV_CUDA_PTX_CLUSTER_SM90_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

// Of a grid in one dimension.
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

// What a thread wrote before it arrives, in its own shared memory or another's, everyone sees who
// has waited. That takes a fence which waits for stores to global memory, too.
__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Without the fence: says only that the thread has come this far.
__device__ __forceinline__ void ClusterArriveRelaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The place in the shared memory of `rank` that is `address` in this CTA's.
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
