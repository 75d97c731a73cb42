#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/normalisation/channel_vectors.cuh"
#include "cuda/normalisation/moments.h"
#include "cuda/normalisation/plan.h"

namespace jaxconv {
namespace {

constexpr int kVector = kChannelsOfThread;

template <typename T, int kUnrollArg>
struct MomentsForm {
  using Element = T;
  static constexpr int kUnroll = kUnrollArg;
};

// The grid and the threads are those of masked_sums.cu.
template <class Tag>
__global__ void __launch_bounds__(kPassThreads, 2)
    SumMoments(const Moments p, int slices, int lanes, int steps) {
  using T = typename Tag::Element;
  constexpr int kUnroll = Tag::kUnroll;
  __shared__ ChannelSums<2> of_threads;
  const int segment = static_cast<int>(blockIdx.x) / slices;
  const int slice = static_cast<int>(blockIdx.x) % slices;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int step = static_cast<int>(threadIdx.x) / lanes;
  const int64_t channel = (int64_t{slice} * lanes + lane) * kVector;
  const int64_t first_row = segment * p.rows;
  const int64_t rows_of_block = kUnroll * steps;
  const int64_t blocks = (p.rows + rows_of_block - 1) / rows_of_block;
  const int64_t first_block = blocks - 1 - blockIdx.y;
  const int64_t pivot_row = first_row + first_block * rows_of_block;
  float sums[2][kVector] = {};
  if (step < steps && channel < p.channels) {
    float pivot[kVector];
    LoadChannels<T>(p.y, pivot_row * p.channels + channel).Unpack(pivot);
    const int64_t stride = steps * p.channels;
    for (int64_t block = first_block; block >= 0; block -= p.parts) {
      const int64_t row = block * rows_of_block + step;
      const int64_t at = (first_row + row) * p.channels + channel;
      ChannelVector<T> y[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * steps < p.rows) y[u] = LoadChannels<T>(p.y, at + u * stride);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u * steps >= p.rows) continue;
        float values[kVector];
        y[u].Unpack(values);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const float deviation = values[i] - pivot[i];
          sums[0][i] += deviation;
          sums[1][i] = fmaf(deviation, deviation, sums[1][i]);
        }
      }
    }
  }
  of_threads.Keep(sums);
  const int columns = lanes * kVector;
  const int64_t out_channel = int64_t{slice} * columns + threadIdx.x;
  if (static_cast<int>(threadIdx.x) >= columns || out_channel >= p.channels) return;
  const float sum = of_threads.Total(0, lanes, steps), squares = of_threads.Total(1, lanes, steps);
  // The first block belongs to part 0; only this block may end early.
  const int64_t count = (first_block + p.parts) / p.parts * rows_of_block -
                        (blockIdx.y == 0 ? blocks * rows_of_block - p.rows : 0);
  const float offset = sum / static_cast<float>(count);
  float* const out = p.moments + (segment * p.parts + blockIdx.y) * 3 * p.channels + out_channel;
  out[0] = ToFloat(static_cast<const T*>(p.y)[pivot_row * p.channels + out_channel]);
  out[p.channels] = offset;
  const float deviations = fmaf(-sum, offset, squares);
  out[2 * p.channels] = deviations < 0 ? 0 : deviations;  // NaN stays
}

template <class Tag>
Status LaunchOf(const Moments& p, void* stream) {
  return LaunchSumOfRows<SumMoments<Tag>>("moments", p, stream);
}

#define JAXCONV_OF_activated_sums(...)
#define JAXCONV_OF_masked_sums(...)
#define JAXCONV_OF_normalise(...)
#define JAXCONV_OF_normalise_add(...)
#define PASS(pass, types, variant, form) JAXCONV_OF_##pass(types, variant, JAXCONV_PASS_UNPACK form)
#define JAXCONV_OF_moments(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_TAG, moments, variant, MomentsForm, __VA_ARGS__)
#include "cuda/normalisation/kernels.def"
#undef JAXCONV_OF_moments

constexpr PassLaunch<Moments> kLaunches[] = {
#define JAXCONV_OF_moments(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_ROW, moments, variant, LaunchOf, __VA_ARGS__)
#include "cuda/normalisation/kernels.def"
};

}  // namespace

Status LaunchMoments(DType dtype, const Moments& p, void* stream) {
  JAXCONV_RETURN_IF_ERROR(CheckCut(p.segments, p.rows, p.channels, p.parts));
  JAXCONV_RETURN_IF_ERROR(CheckAligned({p.y}));
  return LaunchOfForm(kLaunches, dtype, {normalisation::RowsOfThread("moments", dtype)}, p, stream);
}

}  // namespace jaxconv
