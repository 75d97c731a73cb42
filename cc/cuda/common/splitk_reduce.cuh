// Sums split-K slices, then applies the epilogue. The order depends only on the number of slices,
// so every run gives the same bits.
//
// A CTA computes adjacent outputs, up to 4 per thread, and divides the slices among its rows of
// threads: a thread adds a run of consecutive slices in order, then the first row of threads adds
// the runs in order. Without this division, a small output with many slices (wgrad over a large
// image) would occupy a few threads that wait for one slice after another. Eight loads are in
// flight before the first addition.
#ifndef JAXCONV_CUDA_COMMON_SPLITK_REDUCE_CUH_
#define JAXCONV_CUDA_COMMON_SPLITK_REDUCE_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/splitk_reduce.h"

namespace jaxconv {

inline constexpr int kSplitkThreads = 256;
inline constexpr int kSplitkInFlight = 8;
// The most rows of threads in a CTA; more would make the rows too short to read whole cache lines.
inline constexpr int kSplitkMaxRuns = 32;

template <typename Out, int kWidth, class Epilogue>
__global__ void __launch_bounds__(kSplitkThreads)
    SplitkReduce(const float* __restrict__ partial, int64_t elements, int64_t slices,
                 int64_t slices_of_run, Out* out, int64_t channels,
                 const __grid_constant__ EpilogueParams epilogue_params) {
  __shared__ float sums[kWidth][kSplitkThreads];
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth;
  const bool inside = first < elements;
  const int64_t begin = threadIdx.y * slices_of_run;
  const int64_t end = min(slices, begin + slices_of_run);
  // The residual is loaded together with the slices; otherwise its load would follow their sum.
  [[maybe_unused]] const bool by_vectors = kWidth == 4 && channels % 4 == 0;
  [[maybe_unused]] Neighbours<Out, kWidth> residual{};
  if constexpr (!Epilogue::kPlain) {
    if (by_vectors && inside && threadIdx.y == 0 && epilogue_params.residual != nullptr) {
      residual = Epilogue(epilogue_params).template Residual<Out, kWidth>(first);
    }
  }
  float sum[kWidth] = {};
  for (int64_t slice = begin; inside && slice < end; slice += kSplitkInFlight) {
    Pack<float, kWidth> packs[kSplitkInFlight];
#pragma unroll
    for (int i = 0; i < kSplitkInFlight; ++i) {
      if (slice + i < end) packs[i].Load(partial + (slice + i) * elements + first);
    }
#pragma unroll
    for (int i = 0; i < kSplitkInFlight; ++i) {
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
  if constexpr (!Epilogue::kPlain) {
    const Epilogue epilogue(epilogue_params);
    if (by_vectors) {
      epilogue.Scale(epilogue.template Terms<kWidth>(static_cast<int32_t>(first % channels)), sum);
      epilogue.template Add<Out>(sum, residual, first);
      Activate<Out>(epilogue_params.activation, epilogue_params.negative_slope, sum);
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const int64_t at = first + e;
        const OutputPlace place{at, static_cast<int32_t>(at / channels),
                                static_cast<int32_t>(at % channels), true};
        sum[e] = epilogue.template operator()<Out>(sum[e], place);
      }
    }
  }
  if constexpr (kWidth == 4) {
    StoreQuad(out + first, sum);
  } else {
    out[first] = FromFloat<Out>(sum[0]);
  }
}

template <class Epilogue, typename Out>
Status LaunchSplitkReduceTo(const float* partial, int64_t elements, int64_t slices,
                            int64_t channels, const EpilogueParams& epilogue, void* out,
                            void* stream) {
  const int width = elements % 4 == 0 ? 4 : 1;
  int runs = 1;
  while (runs < kSplitkMaxRuns && runs * kSplitkInFlight < slices) runs *= 2;
  LaunchConfig config;
  config.threads = dim3(kSplitkThreads / runs, runs);
  config.grid = static_cast<unsigned>((elements / width + config.threads.x - 1) / config.threads.x);
  return width == 4
             ? Launch<SplitkReduce<Out, 4, Epilogue>>("splitk_reduce", config, stream, partial,
                                                      elements, slices, (slices + runs - 1) / runs,
                                                      static_cast<Out*>(out), channels, epilogue)
             : Launch<SplitkReduce<Out, 1, Epilogue>>("splitk_reduce", config, stream, partial,
                                                      elements, slices, (slices + runs - 1) / runs,
                                                      static_cast<Out*>(out), channels, epilogue);
}

// Like LaunchSplitkReduce, with an epilogue over `channels` output channels, the fastest axis.
template <class Epilogue>
Status LaunchSplitkReduceWith(const float* partial, int64_t elements, int64_t slices,
                              int64_t channels, const EpilogueParams& epilogue, void* out,
                              DType out_dtype, void* stream) {
  switch (out_dtype) {
    case DType::kF32:
      return LaunchSplitkReduceTo<Epilogue, float>(partial, elements, slices, channels, epilogue,
                                                   out, stream);
    case DType::kF16:
      return LaunchSplitkReduceTo<Epilogue, __half>(partial, elements, slices, channels, epilogue,
                                                    out, stream);
    case DType::kBF16:
      return LaunchSplitkReduceTo<Epilogue, __nv_bfloat16>(partial, elements, slices, channels,
                                                           epilogue, out, stream);
    default:
      return Status::Unimplemented(std::string("split-K reduction to ") + Name(out_dtype));
  }
}

// The reduction after a kernel with this epilogue; compiled once for each epilogue.
template <class Epilogue>
Status ReduceSlices(const float* partial, int64_t elements, int64_t slices, int64_t channels,
                    const EpilogueParams& epilogue, void* out, DType out_dtype, void* stream) {
  if constexpr (Epilogue::kPlain) {
    return LaunchSplitkReduce(partial, elements, slices, out, out_dtype, stream);
  } else {
    return LaunchFusedSplitkReduce(partial, elements, slices, channels, epilogue, out, out_dtype,
                                   stream);
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_SPLITK_REDUCE_CUH_
