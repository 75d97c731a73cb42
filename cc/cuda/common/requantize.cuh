// The int8 families' epilogue: int32 sums -> the output, by the formula of core/epilogue.h.
//
// A thread holds 8 neighbouring output channels of a pixel, so that it stores 8, 16 or 32 bytes of
// them at once and reads its channels' scales and biases as vectors.
#ifndef JAXCONV_CUDA_COMMON_REQUANTIZE_CUH_
#define JAXCONV_CUDA_COMMON_REQUANTIZE_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/requantize_params.h"
#include "cuda/common/requantize_terms.cuh"
#include "cuda/common/requantize_words.cuh"
#include "cuda/ptx/min_max.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv {

// An output pixel of a thread: the element offset of its channel 0, or -1 if nothing is stored.
struct OutputPixel {
  int64_t at;

  OutputPixel() = default;
  // Pixel m, counted over all images.
  __device__ __forceinline__ OutputPixel(const RequantizeParams& params, int32_t m, bool inside) {
    int32_t image, pixel;
    params.pixels.Divmod(inside ? m : 0, &image, &pixel);
    at = inside ? image * params.image_stride + int64_t{pixel} * params.pixel_stride : -1;
  }
  __device__ __forceinline__ bool Inside() const { return at >= 0; }
  __device__ __forceinline__ int32_t Image(const RequantizeParams& params) const {
    return static_cast<int32_t>(at / params.image_stride);
  }
};

__host__ __device__ constexpr bool HasResidual(RequantizePath path) {
  return path == RequantizePath::kS8Residual || path == RequantizePath::kU8Residual;
}

// The residual of 8 neighbouring channels for each of a thread's pixels; paths without a residual
// never read it.
template <int kPixels>
struct Residual {
  uint32_t words[kPixels][2];
  float factor;
};

namespace requantize_internal {

// The 8-bit paths without branches. ReLU clears negative results after rounding, which keeps them
// negative or makes them 0. ptxas combines a conversion to int32 and a saturating pack of two into
// one instruction (F2IP).
template <RequantizePath kPath, int kPixels, class Terms, typename Sums>
__device__ __forceinline__ void RequantizeBytes(const RequantizeParams& params,
                                                const OutputPixel (&pixels)[kPixels],
                                                int32_t channel, bool inside, const Terms& terms,
                                                const Residual<kPixels>& residual, Sums sums) {
  constexpr bool kSigned = kPath == RequantizePath::kS8 || kPath == RequantizePath::kS8Residual;
  constexpr bool kResidual = HasResidual(kPath);
  const int64_t from_pixel = (channel >> 5) * params.block_stride + (channel & 31);
  uint32_t exponent = 0;
  if constexpr (kResidual) exponent = ComputedHere(0x4b000000);
  float scale[8], bias[8];
  terms.Load(channel, inside, scale, bias);
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    int32_t r[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float t = fmaf(static_cast<float>(sums(i, e)), scale[e], bias[e]);
      if constexpr (kResidual) {
        const float z = ByteAsFloat<kSigned>(residual.words[i][e / 4], e % 4, exponent);
        t = fmaf(residual.factor, z, t);
      }
      r[e] = __float2int_rn(t);  // saturated to int32; NaN gives 0
    }
    uint32_t words[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) words[h] = PackBytes<kSigned>(params, r + 4 * h);
    if (pixels[i].Inside() && inside) {
      StoreEight(static_cast<char*>(params.out) + pixels[i].at + from_pixel, words);
    }
  }
}

// kSums.
template <int kPixels, typename Sums>
__device__ __forceinline__ void StoreSums(const RequantizeParams& params,
                                          const OutputPixel (&pixels)[kPixels], int32_t channel,
                                          bool inside, Sums sums) {
  const int64_t from_pixel = (channel >> 5) * params.block_stride + (channel & 31);
  const bool f32 = params.out_dtype == DType::kF32;
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    uint32_t words[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int32_t sum = sums(i, e);
      words[e] = f32 ? __float_as_uint(static_cast<float>(sum)) : static_cast<uint32_t>(sum);
    }
    if (pixels[i].Inside() && inside) {
      StoreEight(static_cast<char*>(params.out) + (pixels[i].at + from_pixel) * 4, words);
    }
  }
}

// All cases. kWords: words of the 8 results, 2 for bytes, 4 for 16 bits, 8 for 32.
template <int kWords, int kPixels, typename Sums>
__device__ __forceinline__ void RequantizeGeneral(const RequantizeParams& params,
                                                  const OutputPixel (&pixels)[kPixels],
                                                  int32_t channel, Sums sums) {
  const int64_t from_pixel = (channel >> 5) * params.block_stride + (channel & 31);
  char* const out = static_cast<char*>(params.out);
  if (params.scale == nullptr) {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      int32_t sum[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] = sums(i, e);
      uint32_t words[kWords];
      Plain(params, sum, words);
      if (pixels[i].Inside()) {
        StoreEight(out + (pixels[i].at + from_pixel) * (kWords / 2), words);
      }
    }
    return;
  }
  float scale[8];
  if (params.image_channels == 0) LoadFloats(params.scale + channel, scale);
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    if (!pixels[i].Inside()) continue;
    const int64_t byte = (pixels[i].at + from_pixel) * (kWords / 2);
    if (params.image_channels != 0) {
      LoadFloats(params.scale + int64_t{pixels[i].Image(params)} * params.image_channels + channel,
                 scale);
    }
    // The biases are read again for every pixel: 8 registers more would spill the largest tiles.
    float t[8] = {};
    if (params.bias != nullptr) LoadFloats(params.bias + channel, t);
    if (params.offset == nullptr) {
#pragma unroll
      for (int e = 0; e < 8; ++e) t[e] = fmaf(static_cast<float>(sums(i, e)), scale[e], t[e]);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int32_t sum = sums(i, e) + __ldg(params.offset + channel + e);
        t[e] = fmaf(static_cast<float>(sum), scale[e], t[e]);
      }
    }
    if (params.residual != nullptr) {
      uint32_t words[kWords];
      LoadEight(static_cast<const char*>(params.residual) + byte, words);
      const float factor = __ldg(params.residual_scale);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        t[e] = fmaf(factor, ToFloat<kWords>(words, params.out_dtype, e), t[e]);
      }
    }
    if (params.activation != Activation::kNone) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        // A single instruction, which turns -0 into 0; only float outputs show the difference.
        t[e] = kWords == 2 ? MaxNan(t[e], 0.0f) : t[e] < 0 ? 0 : t[e];
      }
      if (params.activation == Activation::kRelu6) {
#pragma unroll
        for (int e = 0; e < 8; ++e) t[e] = MinNan(t[e], 6.0f);
      }
    }
    uint32_t words[kWords];
    Round(params, t, words);
    StoreEight(out + byte, words);
  }
}

}  // namespace requantize_internal

// Loads the residual of channels channel .. channel + 7, if the path has one, long before
// RequantizeEight, so that many loads are in flight. Pixels and channels outside the output read
// the first ones instead.
template <int kPixels>
__device__ __forceinline__ void LoadResidual(const RequantizeParams& params,
                                             const OutputPixel (&pixels)[kPixels], int32_t channel,
                                             bool inside, Residual<kPixels>* residual) {
  const int64_t from_pixel = inside ? (channel >> 5) * params.block_stride + (channel & 31) : 0;
  const char* const from = static_cast<const char*>(params.residual) + from_pixel;
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    requantize_internal::LoadEight(from + (pixels[i].Inside() ? pixels[i].at : 0),
                                   residual->words[i]);
  }
  residual->factor = __ldg(params.residual_scale);
}

// Stores channels channel .. channel + 7, a multiple of 8, of kPixels pixels. kPath: from
// ForRequantizePath. `inside`: the channels exist. `residual`: from LoadResidual. sums(i, e): the
// sum of pixel i, channel channel + e.
template <RequantizePath kPath, int kPixels, class Terms, typename Sums>
__device__ __forceinline__ void RequantizeEight(const RequantizeParams& params,
                                                const OutputPixel (&pixels)[kPixels],
                                                int32_t channel, bool inside, const Terms& terms,
                                                const Residual<kPixels>& residual, Sums sums) {
  namespace internal = requantize_internal;
  if constexpr (kPath <= RequantizePath::kU8Residual) {
    internal::RequantizeBytes<kPath>(params, pixels, channel, inside, terms, residual, sums);
  } else if constexpr (kPath == RequantizePath::kSums) {
    internal::StoreSums(params, pixels, channel, inside, sums);
  } else if (inside) {
    switch (params.out_dtype) {
      case DType::kS8:
      case DType::kU8:
        internal::RequantizeGeneral<2>(params, pixels, channel, sums);
        break;
      case DType::kF16:
      case DType::kBF16:
        internal::RequantizeGeneral<4>(params, pixels, channel, sums);
        break;
      default:
        internal::RequantizeGeneral<8>(params, pixels, channel, sums);
    }
  }
}

// Requantizes four sums to bytes, by kS8 or kU8.
template <RequantizePath kPath>
__device__ __forceinline__ uint32_t RequantizeFour(const RequantizeParams& params,
                                                   const int32_t (&sums)[4],
                                                   const float (&scale)[4],
                                                   const float (&bias)[4]) {
  static_assert(kPath == RequantizePath::kS8 || kPath == RequantizePath::kU8);
  int32_t r[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    r[e] = __float2int_rn(fmaf(static_cast<float>(sums[e]), scale[e], bias[e]));
  }
  return requantize_internal::PackBytes<kPath == RequantizePath::kS8>(params, r);
}

// Calls store(std::integral_constant<RequantizePath, path>). One branch for a tile keeps the code
// of a path together.
template <typename Store>
__device__ __forceinline__ void ForRequantizePath(const RequantizeParams& params, Store store) {
  using Path = RequantizePath;
  switch (params.path) {
    case Path::kS8:
      return store(std::integral_constant<Path, Path::kS8>());
    case Path::kS8Residual:
      return store(std::integral_constant<Path, Path::kS8Residual>());
    case Path::kU8:
      return store(std::integral_constant<Path, Path::kU8>());
    case Path::kU8Residual:
      return store(std::integral_constant<Path, Path::kU8Residual>());
    case Path::kSums:
      return store(std::integral_constant<Path, Path::kSums>());
    case Path::kGeneral:
      return store(std::integral_constant<Path, Path::kGeneral>());
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_REQUANTIZE_CUH_
