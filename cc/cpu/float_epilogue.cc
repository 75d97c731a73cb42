// A block of sums passes through the terms one after another in L1. A second pass over sums that
// are still in L2 costs little relative to the convolution, and gives every kernel the same
// epilogue with the same bits.
#include "cpu/float_epilogue.h"

#include <algorithm>

#include "cpu/activations.h"
#include "cpu/block_loops.h"
#include "cpu/convert.h"

namespace jaxconv::cpu {
namespace {

// Up to kBlock elements of the output, and their terms; null if absent.
struct Block {
  int64_t count = 0;
  DType dtype = DType::kF32;  // of the output, the residual and pre
  const float* sums = nullptr;
  const float* scale = nullptr;  // ones if absent
  const float* bias = nullptr;   // zeros if absent
  const void* residual = nullptr;
  Activation activation = Activation::kNone;
  float negative_slope = 0;
  void* pre = nullptr;
  void* out = nullptr;
};

// Calls body(function) with the activation as a function of one number.
template <typename Body>
JAXCONV_LOOP WithActivation(Activation activation, float slope, const Body& body) {
  switch (activation) {
    case Activation::kNone:
      return body([](float v) JAXCONV_ALWAYS { return v; });
    case Activation::kRelu:
      return body([](float v) JAXCONV_ALWAYS { return v < 0 ? 0.0f : v; });
    case Activation::kRelu6:
      return body([](float v) JAXCONV_ALWAYS { return Clamped(v, 0.0f, 6.0f); });
    case Activation::kLeakyRelu:
      return body([=](float v) JAXCONV_ALWAYS { return v < 0 ? v * slope : v; });
    case Activation::kGelu:
      return body([](float v) JAXCONV_ALWAYS { return Gelu(v); });
    case Activation::kGeluTanh:
      return body([](float v) JAXCONV_ALWAYS { return GeluTanh(v); });
    case Activation::kSilu:
      return body([](float v) JAXCONV_ALWAYS { return Silu(v); });
    case Activation::kSigmoid:
      return body([](float v) JAXCONV_ALWAYS { return Sigmoid(v); });
    case Activation::kTanh:
      return body([](float v) JAXCONV_ALWAYS { return Tanh(v); });
    case Activation::kHardSwish:
      return body([](float v) JAXCONV_ALWAYS { return HardSwish(v); });
  }
}

// Applies the epilogue to `sums` and writes `to`, which may be `sums`, in one loop.
JAXCONV_LOOP Finish(const Block& block, Activation activation, const float* residual, float* to) {
  WithActivation(activation, block.negative_slope, [&](const auto& activate) JAXCONV_ALWAYS {
    if (residual == nullptr) {
      for (int64_t i = 0; i < block.count; ++i) {
        to[i] = activate(__builtin_fmaf(block.sums[i], block.scale[i], block.bias[i]));
      }
    } else {
      for (int64_t i = 0; i < block.count; ++i) {
        to[i] =
            activate(__builtin_fmaf(block.sums[i], block.scale[i], block.bias[i]) + residual[i]);
      }
    }
  });
}

JAXCONV_LOOP ComputeBlock(const Block& block) {
  const bool wide = block.dtype == DType::kF32;
  float values[kBlock], added[kBlock];
  const float* residual = wide ? static_cast<const float*>(block.residual) : nullptr;
  if (!wide && block.residual != nullptr) {
    ToFloat(block.dtype, block.residual, added, 0, block.count);
    residual = added;
  }
  float* to = wide ? static_cast<float*>(block.out) : values;
  if (block.pre == nullptr) {
    Finish(block, block.activation, residual, to);
  } else {
    Finish(block, Activation::kNone, residual, to);
    FromFloat(block.dtype, to, block.pre, 0, block.count);
    WithActivation(block.activation, block.negative_slope,
                   [&](const auto& activate) JAXCONV_ALWAYS {
                     for (int64_t i = 0; i < block.count; ++i) to[i] = activate(to[i]);
                   });
  }
  if (!wide) FromFloat(block.dtype, values, block.out, 0, block.count);
}

JAXCONV_FOR_PROCESSORS(Compute, ComputeBlock, const Block&)

// The moments of this many pixels at a time are formed in float32, in L1; those of this many
// channels in registers.
constexpr int64_t kPixels = 32, kLanes = 16;

// Up to kBlock channels of a run of pixels, and the destination of their moments.
struct PixelRun {
  DType dtype = DType::kF32;
  const char* out = nullptr;  // the first pixel's
  int64_t stride = 0;         // between pixels, in elements
  int64_t channels = 0, pixels = 0;
  double *mean = nullptr, *squares = nullptr;
};

// Adds the moments of `pixels` pixels to those of `before` pixels, for up to kLanes channels. The
// deviations from the rounded mean sum to a correction of the mean and the squares, so float32
// loses no accuracy if the mean is large.
JAXCONV_LOOP AddLanes(const float* value, int64_t stride, int64_t pixels, int64_t before,
                      int64_t lanes, double* to_mean, double* to_squares) {
  float mean[kLanes] = {}, off[kLanes] = {}, squares[kLanes] = {};
  for (int64_t i = 0; i < pixels; ++i) {
    for (int64_t c = 0; c < lanes; ++c) mean[c] += value[i * stride + c];
  }
  const float share = 1.0f / static_cast<float>(pixels);
  for (int64_t c = 0; c < lanes; ++c) mean[c] *= share;
  for (int64_t i = 0; i < pixels; ++i) {
    for (int64_t c = 0; c < lanes; ++c) {
      const float deviation = value[i * stride + c] - mean[c];
      off[c] += deviation;
      squares[c] += deviation * deviation;
    }
  }
  const double n = static_cast<double>(pixels), others = static_cast<double>(before);
  const double one = 1 / n, part = n / (others + n);
  for (int64_t c = 0; c < lanes; ++c) {
    const double correction = off[c] * one;
    const double apart = mean[c] + correction - to_mean[c];
    to_mean[c] += apart * part;
    to_squares[c] += squares[c] - off[c] * correction + apart * apart * part * others;
  }
}

JAXCONV_LOOP AddPixels(const PixelRun& run) {
  const bool wide = run.dtype == DType::kF32;
  float converted[kPixels * kBlock];
  for (int64_t first = 0; first < run.pixels; first += kPixels) {
    const int64_t pixels = std::min(kPixels, run.pixels - first);
    const char* out = run.out + first * run.stride * ByteWidth(run.dtype);
    const float* values = wide ? reinterpret_cast<const float*>(out) : converted;
    const int64_t stride = wide ? run.stride : run.channels;
    if (!wide) {
      for (int64_t i = 0; i < pixels; ++i) {
        ToFloat(run.dtype, out + i * run.stride * ByteWidth(run.dtype), converted + i * stride, 0,
                run.channels);
      }
    }
    int64_t c = 0;
    for (; c + kLanes <= run.channels; c += kLanes) {  // a constant: unrolled, in registers
      AddLanes(values + c, stride, pixels, first, kLanes, run.mean + c, run.squares + c);
    }
    if (c < run.channels) {
      AddLanes(values + c, stride, pixels, first, run.channels - c, run.mean + c, run.squares + c);
    }
  }
}

JAXCONV_FOR_PROCESSORS(Add, AddPixels, const PixelRun&)

}  // namespace

void FinishSums(const ConvProblem& p, const EpilogueTerms& terms, const float* sums, int64_t begin,
                int64_t count, void* out) {
  static const auto compute = ComputeForThisProcessor();
  const Epilogue& e = p.epilogue;
  const int64_t width = ByteWidth(p.y_dtype);
  float scale[kBlock], bias[kBlock];
  Block block;
  block.dtype = p.y_dtype;
  block.activation = e.activation;
  block.negative_slope = e.negative_slope;
  block.scale = scale;
  block.bias = bias;
  std::fill_n(scale, kBlock, 1.0f);
  std::fill_n(bias, kBlock, 0.0f);
  EachBlock(
      p.k, begin / p.k, (begin + count) / p.k,
      [&](int64_t channel, int64_t channels, int64_t pixels) {
        const bool scales = e.scale != ScaleKind::kNone;
        if (scales) RepeatTerm(terms.scale, channel, channels, pixels, scale);
        if (e.bias) RepeatTerm(terms.bias, channel, channels, pixels, bias);
      },
      [&](int64_t element, int64_t elements) {
        block.count = elements;
        block.sums = sums + (element - begin);
        if (e.residual) {
          block.residual = static_cast<const char*>(terms.residual) + element * width;
        }
        if (e.pre) block.pre = static_cast<char*>(terms.pre) + element * width;
        block.out = static_cast<char*>(out) + element * width;
        compute(block);
      });
}

void Moments(const ConvProblem& p, const void* out, int64_t begin, int64_t count, double* moments) {
  static const auto add = AddForThisProcessor();
  const int64_t width = ByteWidth(p.y_dtype);
  std::fill_n(moments, 2 * p.k, 0.0);
  for (int64_t channel = 0; channel < p.k; channel += kBlock) {
    PixelRun run;
    run.dtype = p.y_dtype;
    run.out = static_cast<const char*>(out) + (begin + channel) * width;
    run.stride = p.k;
    run.channels = std::min(kBlock, p.k - channel);
    run.pixels = count / p.k;
    run.mean = moments + channel;
    run.squares = moments + p.k + channel;
    add(run);
  }
}

void MergeMoments(int64_t channels, int64_t total, const double* more, int64_t count,
                  double* moments) {
  const double share = static_cast<double>(count) / static_cast<double>(total + count);
  for (int64_t c = 0; c < channels; ++c) {
    const double off = more[c] - moments[c];
    moments[c] += off * share;
    moments[channels + c] += more[channels + c] + off * off * share * static_cast<double>(total);
  }
}

}  // namespace jaxconv::cpu
