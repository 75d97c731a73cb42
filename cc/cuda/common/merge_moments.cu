#include <cuda_runtime.h>

#include "cuda/common/launch.cuh"
#include "cuda/common/merge_moments.h"

namespace jaxconv {
namespace {

constexpr int kColumns = kMomentColumns, kRuns = 16;  // threads of a CTA
constexpr int kInFlight = 8;

// Of some slots of a channel.
struct MomentSums {
  double means, squared_means, squares;

  __device__ void Add(const MomentSums& more) {
    means += more.means;
    squared_means += more.squared_means;
    squares += more.squares;
  }
};

// The runs of a CTA, in order; of the threads of the first.
__device__ MomentSums AddRuns(MomentSums sums, MomentSums (*of_run)[kColumns]) {
  of_run[threadIdx.y][threadIdx.x] = sums;
  __syncthreads();
  for (int run = 1; threadIdx.y == 0 && run < kRuns; ++run) sums.Add(of_run[run][threadIdx.x]);
  __syncthreads();
  return sums;
}

__device__ void StoreStatistics(const MomentSums& sums, double rows, int64_t channels,
                                int64_t channel, float* statistics) {
  // Of equal means, the difference is what rounding leaves. NaN stays.
  double between = sums.squared_means - sums.means * sums.means / rows;
  if (between < 0) between = 0;
  statistics[channel] = static_cast<float>(sums.means / rows);
  statistics[channels + channel] = static_cast<float>(sums.squares + between);
}

// blockIdx.y: part of the slots.
__global__ void __launch_bounds__(kColumns* kRuns)
    MergeMoments(const float2* moments, int32_t* counters, const int32_t* slot_rows, int64_t slots,
                 int64_t channels, int64_t slots_of_part, double rows, MomentSums* parts,
                 float* statistics) {
  __shared__ MomentSums of_run[kRuns][kColumns];
  __shared__ int32_t ended;
  const int64_t channel = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  const int64_t begin = blockIdx.y * slots_of_part, end = min(slots, begin + slots_of_part);
  MomentSums sums = {};
  for (int64_t slot = begin + threadIdx.y; channel < channels && slot < end;
       slot += kInFlight * kRuns) {
    float2 found[kInFlight];
    int32_t count[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t at = slot + i * kRuns;
      found[i] = at < end ? moments[at * channels + channel] : make_float2(0, 0);
      count[i] = at < end ? slot_rows[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const double mean = found[i].x, scaled = count[i] * mean;
      sums.means += scaled;
      sums.squared_means += scaled * mean;
      sums.squares += found[i].y;
    }
  }
  sums = AddRuns(sums, of_run);
  if (gridDim.y > 1) {
    // Whichever CTA is the last adds all parts in the same order.
    if (threadIdx.y == 0 && channel < channels) {
      parts[blockIdx.y * channels + channel] = sums;
      __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) ended = atomicAdd(counters + blockIdx.x, 1);
    __syncthreads();
    if (ended + 1 < static_cast<int32_t>(gridDim.y)) return;
    __threadfence();
    sums = {};
    for (unsigned part = threadIdx.y; channel < channels && part < gridDim.y; part += kRuns) {
      sums.Add(parts[part * channels + channel]);
    }
    sums = AddRuns(sums, of_run);
  }
  if (threadIdx.y == 0 && channel < channels) {
    StoreStatistics(sums, rows, channels, channel, statistics);
  }
}

}  // namespace

Status LaunchMergeMoments(const MomentSlots& slots, int64_t rows, void* workspace,
                          float* statistics, void* stream) {
  EpilogueParams bound;
  slots.Bind(workspace, &bound);
  char* const first = static_cast<char*>(workspace);
  const int64_t parts = slots.Parts();
  LaunchConfig config;
  config.threads = dim3(kColumns, kRuns);
  config.grid = dim3(static_cast<unsigned>(slots.Counters()), static_cast<unsigned>(parts));
  return Launch<MergeMoments>(
      "merge_moments", config, stream, reinterpret_cast<const float2*>(bound.moments),
      reinterpret_cast<int32_t*>(first + slots.CountersAt()),
      static_cast<const int32_t*>(bound.moment_rows), slots.slots, slots.channels,
      (slots.slots + parts - 1) / parts, static_cast<double>(rows),
      reinterpret_cast<MomentSums*>(first + slots.PartsAt()), statistics);
}

}  // namespace jaxconv
