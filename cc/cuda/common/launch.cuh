// Kernel launches: shared-memory attributes set once for each device, clusters, and overlap with
// the previous kernel in the stream (programmatic dependent launch, sm_90).
//
// A kernel launched with `overlaps` calls WaitForPrecedingGrids() before its first access to global
// memory (a prefetch to L2 does not count: L2 is the point of coherence), and only after that
// LetNextGridStart(). So when a kernel starts, its predecessor has already waited for its own
// predecessors: at most two kernels run at a time, and waiting for the predecessor implies waiting
// for all earlier kernels. In a stream A, B, C, kernel C may read A's results. A kernel that calls
// neither starts after all earlier kernels have ended, and no later kernel starts early.
//
// C may also read results of A and of earlier kernels before it waits for B, because B's CTAs have
// waited for A. It then waits for B at its end, so that D may read the results of both.
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
  static std::atomic<uint64_t> allowed{0};  // one bit for each of the first 64 devices
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((allowed.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
  // The device's maximum, so that launches of different sizes share the setting.
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

// Enqueues kKernel; `name` appears in errors.
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
