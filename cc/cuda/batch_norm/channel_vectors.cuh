// Eight channels of a 16-bit array as one access of 16 bytes, and of a float32 vector.
#ifndef JAXCONV_CUDA_BATCH_NORM_CHANNEL_VECTORS_CUH_
#define JAXCONV_CUDA_BATCH_NORM_CHANNEL_VECTORS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/element.cuh"

namespace jaxconv {

inline constexpr int kChannelsOfThread = 8;  // 16 bytes

template <typename T>
using ChannelVector = Neighbours<T, kChannelsOfThread>;

inline bool OnSixteenBytes(const void* array) {
  return reinterpret_cast<uintptr_t>(array) % sizeof(uint4) == 0;
}

template <typename T>
__device__ __forceinline__ ChannelVector<T> LoadChannels(const void* array, int64_t at) {
  return {__ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(array) + at))};
}
// What nothing reads again soon.
template <typename T>
__device__ __forceinline__ ChannelVector<T> LoadLastChannels(const void* array, int64_t at) {
  return {__ldcs(reinterpret_cast<const uint4*>(static_cast<const T*>(array) + at))};
}

__device__ __forceinline__ void LoadFloats(const float* from, float (&values)[kChannelsOfThread]) {
#pragma unroll
  for (int i = 0; i < kChannelsOfThread; ++i) values[i] = __ldg(from + i);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_BATCH_NORM_CHANNEL_VECTORS_CUH_
