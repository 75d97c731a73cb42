// The sum of split-K slices in a fixed order, so that every run gives the same bits.
//
// One thread owns up to 4 neighbouring outputs and walks the slices; neighbouring threads own
// neighbouring quads, so a slice is read in whole lines. Eight loads are in flight before the first
// addition: the additions are ordered, the loads need not be. Few outputs of many slices are walked
// by 16 groups of threads, whose sums meet in shared memory and are added in the groups' order.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda/device/element.cuh"
#include "cuda/device/epilogue.cuh"
#include "cuda/kernels/igemm_simt.h"

namespace jaxconv {
namespace {

constexpr int kThreads = 128;
constexpr int kInFlight = 8;

// sum += the slices from `slice` to `end` of the outputs at `first`.
template <int kWidth>
__device__ __forceinline__ void AddSlices(const float* __restrict__ partial, int64_t elements,
                                          int64_t first, int64_t slice, int64_t end,
                                          float (&sum)[kWidth]) {
  for (; slice < end; slice += kInFlight) {
    Pack<float, kWidth> packs[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (slice + i < end) packs[i].Load(partial + (slice + i) * elements + first);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (slice + i >= end) break;
      float values[kWidth];
      packs[i].Unpack(values);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e] += values[e];
    }
  }
}

template <typename Out, int kWidth>
__device__ __forceinline__ void StoreSum(Out* out, const float (&sum)[kWidth]) {
  if constexpr (kWidth == 4) {
    StoreQuad(out, sum);
  } else {
    *out = FromFloat<Out>(sum[0]);
  }
}

template <typename Out, int kWidth>
__global__ void __launch_bounds__(kThreads)
    SplitkReduce(const float* __restrict__ partial, int64_t elements, int64_t slices, Out* out) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (first >= elements) return;
  float sum[kWidth] = {};
  AddSlices(partial, elements, first, 0, slices, sum);
  StoreSum(out + first, sum);
}

// A CTA: 32 outputs (or quads) by kGroups groups of the slices.
constexpr int kGroups = 16;

template <typename Out, int kWidth>
__global__ void __launch_bounds__(32 * kGroups)
    SplitkReduceGroups(const float* __restrict__ partial, int64_t elements, int64_t slices,
                       Out* out) {
  __shared__ float sums[kGroups][32 * kWidth];
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  const int64_t first = (int64_t{blockIdx.x} * 32 + lane) * kWidth;
  const int64_t of_group = (slices + kGroups - 1) / kGroups;
  float sum[kWidth] = {};
  if (first < elements) {
    AddSlices(partial, elements, first, group * of_group, min(slices, (group + 1) * of_group), sum);
  }
#pragma unroll
  for (int e = 0; e < kWidth; ++e) sums[group][lane * kWidth + e] = sum[e];
  __syncthreads();
  if (group > 0 || first >= elements) return;
#pragma unroll
  for (int from = 1; from < kGroups; ++from) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sum[e] += sums[from][lane * kWidth + e];
  }
  StoreSum(out + first, sum);
}

// Below this many CTAs of one thread an output, slices are walked by groups, if they are many.
constexpr int64_t kFewCtas = 64;
constexpr int64_t kManySlices = 64;

template <typename Out>
void Launch(const float* partial, int64_t elements, int64_t slices, void* out,
            cudaStream_t stream) {
  const int width = elements % 4 == 0 ? 4 : 1;
  const int64_t ctas = (elements / width + kThreads - 1) / kThreads;
  if (ctas <= kFewCtas && slices >= kManySlices) {
    auto kernel = width == 4 ? SplitkReduceGroups<Out, 4> : SplitkReduceGroups<Out, 1>;
    kernel<<<static_cast<unsigned>((elements / width + 31) / 32), 32 * kGroups, 0, stream>>>(
        partial, elements, slices, static_cast<Out*>(out));
    return;
  }
  auto kernel = width == 4 ? SplitkReduce<Out, 4> : SplitkReduce<Out, 1>;
  kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(partial, elements, slices,
                                                               static_cast<Out*>(out));
}

}  // namespace

Status LaunchSplitkReduce(const float* partial, int64_t elements, int64_t slices, void* out,
                          DType out_dtype, void* stream) {
  auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (out_dtype) {
    case DType::kF32:
      Launch<float>(partial, elements, slices, out, cuda_stream);
      break;
    case DType::kF16:
      Launch<__half>(partial, elements, slices, out, cuda_stream);
      break;
    case DType::kBF16:
      Launch<__nv_bfloat16>(partial, elements, slices, out, cuda_stream);
      break;
    default:
      return Status::Unimplemented(std::string("split-K reduction to ") + Name(out_dtype));
  }
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    return Status::Internal(std::string("split-K reduction: ") + cudaGetErrorString(error));
  }
  return {};
}

}  // namespace jaxconv
