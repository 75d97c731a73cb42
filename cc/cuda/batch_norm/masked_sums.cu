#include <cuda_runtime.h>

#include <string>

#include "cuda/batch_norm/channel_vectors.cuh"
#include "cuda/batch_norm/masked_sums.h"
#include "cuda/common/launch.cuh"

namespace jaxconv {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = kChannelsOfThread;
constexpr int kMaxLanes = 32;

template <typename T>
using Vector = ChannelVector<T>;

// What tells the mask: the activation's result, its operand, which is computed, or bits.
enum class MaskBy { kResult, kAffine, kBits };

// blockIdx.x: a slice of up to kMaxLanes vectors of channels; blockIdx.y: the part of the rows. The
// threads of a CTA are `steps` rows of `lanes` vectors. All CTAs walk side by side, from the ends of
// the arrays: those of dz are what the kernel before has written last.
template <typename T, int kGradients, int kArrays, MaskBy kMaskBy>
__global__ void __launch_bounds__(kThreads, 2) SumMasked(const MaskedSums p, int lanes, int steps) {
  constexpr int kSums = 1 + kArrays;
  constexpr int kLoads = kGradients + kArrays + (kMaskBy == MaskBy::kResult);
  constexpr int kUnroll = kLoads > 3 ? 2 : 4;
  __shared__ float of_thread[kSums][kThreads * kVector];
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int step = static_cast<int>(threadIdx.x) / lanes;
  const int64_t channel = (int64_t{blockIdx.x} * lanes + lane) * kVector;
  float sums[kSums][kVector] = {};
  if (step < steps && channel < p.channels) {
    float means[kArrays][kVector], scale[kVector], offset[kVector];
#pragma unroll
    for (int a = 0; a < kArrays; ++a) LoadFloats(p.means[a] + channel, means[a]);
    if constexpr (kMaskBy == MaskBy::kAffine) {
      LoadFloats(p.scale + channel, scale);
      LoadFloats(p.offset + channel, offset);
    }
    const int64_t stride = steps * p.channels;
    const int64_t rows_of_block = kUnroll * steps;
    const int64_t blocks = (p.rows + rows_of_block - 1) / rows_of_block;
    for (int64_t block = blocks - 1 - blockIdx.y; block >= 0; block -= p.parts) {
      const int64_t row = block * rows_of_block + step;
      const int64_t at = row * p.channels + channel;
      Vector<T> gradients[kUnroll][kGradients], arrays[kUnroll][kArrays], results[kUnroll];
      unsigned bits[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * steps >= p.rows) continue;
        const int64_t here = at + u * stride;
        if constexpr (kMaskBy == MaskBy::kAffine) {
          gradients[u][0] = LoadChannels<T>(p.gradient, here);
        } else {
          gradients[u][0] = LoadLastChannels<T>(p.gradient, here);
        }
        if constexpr (kMaskBy == MaskBy::kResult) {
          results[u] = LoadLastChannels<T>(p.result, here);
        }
        if constexpr (kMaskBy == MaskBy::kBits) bits[u] = __ldcs(p.bits + here / kVector);
        if constexpr (kGradients == 2) gradients[u][1] = LoadLastChannels<T>(p.gradient2, here);
#pragma unroll
        for (int a = 0; a < kArrays; ++a) arrays[u][a] = LoadChannels<T>(p.arrays[a], here);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * steps >= p.rows) continue;
        float masked[kVector], of_mask[kVector], centred[kArrays][kVector];
        gradients[u][0].Unpack(masked);
        if constexpr (kGradients == 2) {
          gradients[u][1].AddTo(masked);
          Vector<T>::Rounded(masked).Unpack(masked);
        }
#pragma unroll
        for (int a = 0; a < kArrays; ++a) {
          arrays[u][a].Unpack(centred[a]);
#pragma unroll
          for (int i = 0; i < kVector; ++i) centred[a][i] -= means[a][i];
        }
        if constexpr (kMaskBy == MaskBy::kResult) results[u].Unpack(of_mask);
        if constexpr (kMaskBy == MaskBy::kAffine) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) of_mask[i] = centred[0][i] * scale[i] + offset[i];
          Vector<T>::Rounded(of_mask).Unpack(of_mask);
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if constexpr (kMaskBy == MaskBy::kBits) {
            if ((bits[u] >> i & 1) == 0) masked[i] = 0;
          } else {
            // A bound of NaN bounds nothing.
            if (!(of_mask[i] > p.above) || of_mask[i] >= p.below) masked[i] = 0;
          }
          sums[0][i] += masked[i];
#pragma unroll
          for (int a = 0; a < kArrays; ++a) sums[1 + a][i] += masked[i] * centred[a][i];
        }
        if (p.masked != nullptr) {
          Vector<T>::Rounded(masked).Store(static_cast<T*>(p.masked) + at + u * stride);
        }
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) of_thread[s][threadIdx.x * kVector + i] = sums[s][i];
  }
  __syncthreads();
  const int columns = lanes * kVector;
  const int64_t out_channel = int64_t{blockIdx.x} * columns + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= columns || out_channel >= p.channels) return;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    float sum = 0;
    for (int i = 0; i < steps; ++i) sum += of_thread[s][i * columns + threadIdx.x];
    p.sums[(blockIdx.y * int64_t{kSums} + s) * p.channels + out_channel] = sum;
  }
}

template <typename T, int kGradients, int kArrays, MaskBy kMaskBy>
Status LaunchForm(const MaskedSums& p, void* stream) {
  const int64_t vectors = p.channels / kVector;
  const int lanes = static_cast<int>(vectors < kMaxLanes ? vectors : kMaxLanes);
  LaunchConfig config;
  config.threads = kThreads;
  config.grid =
      dim3(static_cast<unsigned>((vectors + lanes - 1) / lanes), static_cast<unsigned>(p.parts));
  return Launch<SumMasked<T, kGradients, kArrays, kMaskBy>>("masked_sums", config, stream, p, lanes,
                                                            kThreads / lanes);
}

template <typename T, MaskBy kMaskBy>
Status LaunchOfCounts(const MaskedSums& p, void* stream) {
  const bool two = p.arrays[1] != nullptr;
  if (p.gradient2 == nullptr) {
    return two ? LaunchForm<T, 1, 2, kMaskBy>(p, stream) : LaunchForm<T, 1, 1, kMaskBy>(p, stream);
  }
  return two ? LaunchForm<T, 2, 2, kMaskBy>(p, stream) : LaunchForm<T, 2, 1, kMaskBy>(p, stream);
}

template <typename T>
Status LaunchOfType(const MaskedSums& p, void* stream) {
  if (p.bits != nullptr) return LaunchOfCounts<T, MaskBy::kBits>(p, stream);
  if (p.result != nullptr) return LaunchOfCounts<T, MaskBy::kResult>(p, stream);
  if (p.arrays[1] != nullptr || p.gradient2 != nullptr) {
    return Status::Unimplemented("masked sums: a mask that is computed takes one gradient and y");
  }
  return LaunchForm<T, 1, 1, MaskBy::kAffine>(p, stream);
}

}  // namespace

Status LaunchMaskedSums(DType dtype, const MaskedSums& p, void* stream) {
  if (p.channels % kVector != 0 || p.parts < 1 || p.parts > 65535) {
    return Status::Unimplemented(
        "masked sums: expected a multiple of 8 channels and 1 to 65535 "
        "parts, got " +
        std::to_string(p.channels) + " and " + std::to_string(p.parts));
  }
  for (const void* array : {p.gradient, p.gradient2, p.result, p.arrays[0], p.arrays[1],
                            static_cast<const void*>(p.masked)}) {
    if (!OnSixteenBytes(array)) {
      return Status::Unimplemented("masked sums: an array does not lie on a multiple of 16 bytes");
    }
  }
  switch (dtype) {
    case DType::kBF16:
      return LaunchOfType<__nv_bfloat16>(p, stream);
    case DType::kF16:
      return LaunchOfType<__half>(p, stream);
    default:
      return Status::Unimplemented("masked sums: expected float16 or bfloat16");
  }
}

}  // namespace jaxconv
