#include <cuda_runtime.h>

#include <string>

#include "cuda/batch_norm/channel_vectors.cuh"
#include "cuda/batch_norm/derivative.cuh"
#include "cuda/batch_norm/masked_sums.h"
#include "cuda/batch_norm/plan.h"
#include "cuda/common/launch.cuh"

namespace jaxconv {
namespace {

constexpr int kVector = kChannelsOfThread;

template <typename T>
using Vector = ChannelVector<T>;

// What tells the mask: the activation's result, its operand, which is computed, or bits. kDerivative
// computes the operand and multiplies by the activation's derivative; kNone is no mask.
enum class MaskBy { kResult, kAffine, kBits, kDerivative, kNone };

__device__ __forceinline__ void LoadOfSegment(const ChannelNumbers& vector, int segment,
                                              int64_t channel, float (&values)[kVector]) {
  LoadFloats(vector.numbers + segment * vector.stride + channel, values);
}

// blockIdx.x: a segment and a slice of up to kMaxLanes vectors of channels; blockIdx.y: the part of
// the rows. The threads of a CTA are `steps` rows of `lanes` vectors. All CTAs of a segment walk side
// by side, from the ends of the arrays: those of dz are what the kernel before has written last.
template <typename T, int kGradients, int kArrays, MaskBy kMaskBy>
__global__ void __launch_bounds__(kPassThreads, 2)
    SumMasked(const MaskedSums p, int slices, int lanes, int steps) {
  constexpr bool kOperand = kMaskBy == MaskBy::kAffine || kMaskBy == MaskBy::kDerivative;
  constexpr int kSums = 1 + kArrays;
  constexpr int kLoads = kGradients + kArrays + (kMaskBy == MaskBy::kResult);
  // Scale and offset take the registers of a row's access.
  constexpr int kUnroll = kRowsInFlight<kLoads * kVector * sizeof(T) + (kOperand ? 16 : 0)>;
  constexpr int kRoom = kArrays > 0 ? kArrays : 1;  // of C++ arrays
  __shared__ float of_thread[kSums][kPassThreads * kVector];
  const int segment = static_cast<int>(blockIdx.x) / slices;
  const int slice = static_cast<int>(blockIdx.x) % slices;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int step = static_cast<int>(threadIdx.x) / lanes;
  const int64_t channel = (int64_t{slice} * lanes + lane) * kVector;
  float sums[kSums][kVector] = {};
  if (step < steps && channel < p.channels) {
    float means[kRoom][kVector], scale[kVector], offset[kVector];
#pragma unroll
    for (int a = 0; a < kArrays; ++a) LoadOfSegment(p.means[a], segment, channel, means[a]);
    if constexpr (kOperand) {
      LoadOfSegment(p.scale, segment, channel, scale);
      LoadOfSegment(p.offset, segment, channel, offset);
    }
    const int64_t first_row = segment * p.rows;
    const int64_t stride = steps * p.channels;
    const int64_t rows_of_block = kUnroll * steps;
    const int64_t blocks = (p.rows + rows_of_block - 1) / rows_of_block;
    for (int64_t block = blocks - 1 - blockIdx.y; block >= 0; block -= p.parts) {
      const int64_t row = block * rows_of_block + step;
      const int64_t at = (first_row + row) * p.channels + channel;
      Vector<T> gradients[kUnroll][kGradients], arrays[kUnroll][kRoom], results[kUnroll];
      unsigned bits[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * steps >= p.rows) continue;
        const int64_t here = at + u * stride;
        if constexpr (kOperand) {
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
        float masked[kVector], of_mask[kVector], centred[kRoom][kVector];
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
        if constexpr (kOperand) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) of_mask[i] = centred[0][i] * scale[i] + offset[i];
          Vector<T>::Rounded(of_mask).Unpack(of_mask);
        }
        if constexpr (kMaskBy == MaskBy::kDerivative) {
          Differentiate(p.derivative, p.slope, of_mask);
#pragma unroll
          for (int i = 0; i < kVector; ++i) masked[i] *= of_mask[i];
          Vector<T>::Rounded(masked).Unpack(masked);
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if constexpr (kMaskBy == MaskBy::kBits) {
            if ((bits[u] >> i & 1) == 0) masked[i] = 0;
          } else if constexpr (kMaskBy == MaskBy::kResult || kMaskBy == MaskBy::kAffine) {
            // A bound of NaN bounds nothing.
            if (!(of_mask[i] > p.above) || of_mask[i] >= p.below) masked[i] = 0;
          }
          sums[0][i] += masked[i];
#pragma unroll
          for (int a = 0; a < kArrays; ++a) sums[1 + a][i] += masked[i] * centred[a][i];
        }
        if (p.masked != nullptr) Vector<T>::Rounded(masked).Store(p.masked, at + u * stride);
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
  const int64_t out_channel = int64_t{slice} * columns + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= columns || out_channel >= p.channels) return;
  const int64_t part = segment * p.parts + blockIdx.y;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    float sum = 0;
    for (int i = 0; i < steps; ++i) sum += of_thread[s][i * columns + threadIdx.x];
    p.sums[(part * kSums + s) * p.channels + out_channel] = sum;
  }
}

template <typename T, int kGradients, int kArrays, MaskBy kMaskBy>
Status LaunchForm(const MaskedSums& p, void* stream) {
  const ChannelThreads of(p.channels);
  LaunchConfig config;
  config.threads = kPassThreads;
  config.grid = dim3(static_cast<unsigned>(of.slices * p.segments), static_cast<unsigned>(p.parts));
  return Launch<SumMasked<T, kGradients, kArrays, kMaskBy>>(
      "masked_sums", config, stream, p, static_cast<int>(of.slices), of.lanes, of.steps);
}

template <typename T, int kArrays, MaskBy kMaskBy>
Status LaunchOfGradients(const MaskedSums& p, void* stream) {
  return p.gradient2 != nullptr ? LaunchForm<T, 2, kArrays, kMaskBy>(p, stream)
                                : LaunchForm<T, 1, kArrays, kMaskBy>(p, stream);
}

template <typename T, MaskBy kMaskBy>
Status LaunchOfArrays(const MaskedSums& p, void* stream) {
  const int arrays = (p.arrays[0] != nullptr) + (p.arrays[1] != nullptr);
  if constexpr (kMaskBy != MaskBy::kDerivative) {
    if (arrays == 2) return LaunchOfGradients<T, 2, kMaskBy>(p, stream);
  }
  if constexpr (kMaskBy == MaskBy::kNone) {
    if (arrays == 0) return LaunchOfGradients<T, 0, kMaskBy>(p, stream);
  }
  if (arrays == 1) return LaunchOfGradients<T, 1, kMaskBy>(p, stream);
  return Status::Unimplemented("masked sums: expected other than " + std::to_string(arrays) +
                               " arrays with this mask");
}

template <typename T>
Status LaunchOfType(const MaskedSums& p, void* stream) {
  if (p.bits != nullptr) return LaunchOfArrays<T, MaskBy::kBits>(p, stream);
  if (p.result != nullptr) return LaunchOfArrays<T, MaskBy::kResult>(p, stream);
  if (p.scale.numbers == nullptr) return LaunchOfArrays<T, MaskBy::kNone>(p, stream);
  if (p.derivative == Derivative::kNone) return LaunchOfArrays<T, MaskBy::kAffine>(p, stream);
  return LaunchOfArrays<T, MaskBy::kDerivative>(p, stream);
}

}  // namespace

Status LaunchMaskedSums(DType dtype, const MaskedSums& p, void* stream) {
  JAXCONV_RETURN_IF_ERROR(CheckCut(p.segments, p.rows, p.channels, p.parts));
  JAXCONV_RETURN_IF_ERROR(
      CheckAligned({p.gradient, p.gradient2, p.result, p.arrays[0], p.arrays[1], p.masked}));
  if (p.derivative != Derivative::kNone && p.scale.numbers == nullptr) {
    return Status::Unimplemented("masked sums: expected scale and offset for a derivative");
  }
  switch (dtype) {
    case DType::kF32:
      return LaunchOfType<float>(p, stream);
    case DType::kBF16:
      return LaunchOfType<__nv_bfloat16>(p, stream);
    case DType::kF16:
      return LaunchOfType<__half>(p, stream);
    default:
      return Status::Unimplemented("masked sums: expected float32, float16 or bfloat16");
  }
}

}  // namespace jaxconv
