#include <cuda_runtime.h>

#include <string>

#include "cuda/kernels/query_device.h"

namespace jaxconv {

Status QueryDevice(int ordinal, DeviceInfo* info) {
  cudaDeviceProp properties;
  if (cudaError_t error = cudaGetDeviceProperties(&properties, ordinal); error != cudaSuccess) {
    cudaGetLastError();  // or the next launch would report it
    return Status::Internal("CUDA device " + std::to_string(ordinal) + ": " +
                            cudaGetErrorString(error));
  }
  info->name = properties.name;
  info->cc_major = properties.major;
  info->cc_minor = properties.minor;
  info->sm_count = properties.multiProcessorCount;
  info->smem_per_block_optin = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  info->l2_bytes = properties.l2CacheSize;
  return {};
}

}  // namespace jaxconv
