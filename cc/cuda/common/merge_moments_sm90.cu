#include <cuda_runtime.h>

#include <cstring>

#include "cuda/common/launch.cuh"
#include "cuda/common/merge_moments.h"
#include "cuda/ptx/cluster_sm90.cuh"
#include "cuda/ptx/grid_dependency_sm90.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv {
namespace {

constexpr int kColumns = kMomentColumns, kRuns = 64;  // threads of a CTA
constexpr int kWarps = kRuns * kColumns / 32, kRunsOfWarp = 32 / kColumns;
constexpr int kInFlight = 8;

__device__ __forceinline__ void Add(const ChannelSums& more, ChannelSums* sums) {
  sums->sum += more.sum, sums->squares += more.squares;
}

// Adds the runs of a CTA in a fixed order; the result is valid in the first kColumns threads.
__device__ __forceinline__ ChannelSums AddRuns(ChannelSums sums, ChannelSums (*of_warp)[kColumns]) {
  const int column = threadIdx.x % kColumns, warp = threadIdx.x / 32;
#pragma unroll
  for (int run = 1; run < kRunsOfWarp; run *= 2) {
    const int lanes = run * kColumns;
    Add({__shfl_xor_sync(0xffffffff, sums.sum, lanes),
         __shfl_xor_sync(0xffffffff, sums.squares, lanes)},
        &sums);
  }
  if (threadIdx.x % 32 < kColumns) of_warp[warp][column] = sums;
  __syncthreads();
  if (threadIdx.x >= kColumns) return {};
  ChannelSums all = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) Add(of_warp[w][column], &all);
  return all;
}

// A cluster: kColumns channels; its CTAs: the parts of the slots.
__global__ void __launch_bounds__(kColumns* kRuns)
    MergeMoments(const ChannelSums* slots_sums, int64_t slots, int64_t channels,
                 int64_t slots_of_part, int32_t parts, double rows, float* statistics) {
  __shared__ ChannelSums of_warp[kWarps][kColumns];
  __shared__ ChannelSums of_part[kColumns];
  WaitForPrecedingGrids();
  LetNextGridStart();
  const int column = threadIdx.x % kColumns, run = threadIdx.x / kColumns;
  const int32_t part = blockIdx.x % parts;
  const int64_t channel = int64_t{blockIdx.x / parts} * kColumns + column;
  const int64_t begin = part * slots_of_part, end = min(slots, begin + slots_of_part);
  ChannelSums sums = {};
  for (int64_t slot = begin + run; channel < channels && slot < end; slot += kInFlight * kRuns) {
    ChannelSums found[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t at = slot + i * kRuns;
      found[i] = at < end ? slots_sums[at * channels + channel] : ChannelSums{0, 0};
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) Add(found[i], &sums);
  }
  sums = AddRuns(sums, of_warp);
  if (parts > 1) {
    if (threadIdx.x < kColumns) of_part[column] = sums;
    ClusterArrive();
    ClusterWait();
    if (part == 0 && threadIdx.x < kColumns) {
      sums = {};
      for (int32_t rank = 0; rank < parts; ++rank) {
        const float4 words = LoadCluster(AddressInCluster(SharedAddress(&of_part[column]), rank));
        ChannelSums of_rank;
        memcpy(&of_rank, &words, sizeof(of_rank));
        Add(of_rank, &sums);
      }
    }
    // No CTA ends before the first has read its sums.
    ClusterArriveRelaxed();
    ClusterWait();
  }
  if (part > 0 || threadIdx.x >= kColumns || channel >= channels) return;
  const double mean = sums.sum / rows;
  double deviations = sums.squares - sums.sum * mean;
  if (deviations < 0) deviations = 0;  // NaN stays
  statistics[channel] = static_cast<float>(mean);
  statistics[channels + channel] = static_cast<float>(deviations);
}

}  // namespace

Status LaunchMergeMoments(const MomentSlots& slots, int64_t rows, void* workspace,
                          float* statistics, void* stream) {
  const int64_t parts = slots.Parts();
  LaunchConfig config;
  config.threads = kColumns * kRuns;
  config.cluster = static_cast<unsigned>(parts);
  config.grid = static_cast<unsigned>((slots.channels + kColumns - 1) / kColumns * parts);
  config.overlaps = true;
  return Launch<MergeMoments>("merge_moments", config, stream,
                              static_cast<const ChannelSums*>(workspace), slots.slots,
                              slots.channels, (slots.slots + parts - 1) / parts,
                              static_cast<int32_t>(parts), static_cast<double>(rows), statistics);
}

}  // namespace jaxconv
