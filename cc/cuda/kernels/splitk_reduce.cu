// The sum of split-K slices, in an order that the number of slices alone settles, so that every run
// gives the same bits.
//
// A CTA owns neighbouring outputs, up to 4 a thread, and its rows of threads share the slices among
// them: a thread adds a run of neighbouring slices in order, then the first row adds the runs in
// order. A small output of many slices (a filter over a large image) would otherwise be a few
// threads waiting for one slice after another. Eight loads are in flight before the first addition:
// the additions are ordered, the loads need not be.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda/device/element.cuh"
#include "cuda/device/epilogue.cuh"
#include "cuda/kernels/igemm_simt.h"

namespace jaxconv {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 8;
// Rows of a CTA at most, so that the neighbours of a row still read whole lines.
constexpr int kMaxRuns = 32;

template <typename Out, int kWidth>
__global__ void __launch_bounds__(kThreads)
    SplitkReduce(const float* __restrict__ partial, int64_t elements, int64_t slices,
                 int64_t slices_of_run, Out* out) {
  __shared__ float sums[kWidth][kThreads];
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth;
  const bool inside = first < elements;
  const int64_t begin = threadIdx.y * slices_of_run;
  const int64_t end = min(slices, begin + slices_of_run);
  float sum[kWidth] = {};
  for (int64_t slice = begin; inside && slice < end; slice += kInFlight) {
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
  if (blockDim.y > 1) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[e][threadIdx.y * blockDim.x + threadIdx.x] = sum[e];
    __syncthreads();
    if (threadIdx.y > 0) return;
    for (unsigned run = 1; run < blockDim.y; ++run) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e] += sums[e][run * blockDim.x + threadIdx.x];
    }
  }
  if (!inside) return;
  if constexpr (kWidth == 4) {
    StoreQuad(out + first, sum);
  } else {
    out[first] = FromFloat<Out>(sum[0]);
  }
}

template <typename Out>
void Launch(const float* partial, int64_t elements, int64_t slices, void* out,
            cudaStream_t stream) {
  const int width = elements % 4 == 0 ? 4 : 1;
  int runs = 1;
  while (runs < kMaxRuns && runs * kInFlight < slices) runs *= 2;
  const dim3 threads(kThreads / runs, runs);
  const int64_t ctas = (elements / width + threads.x - 1) / threads.x;
  auto kernel = width == 4 ? SplitkReduce<Out, 4> : SplitkReduce<Out, 1>;
  kernel<<<static_cast<unsigned>(ctas), threads, 0, stream>>>(
      partial, elements, slices, (slices + runs - 1) / runs, static_cast<Out*>(out));
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
