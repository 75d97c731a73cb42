// A block of sums passes through the terms one after another, as float32 in L1.
#include "cpu/requantize.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/block_loops.h"
#include "cpu/convert.h"

namespace jaxconv::cpu {
namespace {

// Rounds to nearest even and keeps denormal numbers, a thread's initial mode.
class StandardFloatingPoint {
 public:
  StandardFloatingPoint() : previous_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~StandardFloatingPoint() { _mm_setcsr(previous_); }
  StandardFloatingPoint(const StandardFloatingPoint&) = delete;
  StandardFloatingPoint& operator=(const StandardFloatingPoint&) = delete;

 private:
  unsigned previous_;
};

JAXCONV_LOOP ToFloats(const int32_t* sums, int64_t count, float* t) {
  for (int64_t i = 0; i < count; ++i) t[i] = static_cast<float>(sums[i]);
}

// Sums wrap around, as in the kernels.
JAXCONV_LOOP AddOffset(const int32_t* sums, const int32_t* offset, int64_t count, float* t) {
  for (int64_t i = 0; i < count; ++i) {
    t[i] = static_cast<float>(
        static_cast<int32_t>(static_cast<uint32_t>(sums[i]) + static_cast<uint32_t>(offset[i])));
  }
}

JAXCONV_LOOP Scale(const float* scale, const float* bias, int64_t count, float* t) {
  for (int64_t i = 0; i < count; ++i) t[i] = __builtin_fmaf(t[i], scale[i], bias[i]);
}

JAXCONV_LOOP AddResidual(float scale, const float* residual, int64_t count, float* t) {
  for (int64_t i = 0; i < count; ++i) t[i] = __builtin_fmaf(scale, residual[i], t[i]);
}

// Comparisons with NaN are false, so NaN stays.
JAXCONV_LOOP Clamp(float low, float high, int64_t count, float* t) {
  for (int64_t i = 0; i < count; ++i) {
    float value = t[i] < low ? low : t[i];
    t[i] = value > high ? high : value;
  }
}

// Rounds to an 8-bit type. Values beyond 1024 saturate for every zero point. Adding 1.5 * 2^23 to a
// value below 2^22 leaves the integer, rounded to nearest even, in the last bits.
JAXCONV_LOOP RoundTo8Bits(const float* t, int32_t zero_point, int32_t least, int32_t largest,
                          int64_t count, uint8_t* out) {
  constexpr float kShift = 12582912.0f;
  constexpr int32_t kShiftBits = 0x4b400000;
  for (int64_t i = 0; i < count; ++i) {
    float value = t[i] != t[i] ? 0.0f : t[i];
    value = value < -1024.0f ? -1024.0f : value;
    value = value > 1024.0f ? 1024.0f : value;
    const float shifted = value + kShift;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    const int32_t integer = bits - kShiftBits + zero_point;
    out[i] = static_cast<uint8_t>(std::min(std::max(integer, least), largest));
  }
}

JAXCONV_LOOP RoundToInt32(const float* t, int64_t count, int32_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float rounded = std::nearbyint(t[i]);
    if (rounded != rounded) {
      out[i] = 0;
    } else if (rounded >= 2147483648.0f) {
      out[i] = std::numeric_limits<int32_t>::max();
    } else if (rounded < -2147483648.0f) {
      out[i] = std::numeric_limits<int32_t>::min();
    } else {
      out[i] = static_cast<int32_t>(rounded);
    }
  }
}

// Loads elements [0, count) of an array of any type as float32.
JAXCONV_LOOP Load(DType dtype, const void* from, int64_t count, float* to) {
  switch (dtype) {
    case DType::kS8:
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<const int8_t*>(from)[i];
      return;
    case DType::kU8:
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<const uint8_t*>(from)[i];
      return;
    case DType::kS32:
      ToFloats(static_cast<const int32_t*>(from), count, to);
      return;
    default:
      ToFloat(dtype, from, to, 0, count);
  }
}

// Up to kBlock elements of the output, and their terms.
struct Block {
  int64_t count = 0;
  DType dtype = DType::kS8;  // of the output and the residual
  const int32_t* sums = nullptr;
  const int32_t* offset = nullptr;  // null: absent, also for the scale and the residual
  const float* scale = nullptr;
  const float* bias = nullptr;
  const void* residual = nullptr;
  float residual_scale = 0;
  bool clamps = false;
  float low = 0, high = 0;
  int32_t zero_point = 0;
  void* out = nullptr;
};

JAXCONV_LOOP ComputeBlock(const Block& block) {
  float t[kBlock];
  if (block.offset != nullptr) {
    AddOffset(block.sums, block.offset, block.count, t);
  } else {
    ToFloats(block.sums, block.count, t);
  }
  if (block.scale != nullptr) Scale(block.scale, block.bias, block.count, t);
  if (block.residual != nullptr) {
    float residual[kBlock];
    Load(block.dtype, block.residual, block.count, residual);
    AddResidual(block.residual_scale, residual, block.count, t);
  }
  if (block.clamps) Clamp(block.low, block.high, block.count, t);
  switch (block.dtype) {
    case DType::kS8:
      RoundTo8Bits(t, block.zero_point, -128, 127, block.count, static_cast<uint8_t*>(block.out));
      return;
    case DType::kU8:
      RoundTo8Bits(t, block.zero_point, 0, 255, block.count, static_cast<uint8_t*>(block.out));
      return;
    case DType::kS32:
      RoundToInt32(t, block.count, static_cast<int32_t*>(block.out));
      return;
    default:
      FromFloat(block.dtype, t, block.out, 0, block.count);
  }
}

JAXCONV_FOR_PROCESSORS(Compute, ComputeBlock, const Block&)

class Requantizer {
 public:
  Requantizer(const ConvProblem& problem, const EpilogueTerms& terms, void* out)
      : p_(problem), terms_(terms), width_(ByteWidth(problem.y_dtype)), out_(out) {
    const Epilogue& epilogue = p_.epilogue;
    block_.dtype = p_.y_dtype;
    if (epilogue.offset) block_.offset = offset_;
    if (epilogue.scale != ScaleKind::kNone) block_.scale = scale_;
    block_.bias = bias_;
    if (epilogue.residual) block_.residual_scale = *terms.residual_scale;
    block_.clamps = epilogue.activation != Activation::kNone;
    block_.high =
        epilogue.activation == Activation::kRelu6 ? 6.0f : std::numeric_limits<float>::infinity();
    block_.zero_point = static_cast<int32_t>(epilogue.zero_point);
  }

  // Computes pixels [begin, end), counted over all images. sums: those of pixel 0.
  void Run(const int32_t* sums, int64_t begin, int64_t end) {
    static const auto compute = ComputeForThisProcessor();
    const bool of_image = p_.epilogue.scale == ScaleKind::kImage;
    while (begin < end) {
      const int64_t image = begin / p_.out_pixels();
      const int64_t stop = of_image ? std::min(end, (image + 1) * p_.out_pixels()) : end;
      const float* scale = terms_.scale + (of_image ? image * p_.k : 0);
      EachBlock(
          p_.k, begin, stop,
          [&](int64_t channel, int64_t channels, int64_t pixels) {
            const Epilogue& e = p_.epilogue;
            if (block_.scale != nullptr) RepeatTerm(scale, channel, channels, pixels, scale_);
            if (e.offset) RepeatTerm(terms_.offset, channel, channels, pixels, offset_);
            if (e.bias) RepeatTerm(terms_.bias, channel, channels, pixels, bias_);
          },
          [&](int64_t element, int64_t count) {
            block_.count = count;
            block_.sums = sums + element;
            if (p_.epilogue.residual) {
              block_.residual = static_cast<const char*>(terms_.residual) + element * width_;
            }
            block_.out = static_cast<char*>(out_) + element * width_;
            compute(block_);
          });
      begin = stop;
    }
  }

 private:
  const ConvProblem& p_;
  const EpilogueTerms& terms_;
  const int64_t width_;  // bytes of an output element
  void* out_;
  Block block_;
  float scale_[kBlock], bias_[kBlock] = {};
  int32_t offset_[kBlock];
};

// The low bits of the sums.
template <typename Out>
void Wrap(const int32_t* sums, int64_t count, Out* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<Out>(static_cast<uint32_t>(sums[i]));
}

}  // namespace

void Requantize(const ConvProblem& p, const EpilogueTerms& terms, const int32_t* sums,
                int64_t begin, int64_t count, void* out) {
  if (p.epilogue.scale == ScaleKind::kNone) {
    if (p.y_dtype == DType::kS32) return Wrap(sums, count, static_cast<int32_t*>(out) + begin);
    if (p.y_dtype == DType::kS8) return Wrap(sums, count, static_cast<int8_t*>(out) + begin);
    if (p.y_dtype == DType::kU8) return Wrap(sums, count, static_cast<uint8_t*>(out) + begin);
  }
  StandardFloatingPoint standard;
  Requantizer requantizer(p, terms, out);
  requantizer.Run(sums - begin, begin / p.k, (begin + count) / p.k);
}

}  // namespace jaxconv::cpu
