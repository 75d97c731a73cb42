#include <cuda_runtime.h>

#include "cuda/common/launch.cuh"
#include "cuda/normalisation/channel_vectors.cuh"
#include "cuda/normalisation/derivative.cuh"
#include "cuda/normalisation/masked_sums.h"
#include "cuda/normalisation/plan.h"

namespace jaxconv {
namespace {

constexpr int kVector = kChannelsOfThread;

template <typename T>
using Vector = ChannelVector<T>;

// The form of an instance.
template <typename T, MaskBy::Kind kMaskByArg, int kGradientsArg, int kArraysArg>
struct SumForm {
  using Element = T;
  static constexpr MaskBy::Kind kMaskBy = kMaskByArg;
  static constexpr int kGradients = kGradientsArg, kArrays = kArraysArg;
};

// Adds a row of MaskBy::kActivation to its three sums. Half of the channels at a time, because of
// the registers.
template <typename T, int kSums>
__device__ __forceinline__ void AddActivated(const MaskedSums& p, const float (&gradient)[kVector],
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
      const int c = first + i;
      slopes[i] = centred[c] * scale[c] + offset[c];
    }
    ActivateAndDifferentiate<T>(p.activation, p.derivative, p.slope, slopes, activated);
    const bool selects = Selects(p.derivative);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int c = first + i;
      const float dz = selects && slopes[i] == 0 ? 0 : gradient[c] * slopes[i];
      sums[0][c] += dz;
      sums[1][c] += dz * centred[c];
      sums[2][c] += gradient[c] * activated[i];
    }
  }
}

// blockIdx.x: a segment and a slice of up to kMaxLanes vectors of channels; blockIdx.y: the part of
// the rows. The threads of a CTA cover `steps` rows of `lanes` vectors. All CTAs of a segment
// process adjacent rows and advance from the end of the arrays to the start: the previous kernel
// has written the end last, so L2 holds it.
template <class Tag>
__global__ void __launch_bounds__(kPassThreads, 2)
    SumMasked(const MaskedSums p, int slices, int lanes, int steps) {
  using T = typename Tag::Element;
  constexpr MaskBy::Kind kMaskBy = Tag::kMaskBy;
  constexpr int kGradients = Tag::kGradients, kArrays = Tag::kArrays;
  constexpr bool kActivated = kMaskBy == MaskBy::kActivation;
  constexpr bool kDerivative = kMaskBy == MaskBy::kDerivative || kActivated;
  constexpr bool kOperand = kMaskBy == MaskBy::kAffine || kDerivative;
  constexpr int kSums = 1 + kArrays + kActivated;
  constexpr int kLoads = kGradients + kArrays + (kMaskBy == MaskBy::kResult);
  // An activation's derivative takes about as long as DRAM, so the loads of the next rows overlap
  // it. Scale and offset take as many registers as the loads of one row.
  constexpr bool kAhead = kDerivative;
  constexpr int kUnroll =
      kRowsInFlight<(1 + kAhead) * kLoads * kVector * sizeof(T) + (kOperand ? 16 : 0)>;
  constexpr int kRoom = kArrays > 0 ? kArrays : 1;  // C++ arrays have at least one element
  __shared__ ChannelSums<kSums> of_threads;
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
    struct Rows {
      Vector<T> gradients[kUnroll][kGradients], arrays[kUnroll][kRoom], results[kUnroll];
      unsigned bits[kUnroll];
    };
    const auto load = [&](int64_t block, Rows* rows) {
      const int64_t row = block * rows_of_block + step;
      const int64_t at = (first_row + row) * p.channels + channel;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (block < 0 || row + u * steps >= p.rows) continue;
        const int64_t here = at + u * stride;
        if constexpr (kOperand) {
          rows->gradients[u][0] = LoadChannels<T>(p.gradient, here);
        } else {
          rows->gradients[u][0] = LoadLastChannels<T>(p.gradient, here);
        }
        if constexpr (kMaskBy == MaskBy::kResult) {
          rows->results[u] = LoadLastChannels<T>(p.result, here);
        }
        if constexpr (kMaskBy == MaskBy::kBits) rows->bits[u] = __ldcs(p.bits + here / kVector);
        if constexpr (kGradients == 2) {
          rows->gradients[u][1] = LoadLastChannels<T>(p.gradient2, here);
        }
#pragma unroll
        for (int a = 0; a < kArrays; ++a) {
          rows->arrays[u][a] = LoadChannels<T>(p.arrays[a], here);
        }
      }
    };
    Rows now, next;
    int64_t block = blocks - 1 - blockIdx.y;
    if constexpr (kAhead) load(block, &next);
    for (; block >= 0; block -= p.parts) {
      const int64_t row = block * rows_of_block + step;
      const int64_t at = (first_row + row) * p.channels + channel;
      if constexpr (kAhead) {
        now = next;
        load(block - p.parts, &next);
      } else {
        load(block, &now);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * steps >= p.rows) continue;
        float masked[kVector], of_mask[kVector], centred[kRoom][kVector];
        now.gradients[u][0].Unpack(masked);
        if constexpr (kGradients == 2) {
          now.gradients[u][1].AddTo(masked);
          Vector<T>::Rounded(masked).Unpack(masked);
        }
#pragma unroll
        for (int a = 0; a < kArrays; ++a) {
          now.arrays[u][a].Unpack(centred[a]);
#pragma unroll
          for (int i = 0; i < kVector; ++i) centred[a][i] -= means[a][i];
        }
        if constexpr (kMaskBy == MaskBy::kResult) now.results[u].Unpack(of_mask);
        if constexpr (kActivated) {
          AddActivated<T>(p, masked, centred[0], scale, offset, sums);
          continue;
        }
        if constexpr (kOperand) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) of_mask[i] = centred[0][i] * scale[i] + offset[i];
          Vector<T>::Rounded(of_mask).Unpack(of_mask);
        }
        if constexpr (kMaskBy == MaskBy::kDerivative) {
          Differentiate<T>(p.derivative, p.slope, of_mask);
          if (Selects(p.derivative)) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) masked[i] = of_mask[i] == 0 ? 0 : masked[i];
          }
#pragma unroll
          for (int i = 0; i < kVector; ++i) masked[i] *= of_mask[i];
          Vector<T>::Rounded(masked).Unpack(masked);
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if constexpr (kMaskBy == MaskBy::kBits) {
            if ((now.bits[u] >> i & 1) == 0) masked[i] = 0;
          } else if constexpr (kMaskBy == MaskBy::kResult || kMaskBy == MaskBy::kAffine) {
            // A NaN bound has no effect.
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
Status LaunchSums(const MaskedSums& p, void* stream) {
  return LaunchSumOfRows<SumMasked<Tag>>("masked_sums", p, stream);
}

#define JAXCONV_OF_activated_sums(...)
#define JAXCONV_OF_moments(...)
#define JAXCONV_OF_normalise(...)
#define JAXCONV_OF_normalise_add(...)
#define PASS(pass, types, variant, form) JAXCONV_OF_##pass(types, variant, JAXCONV_PASS_UNPACK form)
#define JAXCONV_OF_masked_sums(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_TAG, masked_sums, variant, SumForm, __VA_ARGS__)
#include "cuda/normalisation/kernels.def"
#undef JAXCONV_OF_masked_sums

constexpr PassLaunch<MaskedSums> kLaunches[] = {
#define JAXCONV_OF_masked_sums(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_ROW, masked_sums, variant, LaunchSums, __VA_ARGS__)
#include "cuda/normalisation/kernels.def"
};

}  // namespace

Status LaunchMaskedSums(DType dtype, const MaskedSums& p, void* stream) {
  JAXCONV_RETURN_IF_ERROR(CheckCut(p.segments, p.rows, p.channels, p.parts));
  JAXCONV_RETURN_IF_ERROR(
      CheckAligned({p.gradient, p.gradient2, p.result, p.arrays[0], p.arrays[1], p.masked,
                    p.means[0].numbers, p.means[1].numbers, p.scale.numbers, p.offset.numbers}));
  if (p.derivative != Derivative::kNone && p.scale.numbers == nullptr) {
    return Status::Unimplemented("masked sums: expected scale and offset for a derivative");
  }
  const bool activated = p.activation != Activation::kNone;
  if (activated && (ActivationOf(p.derivative) != p.activation || p.masked != nullptr)) {
    return Status::Unimplemented("masked sums: expected the activation's derivative and no dz");
  }
  const MaskBy::Kind told = p.bits != nullptr                   ? MaskBy::kBits
                            : p.result != nullptr               ? MaskBy::kResult
                            : p.scale.numbers == nullptr        ? MaskBy::kNone
                            : p.derivative == Derivative::kNone ? MaskBy::kAffine
                            : activated                         ? MaskBy::kActivation
                                                                : MaskBy::kDerivative;
  const int gradients = p.gradient2 != nullptr ? 2 : 1;
  const int arrays = (p.arrays[0] != nullptr) + (p.arrays[1] != nullptr);
  return LaunchOfForm(kLaunches, dtype, {told, gradients, arrays}, p, stream);
}

}  // namespace jaxconv
