#include <cuda_runtime.h>

#include "cuda/common/launch.cuh"
#include "cuda/common/merge_moments.h"
#include "cuda/ptx/grid_dependency_sm90.cuh"

namespace jaxconv {
namespace {

constexpr int kColumns = kMomentColumns, kRuns = 64;  // threads of a CTA
constexpr int kInFlight = 8;

// Adds the runs of a CTA in a fixed order; the result is valid in the threads of the first run.
__device__ ChannelSums AddRuns(ChannelSums sums, ChannelSums (*of_run)[kColumns]) {
  __syncthreads();
  of_run[threadIdx.y][threadIdx.x] = sums;
  for (int half = kRuns / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
    const ChannelSums& more = of_run[threadIdx.y + half][threadIdx.x];
    sums.sum += more.sum, sums.squares += more.squares;
    of_run[threadIdx.y][threadIdx.x] = sums;
  }
  return sums;
}

// blockIdx.y: part of the slots.
__global__ void __launch_bounds__(kColumns* kRuns)
    MergeMoments(const ChannelSums* slots_sums, int32_t* counters, int64_t slots, int64_t channels,
                 int64_t slots_of_part, double rows, ChannelSums* parts, float* statistics) {
  __shared__ ChannelSums of_run[kRuns][kColumns];
  __shared__ int32_t ended;
  WaitForPrecedingGrids();
  LetNextGridStart();
  const int64_t channel = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  const int64_t begin = blockIdx.y * slots_of_part, end = min(slots, begin + slots_of_part);
  ChannelSums sums = {};
  for (int64_t slot = begin + threadIdx.y; channel < channels && slot < end;
       slot += kInFlight * kRuns) {
    ChannelSums found[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t at = slot + i * kRuns;
      found[i] = at < end ? slots_sums[at * channels + channel] : ChannelSums{0, 0};
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      sums.sum += found[i].sum, sums.squares += found[i].squares;
    }
  }
  sums = AddRuns(sums, of_run);
  if (gridDim.y > 1) {
    // The last CTA, whichever it is, adds all parts in the same order.
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
    if (channel < channels && threadIdx.y < gridDim.y) {
      sums = parts[threadIdx.y * channels + channel];
    }
    sums = AddRuns(sums, of_run);
  }
  if (threadIdx.y > 0 || channel >= channels) return;
  const double mean = sums.sum / rows;
  double deviations = sums.squares - sums.sum * mean;
  if (deviations < 0) deviations = 0;  // NaN stays
  statistics[channel] = static_cast<float>(mean);
  statistics[channels + channel] = static_cast<float>(deviations);
}

}  // namespace

Status LaunchMergeMoments(const MomentSlots& slots, int64_t rows, void* workspace,
                          float* statistics, void* stream) {
  char* const first = static_cast<char*>(workspace);
  const int64_t parts = slots.Parts();
  LaunchConfig config;
  config.threads = dim3(kColumns, kRuns);
  config.grid = dim3(static_cast<unsigned>(slots.Counters()), static_cast<unsigned>(parts));
  config.overlaps = true;
  return Launch<MergeMoments>("merge_moments", config, stream,
                              reinterpret_cast<const ChannelSums*>(first + slots.SumsAt()),
                              reinterpret_cast<int32_t*>(first), slots.slots, slots.channels,
                              (slots.slots + parts - 1) / parts, static_cast<double>(rows),
                              reinterpret_cast<ChannelSums*>(first + slots.PartsAt()), statistics);
}

}  // namespace jaxconv
