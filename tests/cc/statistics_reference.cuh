// Reference in double for the mean and the sum of squared deviations of each channel.
#ifndef JAXCONV_TESTS_CC_STATISTICS_REFERENCE_CUH_
#define JAXCONV_TESTS_CC_STATISTICS_REFERENCE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "core/conv_problem.h"

namespace jaxconv {

// Compares (2, channels) statistics with those of `expected`, which kRounded rounds to the result's
// type. Each CTA takes one channel. found[0] counts channels that differ; found[1] is the first.
template <double (*kRounded)(double, DType)>
__global__ void CompareStatistics(const float* statistics, DType dtype, const double* expected,
                                  int64_t elements, int64_t channels, unsigned long long* found) {
  __shared__ double sums[256];
  const int64_t channel = blockIdx.x;
  double mean = 0, squares = 0;
  for (int pass = 0; pass < 2; ++pass) {
    double sum = 0;
    for (int64_t i = threadIdx.x * channels + channel; i < elements; i += blockDim.x * channels) {
      const double value = kRounded(expected[i], dtype);
      sum += pass == 0 ? value : (value - mean) * (value - mean);
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
    for (unsigned i = 0; i < blockDim.x; ++i) sum += sums[i];
    __syncthreads();
    (pass == 0 ? mean : squares) = pass == 0 ? sum * channels / elements : sum;
  }
  if (threadIdx.x > 0) return;
  const double deviation = sqrt(squares * channels / elements);
  if (fabs(statistics[channel] - mean) <= 1e-6 * (fabs(mean) + deviation) &&
      fabs(statistics[channels + channel] - squares) <= 1e-6 * squares) {
    return;  // NaN differs
  }
  atomicAdd(&found[0], 1ull);
  atomicMin(&found[1], static_cast<unsigned long long>(channel));
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_STATISTICS_REFERENCE_CUH_
