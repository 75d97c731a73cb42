// The scales and biases of the int8 families' epilogue, for eight channels at a time.
#ifndef JAXCONV_CUDA_COMMON_REQUANTIZE_TERMS_CUH_
#define JAXCONV_CUDA_COMMON_REQUANTIZE_TERMS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/requantize_params.h"
#include "cuda/common/requantize_words.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv {

// A channel's scale and bias, read from global memory.
struct GlobalTerms {
  const RequantizeParams& params;
  __device__ __forceinline__ void Load(int32_t channel, bool inside, float (&scale)[8],
                                       float (&bias)[8]) const {
    const int32_t from = inside ? channel : 0;
    requantize_internal::LoadFloats(params.scale + from, scale);
#pragma unroll
    for (int e = 0; e < 8; ++e) bias[e] = 0;
    if (params.bias != nullptr) requantize_internal::LoadFloats(params.bias + from, bias);
  }
};

// The same for a tile's channels, copied to shared memory while the tile is multiplied. Loads from
// global memory would expose their latency for every eight channels, because there are too few
// warps to hide it.
template <int kChannels>
struct SharedTerms {
  static constexpr int kBytes = 2 * kChannels * sizeof(float);
  uint32_t shared;  // address of the scales, then the biases
  int32_t first;    // first channel of the tile

  // Threads 0 to 127 of a warpgroup start the copy; `end`: one past the last channel.
  __device__ __forceinline__ void Copy(const RequantizeParams& params, int thread,
                                       int32_t end) const {
    constexpr int kQuads = kChannels / 4;
    if (params.path > RequantizePath::kU8Residual) return;
#pragma unroll
    for (int quad = thread; quad < 2 * kQuads; quad += 128) {
      const bool of_bias = quad >= kQuads;
      const float* const from = of_bias ? params.bias : params.scale;
      const int32_t channel = first + quad % kQuads * 4;
      const bool inside = from != nullptr && channel < end;
      CopyAsync<16>(shared + quad * 16, inside ? from + channel : params.scale, inside);
    }
    CopyAsyncCommit();
  }
  // All threads wait here before any of them loads.
  __device__ __forceinline__ void Wait(int barrier) const {
    CopyAsyncWait<0>();
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
  }
  __device__ __forceinline__ void Load(int32_t channel, bool, float (&scale)[8],
                                       float (&bias)[8]) const {
    const uint32_t at = shared + (channel - first) * 4;
    LoadShared<0>(at, scale);
    LoadShared<16>(at, scale + 4);
    LoadShared<kChannels * 4>(at, bias);
    LoadShared<kChannels * 4 + 16>(at, bias + 4);
  }
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_REQUANTIZE_TERMS_CUH_
