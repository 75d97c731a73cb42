// A thread's eight channels of an array, and of float32 vectors, accessed 16 bytes at a time.
#ifndef JAXCONV_CUDA_NORMALISATION_CHANNEL_VECTORS_CUH_
#define JAXCONV_CUDA_NORMALISATION_CHANNEL_VECTORS_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/normalisation/plan.h"

namespace jaxconv {

// One access of 16-bit elements, two of float32.
template <typename T>
struct ChannelVector {
  static constexpr int kAccesses = kChannelsOfThread * sizeof(T) / sizeof(uint4);
  static constexpr int kWidth = kChannelsOfThread / kAccesses;
  using Access = Neighbours<T, kWidth>;
  Access accesses[kAccesses];

  static __device__ __forceinline__ ChannelVector
  Rounded(const float (&values)[kChannelsOfThread]) {
    ChannelVector rounded;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      float part[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) part[k] = values[i * kWidth + k];
      rounded.accesses[i] = Access::Rounded(part);
    }
    return rounded;
  }
  __device__ __forceinline__ void Unpack(float (&values)[kChannelsOfThread]) const {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      float part[kWidth];
      accesses[i].Unpack(part);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[i * kWidth + k] = part[k];
    }
  }
  __device__ __forceinline__ void AddTo(float (&values)[kChannelsOfThread]) const {
    float added[kChannelsOfThread];
    Unpack(added);
#pragma unroll
    for (int i = 0; i < kChannelsOfThread; ++i) values[i] += added[i];
  }
  __device__ __forceinline__ void Store(void* array, int64_t at) const {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      accesses[i].Store(static_cast<T*>(array) + at + i * kWidth);
    }
  }
};

template <typename T>
__device__ __forceinline__ ChannelVector<T> LoadChannels(const void* array, int64_t at) {
  ChannelVector<T> loaded;
  const auto* from = reinterpret_cast<const uint4*>(static_cast<const T*>(array) + at);
#pragma unroll
  for (int i = 0; i < ChannelVector<T>::kAccesses; ++i) loaded.accesses[i] = {__ldg(from + i)};
  return loaded;
}
// The same for data that is not read again soon (streaming loads).
template <typename T>
__device__ __forceinline__ ChannelVector<T> LoadLastChannels(const void* array, int64_t at) {
  ChannelVector<T> loaded;
  const auto* from = reinterpret_cast<const uint4*>(static_cast<const T*>(array) + at);
#pragma unroll
  for (int i = 0; i < ChannelVector<T>::kAccesses; ++i) loaded.accesses[i] = {__ldcs(from + i)};
  return loaded;
}

// `from` is aligned to 16 bytes.
__device__ __forceinline__ void LoadFloats(const float* from, float (&values)[kChannelsOfThread]) {
#pragma unroll
  for (int i = 0; i < kChannelsOfThread; i += 4) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(from + i));
    values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
  }
}

__device__ __forceinline__ void LoadOfSegment(const ChannelNumbers& vector, int segment,
                                              int64_t channel, float (&values)[kChannelsOfThread]) {
  LoadFloats(vector.numbers + segment * vector.stride + channel, values);
}
// The same; an absent vector has the number `absent` in all channels.
__device__ __forceinline__ void LoadOfSegment(const ChannelNumbers& vector, int segment,
                                              int64_t channel, float absent,
                                              float (&values)[kChannelsOfThread]) {
  if (vector.numbers != nullptr) return LoadOfSegment(vector, segment, channel, values);
#pragma unroll
  for (int i = 0; i < kChannelsOfThread; ++i) values[i] = absent;
}

// The sums of a CTA's threads, `steps` rows of `lanes` threads, and their total for each channel.
template <int kSums>
struct ChannelSums {
  float of_thread[kSums][kPassThreads * kChannelsOfThread];

  __device__ __forceinline__ void Keep(const float (&sums)[kSums][kChannelsOfThread]) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int i = 0; i < kChannelsOfThread; ++i) {
        of_thread[s][threadIdx.x * kChannelsOfThread + i] = sums[s][i];
      }
    }
    __syncthreads();
  }
  // Sum s of channel threadIdx.x, added over the CTA's rows of threads in order.
  __device__ __forceinline__ float Total(int s, int lanes, int steps) const {
    const int columns = lanes * kChannelsOfThread;
    float sum = 0;
    for (int i = 0; i < steps; ++i) sum += of_thread[s][i * columns + threadIdx.x];
    return sum;
  }
};

// Launches a kernel that sums rows: a CTA for each segment, slice of channels and part of the rows.
template <auto kKernel, class Sums>
Status LaunchSumOfRows(const char* name, const Sums& p, void* stream) {
  const ChannelThreads of(p.channels);
  LaunchConfig config;
  config.threads = kPassThreads;
  config.grid = dim3(static_cast<unsigned>(of.slices * p.segments), static_cast<unsigned>(p.parts));
  return Launch<kKernel>(name, config, stream, p, static_cast<int>(of.slices), of.lanes, of.steps);
}

// Launches a kernel that computes each row by itself: about `p.ctas` CTAs, in blockIdx.x a segment
// and slice of channels, in blockIdx.y every gridDim.y-th block of `unroll` rows a thread.
template <auto kKernel, class Pass>
Status LaunchRowByRow(const char* name, const Pass& p, int64_t segments, int unroll, void* stream) {
  constexpr int64_t kMaxGrid = 65535;
  const ChannelThreads of = ChannelThreads::Even(p.channels);
  const int64_t rows_of_block = unroll * of.steps;
  const int64_t blocks = (p.rows + rows_of_block - 1) / rows_of_block;
  const int64_t most = std::max<int64_t>(p.ctas / (of.slices * segments), 1);
  LaunchConfig config;
  config.threads = kPassThreads;
  config.grid = dim3(static_cast<unsigned>(of.slices * segments),
                     static_cast<unsigned>(std::min({blocks, most, kMaxGrid})));
  return Launch<kKernel>(name, config, stream, p, static_cast<int>(of.slices), of.lanes, of.steps);
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_CHANNEL_VECTORS_CUH_
