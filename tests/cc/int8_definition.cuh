// The operands of int8_check, and the definition that it compares results with (core/epilogue.h).
#ifndef JAXCONV_TESTS_CC_INT8_DEFINITION_CUH_
#define JAXCONV_TESTS_CC_INT8_DEFINITION_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/conv_problem.h"
#include "cuda/common/kernel.h"
#include "device_program.cuh"

namespace jaxconv {

// A number between -1 and 1.
__device__ float Uniform(uint64_t index, uint32_t seed) {
  return static_cast<float>(static_cast<int32_t>(Random(index, seed))) * 0x1p-31f;
}

// Any byte; one in 16 is 0x80 or 0x7f.
__global__ void FillBytes(uint8_t* tensor, int64_t elements, uint32_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    const uint32_t bits = Random(i, seed);
    tensor[i] = bits % 16 == 0 ? (bits & 16 ? 0x80 : 0x7f) : static_cast<uint8_t>(bits >> 8);
  }
}

// Fills with -1, 0 and 1; one in `every` is not 0. These are so few that Winograd's transforms fit
// in 8 bits and its products in the 11 bits of float16: nothing is rounded.
__global__ void Sparsen(int8_t* tensor, int64_t elements, uint32_t every, uint32_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    const uint32_t bits = Random(i, seed);
    tensor[i] = static_cast<int8_t>((bits >> 8) % every != 0 ? 0 : bits % 2 == 0 ? 1 : -1);
  }
}

// Fills a residual with random bytes, or with numbers about as large as an int8.
__global__ void FillResidual(void* tensor, int64_t elements, DType dtype, uint32_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    const float value = 100 * Uniform(i, seed);
    switch (dtype) {
      case DType::kF32:
        static_cast<float*>(tensor)[i] = value;
        break;
      case DType::kS32:
        static_cast<int32_t*>(tensor)[i] = static_cast<int32_t>(Random(i, seed)) >> (i % 32);
        break;
      case DType::kF16:
        static_cast<__half*>(tensor)[i] = __float2half(value);
        break;
      case DType::kBF16:
        static_cast<__nv_bfloat16*>(tensor)[i] = __float2bfloat16(value);
        break;
      default:
        static_cast<uint8_t*>(tensor)[i] = static_cast<uint8_t>(Random(i, seed));
    }
  }
}

// Scales that map sums with standard deviation `deviation` to several hundred. With `extremes` some
// are a power of two (ties), 0, infinity, NaN or 1e30.
__global__ void FillScales(float* scale, int64_t elements, float deviation, bool extremes) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const float unit = 100.0f / deviation;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    const uint32_t bits = Random(i, 11);
    float value = unit * Uniform(i, 12);
    if (extremes) {
      switch (bits % 64) {
        case 0:
          value = 0;
          break;
        case 1:
          value = INFINITY;
          break;
        case 2:
          value = NAN;
          break;
        case 3:
          value = -1e30f;
          break;
        default:
          if (bits % 4 == 0) value = copysignf(exp2f(floorf(log2f(unit)) + bits / 64 % 5), value);
      }
    }
    scale[i] = value;
  }
}

__global__ void FillBias(float* bias, int32_t* offset, int64_t elements, bool extremes) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    const uint32_t bits = Random(i, 13);
    bias[i] = extremes && bits % 64 == 0 ? NAN
              : extremes && bits % 4 == 0
                  ? static_cast<float>(static_cast<int32_t>(bits >> 24)) - 127.5f
                  : 60 * Uniform(i, 14);
    offset[i] = static_cast<int32_t>(Random(i, 15)) >> (extremes && bits % 32 == 1 ? 0 : 12);
  }
}

// The parameters of a problem that the definition needs, passed to kernels by value.
struct Definition {
  int64_t n, groups, c, k;
  int64_t in[3], filter[3], out[3], stride[3], dilation[3], pad_lo[3];
  int64_t row;  // elements in a row of the packed filter
  bool blocked, unsigned_x;
  DType out_dtype;
  Epilogue epilogue;

  explicit Definition(const ConvProblem& p)
      : n(p.n),
        groups(p.groups),
        c(p.c),
        k(p.k),
        row(p.packed_row()),
        blocked(p.activation_layout == ActivationLayout::kNchw32),
        unsigned_x(p.x_dtype == DType::kU8),
        out_dtype(p.y_dtype),
        epilogue(p.epilogue) {
    for (int a = 0; a < 3; ++a) {
      in[a] = p.in[a], filter[a] = p.filter[a], out[a] = p.out[a];
      stride[a] = p.stride[a], dilation[a] = p.dilation[a], pad_lo[a] = p.pad_lo[a];
    }
  }

  // The offset of an element in an activation tensor with `channels` channels.
  __device__ int64_t Offset(int64_t channels, const int64_t (&extent)[3], int64_t image,
                            int64_t pixel, int64_t channel) const {
    const int64_t pixels = extent[0] * extent[1] * extent[2];
    if (!blocked) return (image * pixels + pixel) * channels + channel;
    const int64_t block = channels == 4 ? 4 : 32;
    return ((image * (channels / block) + channel / block) * pixels + pixel) * block +
           channel % block;
  }

  // The sum for an image, output pixel and output channel, modulo 2^32.
  __device__ int32_t Sum(const uint8_t* x, const int8_t* w, int64_t image, int64_t pixel,
                         int64_t channel) const {
    const int64_t c_group = c / groups, group = channel / (k / groups);
    const int64_t taps = filter[0] * filter[1] * filter[2];
    int64_t at[3] = {pixel / out[2] / out[1], pixel / out[2] % out[1], pixel % out[2]};
    uint32_t sum = 0;
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t r[3] = {tap / filter[2] / filter[1], tap / filter[2] % filter[1],
                            tap % filter[2]};
      int64_t in_pixel = 0;
      bool inside = true;
      for (int a = 0; a < 3; ++a) {
        const int64_t i = at[a] * stride[a] + r[a] * dilation[a] - pad_lo[a];
        inside &= i >= 0 && i < in[a];
        in_pixel = in_pixel * in[a] + i;
      }
      if (!inside) continue;
      for (int64_t i = 0; i < c_group; ++i) {
        const int64_t l =
            blocked && c_group != 4 ? (i / 32 * taps + tap) * 32 + i % 32 : tap * c_group + i;
        const uint8_t byte = x[Offset(c, in, image, in_pixel, group * c_group + i)];
        const int32_t value = unsigned_x ? byte : static_cast<int8_t>(byte);
        sum += static_cast<uint32_t>(value * w[channel * row + l]);
      }
    }
    return static_cast<int32_t>(sum);
  }
};

__device__ float ElementAsFloat(const void* tensor, int64_t at, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(tensor)[at];
    case DType::kS32:
      return __int2float_rn(static_cast<const int32_t*>(tensor)[at]);
    case DType::kF16:
      return __half2float(static_cast<const __half*>(tensor)[at]);
    case DType::kBF16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(tensor)[at]);
    case DType::kS8:
      return static_cast<const int8_t*>(tensor)[at];
    default:
      return static_cast<const uint8_t*>(tensor)[at];
  }
}

// The bits of a result in the output's type. All NaNs have the same bits.
__device__ uint32_t FloatBits(float t, DType dtype) {
  if (dtype == DType::kF32) return isnan(t) ? 0x7fffffff : __float_as_uint(t);
  if (isnan(t)) return 0x7fff;
  if (dtype == DType::kF16) return __half_as_ushort(__float2half_rn(t));
  return __bfloat16_as_ushort(__float2bfloat16_rn(t));
}

__device__ uint32_t Expected(const Definition& d, const Operands& args, int32_t sum, int64_t image,
                             int64_t channel, int64_t at) {
  const bool is_float =
      d.out_dtype == DType::kF32 || d.out_dtype == DType::kF16 || d.out_dtype == DType::kBF16;
  const bool byte = d.out_dtype == DType::kS8 || d.out_dtype == DType::kU8;
  if (d.epilogue.scale == ScaleKind::kNone) {
    if (is_float) return FloatBits(__int2float_rn(sum), d.out_dtype);
    return byte ? static_cast<uint8_t>(sum) : static_cast<uint32_t>(sum);
  }
  if (d.epilogue.offset) {
    sum = static_cast<int32_t>(static_cast<uint32_t>(sum) +
                               static_cast<uint32_t>(args.offset[channel]));
  }
  const bool of_image = d.epilogue.scale == ScaleKind::kImage;
  float t = __fmaf_rn(__int2float_rn(sum), args.scale[(of_image ? image * d.k : 0) + channel],
                      d.epilogue.bias ? args.bias[channel] : 0.0f);
  if (d.epilogue.residual) {
    t = __fmaf_rn(*args.residual_scale, ElementAsFloat(args.residual, at, d.out_dtype), t);
  }
  if (d.epilogue.activation != Activation::kNone && t < 0) t = 0;
  if (d.epilogue.activation == Activation::kRelu6 && t > 6) t = 6;
  if (is_float) return FloatBits(t, d.out_dtype);
  if (d.out_dtype == DType::kS32) {
    return isnan(t) ? 0
                    : static_cast<uint32_t>(t >= 0x1p31f    ? INT32_MAX
                                            : t <= -0x1p31f ? INT32_MIN
                                                            : static_cast<int32_t>(rintf(t)));
  }
  const double rounded = isnan(t) ? 0.0 : rint(static_cast<double>(t));
  const double low = d.out_dtype == DType::kS8 ? -128 : 0, high = low + 255;
  return static_cast<uint8_t>(static_cast<int32_t>(
      fmin(fmax(rounded + static_cast<double>(d.epilogue.zero_point), low), high)));
}

__global__ void Define(Definition d, Operands args, int32_t* sums) {
  const int64_t pixels = d.out[0] * d.out[1] * d.out[2], step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < d.n * pixels * d.k;
       i += step) {
    const int64_t channel = i % d.k, pixel = i / d.k % pixels, image = i / d.k / pixels;
    sums[i] = d.Sum(static_cast<const uint8_t*>(args.lhs), static_cast<const int8_t*>(args.rhs),
                    image, pixel, channel);
  }
}

struct Mismatch {
  unsigned long long count, first;  // first: image, pixel, channel as one row-major index
  uint32_t got, expected;           // values at `first`, written by Look
};

__device__ uint32_t Stored(const Definition& d, const void* out, int64_t at) {
  switch (d.out_dtype) {
    case DType::kF32: {
      const float t = static_cast<const float*>(out)[at];
      return FloatBits(t, DType::kF32);
    }
    case DType::kS32:
      return static_cast<const uint32_t*>(out)[at];
    case DType::kF16:
    case DType::kBF16: {
      const float t = ElementAsFloat(out, at, d.out_dtype);
      return isnan(t) ? 0x7fff : static_cast<const uint16_t*>(out)[at];
    }
    default:
      return static_cast<const uint8_t*>(out)[at];
  }
}

__global__ void Compare(Definition d, Operands args, const int32_t* sums, Mismatch* found,
                        bool look) {
  const int64_t pixels = d.out[0] * d.out[1] * d.out[2], step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < d.n * pixels * d.k;
       i += step) {
    const int64_t channel = i % d.k, pixel = i / d.k % pixels, image = i / d.k / pixels;
    const int64_t at = d.Offset(d.k, d.out, image, pixel, channel);
    const uint32_t expected = Expected(d, args, sums[i], image, channel, at);
    const uint32_t got = Stored(d, args.out, at);
    if (look) {
      if (static_cast<unsigned long long>(i) == found->first) {
        found->got = got, found->expected = expected;
      }
    } else if (got != expected) {
      atomicAdd(&found->count, 1ull);
      atomicMin(&found->first, static_cast<unsigned long long>(i));
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_INT8_DEFINITION_CUH_
