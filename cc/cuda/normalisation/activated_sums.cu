#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/activation.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/normalisation/activated_sums.h"
#include "cuda/normalisation/channel_vectors.cuh"
#include "cuda/normalisation/derivative.cuh"
#include "cuda/normalisation/plan.h"

namespace jaxconv {
namespace {

constexpr int kVector = kChannelsOfThread;

template <typename T, int kUnrollArg, bool kDerivativesArg>
struct ActivatedForm {
  using Element = T;
  static constexpr int kUnroll = kUnrollArg;
  static constexpr bool kDerivatives = kDerivativesArg;
};

// Adds a row to the three sums. Half of the channels at a time, because of the registers.
template <typename T, int kSums>
__device__ __forceinline__ void AddWithDerivatives(const ActivatedSums& p,
                                                   const float (&centred)[kVector],
                                                   const float (&scale)[kVector],
                                                   const float (&offset)[kVector],
                                                   float (&sums)[kSums][kVector]) {
  constexpr int kHalf = kVector / 2;
#pragma unroll
  for (int first = 0; first < kVector; first += kHalf) {
    float slopes[kHalf], activated[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      slopes[i] = centred[first + i] * scale[first + i] + offset[first + i];
    }
    ActivateAndDifferentiate<T>(p.activation, p.derivative, p.slope, slopes, activated);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      sums[0][first + i] += activated[i];
      sums[1][first + i] += slopes[i];
      sums[2][first + i] += slopes[i] * centred[first + i];
    }
  }
}

// The grid and the threads are those of masked_sums.cu.
template <class Tag>
__global__ void __launch_bounds__(kPassThreads, 2)
    SumActivated(const ActivatedSums p, int slices, int lanes, int steps) {
  using T = typename Tag::Element;
  constexpr int kUnroll = Tag::kUnroll, kSums = Tag::kDerivatives ? 3 : 1;
  __shared__ ChannelSums<kSums> of_threads;
  const int segment = static_cast<int>(blockIdx.x) / slices;
  const int slice = static_cast<int>(blockIdx.x) % slices;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int step = static_cast<int>(threadIdx.x) / lanes;
  const int64_t channel = (int64_t{slice} * lanes + lane) * kVector;
  float sums[kSums][kVector] = {};
  if (step < steps && channel < p.channels) {
    float mean[kVector], scale[kVector], offset[kVector];
    LoadOfSegment(p.mean, segment, channel, 0, mean);
    LoadOfSegment(p.scale, segment, channel, 1, scale);
    LoadOfSegment(p.offset, segment, channel, 0, offset);
    const int64_t first = segment * p.rows * p.channels + channel;
    const auto load = [&](int64_t block, ChannelVector<T>(&y)[kUnroll]) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t row = (block * kUnroll + u) * steps + step;
        if (block >= 0 && row < p.rows) y[u] = LoadChannels<T>(p.y, first + row * p.channels);
      }
    };
    const int64_t rows_of_block = kUnroll * steps;
    int64_t block = (p.rows + rows_of_block - 1) / rows_of_block - 1 - blockIdx.y;
    // For silu the special function unit takes about as long as DRAM, so the loads of the next
    // block overlap the activations of this one.
    ChannelVector<T> y[kUnroll], next[kUnroll];
    load(block, y);
    for (; block >= 0; block -= p.parts) {
      load(block - p.parts, next);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if ((block * kUnroll + u) * steps + step < p.rows) {
          float values[kVector];
          y[u].Unpack(values);
#pragma unroll
          for (int i = 0; i < kVector; ++i) values[i] -= mean[i];
          if constexpr (Tag::kDerivatives) {
            AddWithDerivatives<T>(p, values, scale, offset, sums);
          } else {
#pragma unroll
            for (int i = 0; i < kVector; ++i) values[i] = values[i] * scale[i] + offset[i];
            Activate<T>(p.activation, p.slope, values);
#pragma unroll
            for (int i = 0; i < kVector; ++i) sums[0][i] += values[i];
          }
        }
        y[u] = next[u];
      }
    }
  }
  of_threads.Keep(sums);
  const int columns = lanes * kVector;
  const int64_t out_channel = int64_t{slice} * columns + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= columns || out_channel >= p.channels) return;
  const int64_t part = segment * p.parts + blockIdx.y;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    p.sums[(part * kSums + s) * p.channels + out_channel] = of_threads.Total(s, lanes, steps);
  }
}

template <class Tag>
Status LaunchOf(const ActivatedSums& p, void* stream) {
  return LaunchSumOfRows<SumActivated<Tag>>("activated_sums", p, stream);
}

#define JAXCONV_OF_masked_sums(...)
#define JAXCONV_OF_moments(...)
#define JAXCONV_OF_normalise(...)
#define JAXCONV_OF_normalise_add(...)
#define PASS(pass, types, variant, form) JAXCONV_OF_##pass(types, variant, JAXCONV_PASS_UNPACK form)
#define JAXCONV_OF_activated_sums(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_TAG, activated_sums, variant, ActivatedForm, __VA_ARGS__)
#include "cuda/normalisation/kernels.def"
#undef JAXCONV_OF_activated_sums

constexpr PassLaunch<ActivatedSums> kLaunches[] = {
#define JAXCONV_OF_activated_sums(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_ROW, activated_sums, variant, LaunchOf, __VA_ARGS__)
#include "cuda/normalisation/kernels.def"
};

}  // namespace

Status LaunchActivatedSums(DType dtype, const ActivatedSums& p, void* stream) {
  JAXCONV_RETURN_IF_ERROR(CheckCut(p.segments, p.rows, p.channels, p.parts));
  JAXCONV_RETURN_IF_ERROR(CheckAligned({p.y, p.mean.numbers, p.scale.numbers, p.offset.numbers}));
  const bool derivatives = p.derivative != Derivative::kNone;
  if (derivatives && ActivationOf(p.derivative) != p.activation) {
    return Status::Unimplemented("activated sums: expected the activation's derivative");
  }
  const int rows = normalisation::RowsOfThread("activated_sums", dtype, derivatives);
  return LaunchOfForm(kLaunches, dtype, {rows, derivatives}, p, stream);
}

}  // namespace jaxconv
