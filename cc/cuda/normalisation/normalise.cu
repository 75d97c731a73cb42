#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/activation.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/normalisation/channel_vectors.cuh"
#include "cuda/normalisation/normalise.h"
#include "cuda/normalisation/plan.h"

namespace jaxconv {
namespace {

constexpr int kVector = kChannelsOfThread;

template <typename T, int kUnrollArg>
struct NormaliseForm {
  using Element = T;
  static constexpr int kUnroll = kUnrollArg;
};

// The grid and the threads are those of normalise_add.cu, with a slice for each segment. A thread
// keeps its channels' vectors in registers. XLA's pass loads them for every four elements, divides
// their indices and computes in full float32 precision, which takes longer than DRAM.
template <class Tag>
__global__ void __launch_bounds__(kPassThreads, normalisation::kNormaliseCtas)
    NormaliseRows(const Normalise p, int slices, int lanes, int steps) {
  using T = typename Tag::Element;
  constexpr int kUnroll = Tag::kUnroll;
  const int segment = static_cast<int>(blockIdx.x) / slices;
  const int slice = static_cast<int>(blockIdx.x) % slices;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int step = static_cast<int>(threadIdx.x) / lanes;
  const int64_t channel = (int64_t{slice} * lanes + lane) * kVector;
  if (step >= steps || channel >= p.channels) return;
  float mean[kVector], scale[kVector], offset[kVector];
  LoadOfSegment(p.mean, segment, channel, 0, mean);
  LoadOfSegment(p.scale, segment, channel, 1, scale);
  LoadOfSegment(p.offset, segment, channel, 0, offset);
  const int64_t first = segment * p.rows * p.channels + channel;
  const int64_t rows_of_block = kUnroll * steps;
  const int64_t blocks = (p.rows + rows_of_block - 1) / rows_of_block;
  for (int64_t block = blocks - 1 - blockIdx.y; block >= 0; block -= gridDim.y) {
    const int64_t row = block * rows_of_block + step;
    ChannelVector<T> y[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t here = row + u * steps;
      if (here < p.rows) y[u] = LoadLastChannels<T>(p.y, first + here * p.channels);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t here = row + u * steps;
      if (here >= p.rows) continue;
      float values[kVector];
      y[u].Unpack(values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        values[i] = fmaf(values[i] - mean[i], scale[i], offset[i]);
      }
      ActivateSlow<T>(p.activation, values);
      ChannelVector<T>::Rounded(values).Store(p.z, first + here * p.channels);
    }
  }
}

template <class Tag>
Status LaunchOf(const Normalise& p, void* stream) {
  return LaunchRowByRow<NormaliseRows<Tag>>("normalise", p, p.segments, Tag::kUnroll, stream);
}

#define JAXCONV_OF_activated_sums(...)
#define JAXCONV_OF_masked_sums(...)
#define JAXCONV_OF_moments(...)
#define JAXCONV_OF_normalise_add(...)
#define PASS(pass, types, variant, form) JAXCONV_OF_##pass(types, variant, JAXCONV_PASS_UNPACK form)
#define JAXCONV_OF_normalise(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_TAG, normalise, variant, NormaliseForm, __VA_ARGS__)
#include "cuda/normalisation/kernels.def"
#undef JAXCONV_OF_normalise

constexpr PassLaunch<Normalise> kLaunches[] = {
#define JAXCONV_OF_normalise(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_ROW, normalise, variant, LaunchOf, __VA_ARGS__)
#include "cuda/normalisation/kernels.def"
};

}  // namespace

Status LaunchNormalise(DType dtype, const Normalise& p, void* stream) {
  JAXCONV_RETURN_IF_ERROR(CheckCut(p.segments, p.rows, p.channels, 1));
  JAXCONV_RETURN_IF_ERROR(
      CheckAligned({p.y, p.z, p.mean.numbers, p.scale.numbers, p.offset.numbers}));
  JAXCONV_RETURN_IF_ERROR(normalisation::CheckExponential(p.activation));
  return LaunchOfForm(kLaunches, dtype, {normalisation::RowsOfThread("normalise", dtype)}, p,
                      stream);
}

}  // namespace jaxconv
