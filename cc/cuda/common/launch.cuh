// Launching kernels: shared-memory attributes set once for each device, clusters, and launches that
// overlap the kernel in front of them in the stream (programmatic dependent launch, sm_90).
//
// A kernel launched with `overlaps` calls WaitForPrecedingGrids() before its first access to global
// memory (a prefetch into L2 is none: writes go to L2 too), and only then LetNextGridStart(). So
// when it starts, the kernel in front of it has seen its own predecessors end: at most two kernels
// are under way at a time, and what this kernel waits for implies everything before it. In a stream
// A, B, C the results of A are C's to read. Kernels that do not call either start when all kernels
// before them have ended, and let nothing start early.
//
// A kernel C may also read what A and those before it wrote before it waits for B, since B's CTAs
// have waited for A; it waits for B at its end, so that D has both.
#ifndef JAXCONV_CUDA_COMMON_LAUNCH_CUH_
#define JAXCONV_CUDA_COMMON_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/status.h"

namespace jaxconv {

struct LaunchConfig {
  dim3 grid = 1, threads = 1;
  size_t shared_bytes = 0;  // dynamic
  unsigned cluster = 1;     // CTAs of a thread block cluster
  bool overlaps = false;
};

inline Status LaunchStatus(const char* name, cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return Status::Internal(std::string(name) + ": " + cudaGetErrorString(error));
}

// Shared memory above 48 KB, static and dynamic together, is an attribute of the function on a
// device. It is set on the first launch there: setting it costs as much as a tenth of a launch.
template <auto kKernel>
cudaError_t AllowSharedBytes(size_t shared_bytes) {
  if (shared_bytes == 0) return cudaSuccess;
  static std::atomic<uint64_t> allowed{0};  // a bit for each of the first 64 devices
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((allowed.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
  // The most that the device has, so that launches of different sizes share the setting.
  int most = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kKernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - static_cast<int>(attributes.sharedSizeBytes));
  }
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_release);
  return error;
}

// Enqueues kKernel; `name` stands in the error.
template <auto kKernel, typename... Params>
Status Launch(const char* name, const LaunchConfig& config, void* stream, const Params&... params) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t launch = {};
  launch.attrs = attributes;
  if (config.overlaps) {
    cudaLaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = config.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  launch.gridDim = config.grid;
  launch.blockDim = config.threads;
  launch.dynamicSmemBytes = config.shared_bytes;
  launch.stream = static_cast<cudaStream_t>(stream);
  cudaError_t error = AllowSharedBytes<kKernel>(config.shared_bytes);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&launch, kKernel, params...);
  return LaunchStatus(name, error);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_LAUNCH_CUH_
