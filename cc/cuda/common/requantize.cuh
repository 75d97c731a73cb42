// The int8 families' epilogue: int32 sums -> the output, by the formula of core/epilogue.h.
//
// A thread holds 8 neighbouring output channels of a pixel, so that it stores 8, 16 or 32 bytes of
// them at once and reads its channels' scales and biases as vectors.
#ifndef JAXCONV_CUDA_COMMON_REQUANTIZE_CUH_
#define JAXCONV_CUDA_COMMON_REQUANTIZE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/requantize_params.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/min_max.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv {

// An output pixel of a thread: where its channel 0 lies, in elements, or -1, where nothing is stored.
struct OutputPixel {
  int64_t at;

  OutputPixel() = default;
  // Pixel m of all images' pixels.
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

// The residual of 8 neighbouring channels of each of a thread's pixels; of a path that has none it is
// never read.
template <int kPixels>
struct Residual {
  uint32_t words[kPixels][2];
  float factor;
};

namespace requantize_internal {

// Four values saturated to bytes.
__device__ __forceinline__ uint32_t PackS8(const int32_t* v) {
  uint32_t high, all;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(v[3]), "r"(v[2]), "r"(0));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(v[1]), "r"(v[0]), "r"(high));
  return all;
}
__device__ __forceinline__ uint32_t PackU8(const int32_t* v) {
  uint32_t high, all;
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(v[3]), "r"(v[2]), "r"(0));
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(v[1]), "r"(v[0]), "r"(high));
  return all;
}
// The low bytes of four values.
__device__ __forceinline__ uint32_t LowBytes(const int32_t* v) {
  return __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
}

__device__ __forceinline__ void LoadEight(const void* from, uint32_t (&words)[2]) {
  const uint2 v = __ldg(static_cast<const uint2*>(from));
  words[0] = v.x, words[1] = v.y;
}
template <int kWords>
__device__ __forceinline__ void LoadEight(const void* from, uint32_t (&words)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    const uint4 v = __ldg(static_cast<const uint4*>(from) + i / 4);
    words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
  }
}

__device__ __forceinline__ void StoreEight(void* to, const uint32_t (&words)[2]) {
  *static_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}
template <int kWords>
__device__ __forceinline__ void StoreEight(void* to, const uint32_t (&words)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    static_cast<uint4*>(to)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
  }
}

// A byte of a word as a float in two instructions: it becomes the low end of 2^23's mantissa, and 2^23
// is subtracted, exactly. A conversion of a byte takes the slowest pipe, 16 lanes a cycle. `exponent`:
// 0x4b000000 in a register (ComputedHere); as a constant it is loaded for every byte.
template <bool kSigned>
__device__ __forceinline__ float ByteAsFloat(uint32_t word, int byte, uint32_t exponent) {
  const uint32_t bytes = kSigned ? word ^ 0x80808080u : word;
  return __uint_as_float(__byte_perm(bytes, exponent, 0x7650 | byte)) -
         (kSigned ? 0x1p23f + 128 : 0x1p23f);
}

// Element e of 8 as a float; of kWords words of an array of this type.
template <int kWords>
__device__ __forceinline__ float ToFloat(const uint32_t (&words)[kWords], DType dtype, int e) {
  if constexpr (kWords == 2) {
    const uint32_t byte = words[e / 4] >> (e % 4 * 8);
    return dtype == DType::kS8 ? static_cast<float>(static_cast<int8_t>(byte))
                               : static_cast<float>(static_cast<uint8_t>(byte));
  } else if constexpr (kWords == 4) {
    const auto half = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
    return dtype == DType::kBF16 ? __bfloat162float(__ushort_as_bfloat16(half))
                                 : __half2float(__ushort_as_half(half));
  } else {
    return dtype == DType::kF32 ? __uint_as_float(words[e])
                                : static_cast<float>(static_cast<int32_t>(words[e]));
  }
}

// Eight finished values -> kWords words of the output's type.
template <int kWords>
__device__ __forceinline__ void Round(const RequantizeParams& params, const float (&t)[8],
                                      uint32_t (&words)[kWords]) {
  if constexpr (kWords == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (params.out_dtype == DType::kBF16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(t[2 * i], t[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(t[2 * i], t[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
  } else if (kWords == 8 && params.out_dtype == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __float_as_uint(t[i]);
  } else {
    int32_t r[8];  // saturated to int32; NaN gives 0
#pragma unroll
    for (int e = 0; e < 8; ++e) r[e] = __float2int_rn(t[e]);
    if constexpr (kWords == 8) {
#pragma unroll
      for (int e = 0; e < 8; ++e) words[e] = r[e];
    } else {
      if (params.zero_point != 0) {
        constexpr int32_t kFar = 1 << 20;  // beyond every byte, however the zero point shifts it
#pragma unroll
        for (int e = 0; e < 8; ++e) r[e] = min(max(r[e], -kFar), kFar) + params.zero_point;
      }
      const bool s8 = params.out_dtype == DType::kS8;
#pragma unroll
      for (int i = 0; i < 2; ++i) words[i] = s8 ? PackS8(r + 4 * i) : PackU8(r + 4 * i);
    }
  }
}

// Sums without an epilogue.
template <int kWords>
__device__ __forceinline__ void Plain(const RequantizeParams& params, const int32_t (&sum)[8],
                                      uint32_t (&words)[kWords]) {
  if constexpr (kWords == 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = LowBytes(sum + 4 * i);
  } else if (kWords == 8 && params.out_dtype == DType::kS32) {
#pragma unroll
    for (int e = 0; e < kWords; ++e) words[e] = sum[e];
  } else {
    float t[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) t[e] = static_cast<float>(sum[e]);
    Round<kWords>(params, t, words);
  }
}

__device__ __forceinline__ void LoadFloats(const float* from, float (&values)[8]) {
  uint32_t words[8];
  LoadEight(from, words);
#pragma unroll
  for (int e = 0; e < 8; ++e) values[e] = __uint_as_float(words[e]);
}

// The negative bytes of a word as a mask.
__device__ __forceinline__ uint32_t NegativeBytes(uint32_t word) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(mask) : "r"(word));
  return mask;
}

// Four values to be saturated -> bytes, those below zero cleared where ReLU says so.
template <bool kSigned>
__device__ __forceinline__ uint32_t PackBytes(const RequantizeParams& params, const int32_t* v) {
  if constexpr (!kSigned) return PackU8(v);
  const uint32_t word = PackS8(v);
  return word & (~NegativeBytes(word) | params.kept_negative);
}

// The straight 8-bit paths. ReLU clears the negative results, which rounding keeps negative or makes
// 0. ptxas joins a conversion to int32 and a saturating pack of two into one instruction (F2IP).
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

// All cases. kWords: of the 8 results, 2 for bytes, 4 for 16 bits, 8 for 32.
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
        // One instruction, which makes 0 of -0; only float outputs show the difference.
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

// A channel's scale and bias, read from global memory.
struct GlobalTerms {
  const RequantizeParams& params;
  __device__ __forceinline__ void Load(int32_t channel, bool inside, float (&scale)[8],
                                       float (&bias)[8]) const {
    const int32_t from = inside ? channel : 0;
    requantize_internal::LoadFloats(params.scale + from, scale);
#pragma unroll
    for (int e = 0; e < 8; ++e) bias[e] = 0;
    if (params.bias != nullptr) requantize_internal::LoadFloats(params.bias + from, bias);
  }
};

// The same of a tile's channels, brought to shared memory while the tile is multiplied. Global memory
// would delay every eight channels by its latency, which so few warps cannot hide.
template <int kChannels>
struct SharedTerms {
  static constexpr int kBytes = 2 * kChannels * sizeof(float);
  uint32_t shared;  // of the scales, then the biases
  int32_t first;    // channel of the tile

  // Threads 0 to 127 of a warpgroup begin; `end`: past the last channel.
  __device__ __forceinline__ void Copy(const RequantizeParams& params, int thread,
                                       int32_t end) const {
    constexpr int kQuads = kChannels / 4;
    if (params.path > RequantizePath::kU8Residual) return;
#pragma unroll
    for (int quad = thread; quad < 2 * kQuads; quad += 128) {
      const bool of_bias = quad >= kQuads;
      const float* const from = of_bias ? params.bias : params.scale;
      const int32_t channel = first + quad % kQuads * 4;
      const bool inside = from != nullptr && channel < end;
      CopyAsync<16>(shared + quad * 16, inside ? from + channel : params.scale, inside);
    }
    CopyAsyncCommit();
  }
  // All of them wait, before anyone loads.
  __device__ __forceinline__ void Wait(int barrier) const {
    CopyAsyncWait<0>();
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
  }
  __device__ __forceinline__ void Load(int32_t channel, bool, float (&scale)[8],
                                       float (&bias)[8]) const {
    const uint32_t at = shared + (channel - first) * 4;
    LoadShared<0>(at, scale);
    LoadShared<16>(at, scale + 4);
    LoadShared<kChannels * 4>(at, bias);
    LoadShared<kChannels * 4 + 16>(at, bias + 4);
  }
};

// Loads the residual of channels channel .. channel + 7, of a path that has one, well before
// RequantizeEight: so many loads are under way. Pixels outside read the first one's,
// channels outside the first ones.
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

// Stores channels channel .. channel + 7, a multiple of 8, of kPixels pixels. kPath: as
// ForRequantizePath gives it. `inside`: there are such channels. `residual`: from LoadResidual.
// sums(i, e): the sum of pixel i, channel channel + e.
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

// Four sums -> bytes, by kS8 or kU8.
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

// Calls store(std::integral_constant<RequantizePath, path>). One branch for a tile keeps the code of
// a path together.
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
