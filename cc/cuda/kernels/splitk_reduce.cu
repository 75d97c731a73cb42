// The sum of split-K slices, in the order of the slices, so that every run gives the same bits.
//
// One thread owns up to 4 neighbouring outputs and walks the slices; neighbouring threads own
// neighbouring quads, so a slice is read in whole lines. Eight loads are in flight before the first
// addition: the additions are ordered, the loads need not be.
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

template <typename Out, int kWidth>
__global__ void __launch_bounds__(kThreads)
    SplitkReduce(const float* __restrict__ partial, int64_t elements, int64_t slices, Out* out) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (first >= elements) return;
  float sum[kWidth] = {};
  for (int64_t slice = 0; slice < slices; slice += kInFlight) {
    Pack<float, kWidth> packs[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (slice + i < slices) packs[i].Load(partial + (slice + i) * elements + first);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (slice + i >= slices) break;
      float values[kWidth];
      packs[i].Unpack(values);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e] += values[e];
    }
  }
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
  const int64_t ctas = (elements / width + kThreads - 1) / kThreads;
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
