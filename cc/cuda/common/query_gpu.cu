#include <cuda_runtime.h>

#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "cuda/common/query_gpu.h"

namespace jaxconv {
namespace {

Status Failed(const std::string& what, cudaError_t error) {
  cudaGetLastError();  // clears the error, or the next launch would report it
  return Status::Internal(what + ": " + cudaGetErrorString(error));
}

// 0 if the driver does not report it.
double Attribute(cudaDeviceAttr attribute, int ordinal) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, ordinal) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return value;
}

}  // namespace

Status QueryGpu(int ordinal, Gpu* gpu) {
  cudaDeviceProp properties;
  if (cudaError_t error = cudaGetDeviceProperties(&properties, ordinal); error != cudaSuccess) {
    return Failed("CUDA device " + std::to_string(ordinal), error);
  }
  gpu->name = properties.name;
  gpu->cc_major = properties.major;
  gpu->cc_minor = properties.minor;
  gpu->sm_count = properties.multiProcessorCount;
  gpu->smem_per_block_optin = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  gpu->l2_bytes = properties.l2CacheSize;
  const double clock_ghz = Attribute(cudaDevAttrClockRate, ordinal) / 1e6;
  // The bus width (bits) is transferred at both edges of the memory clock (kHz).
  const double dram_bytes_per_us = 2 * Attribute(cudaDevAttrMemoryClockRate, ordinal) / 1e3 *
                                   Attribute(cudaDevAttrGlobalMemoryBusWidth, ordinal) / 8;
  FillRates(clock_ghz, dram_bytes_per_us, gpu);
  return {};
}

Status GpuOfDevice(int ordinal, Gpu* gpu) {
  static std::mutex mutex;
  static std::unordered_map<int, Gpu> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(ordinal);
  if (found == known.end()) {
    JAXCONV_RETURN_IF_ERROR(QueryGpu(ordinal, gpu));
    found = known.emplace(ordinal, *gpu).first;
  }
  *gpu = found->second;
  return {};
}

Status GpuOfTarget(std::string_view target, Gpu* gpu) {
  if (target.empty()) {
    if (!GpuOfDevice(0, gpu).ok()) ModelOf("sm_80", gpu);
    return {};
  }
  if (ModelOf(target, gpu)) return {};
  return Status::InvalidArgument(
      "target: expected an architecture such as sm_90a or a product such as h200, got '" +
      std::string(target) + "'");
}

}  // namespace jaxconv
