// Evaluates the definition of a floating-point convolution on the device, in double.
#ifndef JAXCONV_TESTS_CC_DEFINITION_CUH_
#define JAXCONV_TESTS_CC_DEFINITION_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/conv_problem.h"

namespace jaxconv {
namespace {

__device__ void Put(void* tensor, int64_t at, DType dtype, float value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(tensor)[at] = value;
      break;
    case DType::kF16:
      static_cast<__half*>(tensor)[at] = __float2half(value);
      break;
    default:
      static_cast<__nv_bfloat16*>(tensor)[at] = __float2bfloat16(value);
  }
}

__device__ double Get(const void* tensor, int64_t at, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(tensor)[at];
    case DType::kF16:
      return __half2float(static_cast<const __half*>(tensor)[at]);
    default:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(tensor)[at]);
  }
}

__device__ double Rounded(double value, DType dtype) {
  if (dtype == DType::kF16) return __half2float(__float2half(static_cast<float>(value)));
  if (dtype == DType::kBF16) return __bfloat162float(__float2bfloat16(static_cast<float>(value)));
  return value;
}

// The parameters of a problem that the definition needs, passed to kernels by value.
struct Window {
  Op op;
  int64_t n, groups, c, k;
  int64_t in[3], filter[3], out[3], stride[3], lhs_dilation[3], dilation[3], pad_lo[3];
  int64_t to_k, to_c;  // distances in the filter of neighbours along K and along C

  explicit Window(const ConvProblem& problem)
      : op(problem.op), n(problem.n), groups(problem.groups), c(problem.c), k(problem.k) {
    const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
    to_k = krsc ? problem.taps() * problem.c_per_group() : 1;
    to_c = krsc ? 1 : problem.k;
    for (int a = 0; a < 3; ++a) {
      in[a] = problem.in[a], filter[a] = problem.filter[a], out[a] = problem.out[a];
      stride[a] = problem.stride[a], lhs_dilation[a] = problem.lhs_dilation[a];
      dilation[a] = problem.dilation[a], pad_lo[a] = problem.pad_lo[a];
    }
  }
  static __device__ int64_t Volume(const int64_t (&extent)[3]) {
    return extent[0] * extent[1] * extent[2];
  }
  static __device__ int64_t Pixel(const int64_t (&extent)[3], const int64_t (&at)[3]) {
    return (at[0] * extent[1] + at[1]) * extent[2] + at[2];
  }
  static __device__ int64_t Split(int64_t index, const int64_t (&extent)[3], int64_t (&at)[3]) {
    for (int a = 2; a >= 0; --a) at[a] = index % extent[a], index /= extent[a];
    return index;
  }
  // Finds the input position under tap `tap` of output `out_at`. Returns false if it lies outside
  // or on a zero of input dilation.
  __device__ bool Input(const int64_t (&out_at)[3], const int64_t (&tap)[3],
                        int64_t (&in_at)[3]) const {
    for (int a = 0; a < 3; ++a) {
      const int64_t at = out_at[a] * stride[a] + tap[a] * dilation[a] - pad_lo[a];
      if (at < 0 || at % lhs_dilation[a] != 0 || at / lhs_dilation[a] >= in[a]) return false;
      in_at[a] = at / lhs_dilation[a];
    }
    return true;
  }
  // Finds the output whose tap `tap` lies on input `in_at`. Returns false if there is none.
  __device__ bool Output(const int64_t (&in_at)[3], const int64_t (&tap)[3],
                         int64_t (&out_at)[3]) const {
    for (int a = 0; a < 3; ++a) {
      const int64_t at = in_at[a] * lhs_dilation[a] - tap[a] * dilation[a] + pad_lo[a];
      if (at < 0 || at % stride[a] != 0 || at / stride[a] >= out[a]) return false;
      out_at[a] = at / stride[a];
    }
    return true;
  }
};

// One element of the result by the definition.
__device__ double Element(const Window& window, int64_t index, const void* lhs, const void* rhs,
                          DType dtype) {
  const int64_t c_group = window.c / window.groups, k_group = window.k / window.groups;
  const int64_t in_pixels = Window::Volume(window.in), out_pixels = Window::Volume(window.out);
  const int64_t taps = Window::Volume(window.filter);
  int64_t in_at[3], out_at[3], tap[3];
  double sum = 0;
  if (window.op == Op::kWgrad) {
    const int64_t k = index % window.k, c = index / window.k % c_group;
    const int64_t batch = Window::Split(index / window.k / c_group, window.filter, tap);
    const int64_t x_channel = k / k_group * c_group + c;
    for (int64_t i = 0; i < window.n * out_pixels; ++i) {
      const int64_t image = batch * window.n + Window::Split(i, window.out, out_at);
      if (!window.Input(out_at, tap, in_at)) continue;
      const int64_t x = (image * in_pixels + Window::Pixel(window.in, in_at)) * window.c;
      const int64_t y = (image * out_pixels + Window::Pixel(window.out, out_at)) * window.k;
      sum += Get(lhs, x + x_channel, dtype) * Get(rhs, y + k, dtype);
    }
    return sum;
  }
  const bool fprop = window.op == Op::kFprop;
  const int64_t channels = fprop ? window.k : window.c, channel = index % channels;
  const int64_t image =
      Window::Split(index / channels, fprop ? window.out : window.in, fprop ? out_at : in_at);
  const int64_t group = channel / (fprop ? k_group : c_group);
  for (int64_t t = 0; t < taps; ++t) {
    Window::Split(t, window.filter, tap);
    if (!(fprop ? window.Input(out_at, tap, in_at) : window.Output(in_at, tap, out_at))) continue;
    const int64_t w = (image / window.n * taps * window.k + t * window.to_c) * c_group;
    if (fprop) {
      const int64_t x = (image * in_pixels + Window::Pixel(window.in, in_at)) * window.c;
      const int64_t row = w + channel * window.to_k;
      for (int64_t c = 0; c < c_group; ++c) {
        sum += Get(lhs, x + group * c_group + c, dtype) * Get(rhs, row + c * window.to_c, dtype);
      }
    } else {
      const int64_t y = (image * out_pixels + Window::Pixel(window.out, out_at)) * window.k;
      const int64_t row = w + channel % c_group * window.to_c;
      for (int64_t k = group * k_group; k < (group + 1) * k_group; ++k) {
        sum += Get(lhs, y + k, dtype) * Get(rhs, row + k * window.to_k, dtype);
      }
    }
  }
  return sum;
}

__global__ void Define(Window window, const void* lhs, const void* rhs, DType dtype, double* result,
                       int64_t elements) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    result[i] = Element(window, i, lhs, rhs, dtype);
  }
}

}  // namespace
}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_DEFINITION_CUH_
