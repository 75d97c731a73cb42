// Launches of kernels that may start before the kernel in front of them in the stream has ended
// (programmatic dependent launch, sm_90), in clusters if wanted.
//
// Such a kernel calls WaitForPrecedingGrids() before its first access to global memory, and only
// then LetNextGridStart(). So when it starts, the kernel in front of it has seen its own
// predecessors end, at most two kernels are under way at a time, and what this kernel waits for
// implies everything before it: A's results are C's to read in A -> B -> C. Kernels that know
// nothing of this start when all before them has ended, and never let anything start early.
#ifndef JAXCONV_CUDA_KERNELS_OVERLAPPING_LAUNCH_CUH_
#define JAXCONV_CUDA_KERNELS_OVERLAPPING_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstddef>

namespace jaxconv {

template <typename... Params>
cudaError_t LaunchOverlapping(void (*kernel)(Params...), unsigned grid, unsigned threads,
                              size_t shared_bytes, unsigned cluster, void* stream,
                              const Params&... params) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_OVERLAPPING_LAUNCH_CUH_
