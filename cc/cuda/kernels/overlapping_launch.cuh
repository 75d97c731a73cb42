// Launches of kernels that may start before the kernel in front of them in the stream has ended
// (programmatic dependent launch, sm_90), in clusters if wanted.
//
// Such a kernel calls WaitForPrecedingGrids() before its first access to global memory (bringing
// lines into L2 is none: whoever writes them writes them there), and only then LetNextGridStart().
// So when it starts, the kernel in front of it has seen its own predecessors end, at most two
// kernels are under way at a time, and what this kernel waits for implies everything before it: A's
// results are C's to read in A -> B -> C. Kernels that know nothing of this start when all before
// them has ended, and never let anything start early.
#ifndef JAXCONV_CUDA_KERNELS_OVERLAPPING_LAUNCH_CUH_
#define JAXCONV_CUDA_KERNELS_OVERLAPPING_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "core/status.h"

namespace jaxconv {

struct OverlappingLaunch {
  unsigned grid = 1, threads = 1;
  size_t shared_bytes = 0;  // dynamic; more than 48 KB is asked for
  unsigned cluster = 1;     // CTAs of a thread block cluster
  bool overlaps = true;     // false: an ordinary launch
};

inline Status OverlappingLaunchStatus(cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return Status::Internal(std::string("igemm_wgmma: ") + cudaGetErrorString(error));
}

// Multiprocessors of the current device.
inline Status CountMultiprocessors(int* count) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  }
  return OverlappingLaunchStatus(error);
}

template <typename... Params>
Status Launch(void (*kernel)(Params...), const OverlappingLaunch& launch, void* stream,
              const Params&... params) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  if (launch.overlaps) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = launch.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  config.gridDim = dim3(launch.grid);
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(launch.shared_bytes));
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, params...);
  return OverlappingLaunchStatus(error);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_OVERLAPPING_LAUNCH_CUH_
