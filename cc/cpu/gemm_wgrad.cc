// The matrix products of a task, and the gathering of pixels that they multiply.
#include "cpu/gemm_wgrad.h"

#include <algorithm>
#include <cstring>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>

#include "cpu/geometry.h"

namespace jaxconv::cpu {
namespace {

// Rows of dy this long keep a matrix product efficient without gathering.
constexpr int64_t kLongRow = 192;
// So many pixels at a time of x, dy and the sums of a tap share the second-level cache.
constexpr int64_t kGatheredPixels = 256;
// So many pixels of a long row of dy stay in the second-level cache while every tap uses them.
constexpr int64_t kRowPixels = 512;
// Up to this many pixels of dy, packing a large filter and adding its partial sums costs oneDNN's
// weight gradient more than gathering costs here (measured: 7x7, 4 images, 512 channels).
constexpr int64_t kFewPixels = 512;

// Input channels [channel, channel + channels) of one group of one independent convolution; the
// pointers are to the first of them, or to the group's first output channel.
struct ChannelRange {
  int64_t channels;
  const float* x;
  const float* dy;
  float* dw;
};

// dw (channels, K) += x^T dy over `pixels`; pixels of x lie x_stride apart, those of dy K apart.
Status AddProduct(const ConvProblem& p, int64_t channels, int64_t pixels, const float* x,
                  int64_t x_stride, const float* dy, float* dw) {
  dnnl_status_t status = dnnl_sgemm('T', 'N', channels, p.k_per_group(), pixels, 1.0f, x, x_stride,
                                    dy, p.k, 1.0f, dw, p.k);
  if (status == dnnl_success) return {};
  return Status::Internal("oneDNN: sgemm failed (status " + std::to_string(status) + ")");
}

Spatial TapAt(const ConvProblem& p, int64_t tap) {
  return {tap / (p.filter[1] * p.filter[2]), tap / p.filter[2] % p.filter[1], tap % p.filter[2]};
}

// Copies x[tap] of `count` pixels of dy to `gathered`, zeros where they lie in the padding.
void Gather(const ConvProblem& p, const ChannelRange& range, const Spatial& tap, int64_t first,
            int64_t count, float* gathered) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t image = first + i;
    Spatial at;
    bool inside = true;
    for (int a = 2; a >= 0; --a) {
      at[a] = image % p.out[a] * p.stride[a] + tap[a] * p.dilation[a] - p.pad_lo[a];
      image /= p.out[a];
      inside &= at[a] >= 0 && at[a] < p.in[a];
    }
    float* to = gathered + i * range.channels;
    if (inside) {
      int64_t pixel = ((image * p.in[0] + at[0]) * p.in[1] + at[1]) * p.in[2] + at[2];
      std::memcpy(to, range.x + pixel * p.c, range.channels * sizeof(float));
    } else {
      std::memset(to, 0, range.channels * sizeof(float));
    }
  }
}

Status MultiplyGathered(const ConvProblem& p, const ChannelRange& range, float* gathered) {
  int64_t pixels = p.n * p.out_pixels();
  for (int64_t first = 0; first < pixels; first += kGatheredPixels) {
    int64_t count = std::min(kGatheredPixels, pixels - first);
    for (int64_t t = 0; t < p.taps(); ++t) {
      Gather(p, range, TapAt(p, t), first, count, gathered);
      JAXCONV_RETURN_IF_ERROR(AddProduct(p, range.channels, count, gathered, range.channels,
                                         range.dy + first * p.k,
                                         range.dw + t * p.c_per_group() * p.k));
    }
  }
  return {};
}

Status MultiplyInPlace(const ConvProblem& p, const ChannelRange& range) {
  for (int64_t row = 0; row < p.n * p.out[0] * p.out[1]; ++row) {
    int64_t image = row / (p.out[0] * p.out[1]);
    int64_t p0 = row / p.out[1] % p.out[0], p1 = row % p.out[1];
    const float* dy = range.dy + row * p.out[2] * p.k;
    for (int64_t q = 0; q < p.out[2]; q += kRowPixels) {
      for (int64_t t = 0; t < p.taps(); ++t) {
        Spatial tap = TapAt(p, t);
        int64_t i0 = p0 * p.stride[0] + tap[0] * p.dilation[0] - p.pad_lo[0];
        int64_t i1 = p1 * p.stride[1] + tap[1] * p.dilation[1] - p.pad_lo[1];
        if (i0 < 0 || i0 >= p.in[0] || i1 < 0 || i1 >= p.in[1]) continue;
        int64_t shift = tap[2] * p.dilation[2] - p.pad_lo[2];
        int64_t q_begin = std::max(q, CeilDiv(-shift, p.stride[2]));
        int64_t q_end =
            std::min({q + kRowPixels, p.out[2], FloorDiv(p.in[2] - 1 - shift, p.stride[2]) + 1});
        if (q_begin >= q_end) continue;
        int64_t pixel =
            ((image * p.in[0] + i0) * p.in[1] + i1) * p.in[2] + q_begin * p.stride[2] + shift;
        JAXCONV_RETURN_IF_ERROR(
            AddProduct(p, range.channels, q_end - q_begin, range.x + pixel * p.c, p.stride[2] * p.c,
                       dy + q_begin * p.k, range.dw + t * p.c_per_group() * p.k));
      }
    }
  }
  return {};
}

bool GathersPixels(const ConvProblem& p) { return p.out[2] < kLongRow; }

}  // namespace

Status GemmWgradPays(const ConvProblem& p) {
  bool few_pixels = p.n * p.out_pixels() <= kFewPixels && p.taps() > 1;
  if (!few_pixels && (p.rank != 1 || GathersPixels(p))) {
    return Status::Unimplemented("pays for long one-dimensional rows or few pixels only");
  }
  if (p.c_per_group() < 64 || p.k_per_group() < 64) {
    return Status::Unimplemented("pays from 64 channels per group on");
  }
  return {};
}

int64_t GemmWgradScratchBytes(const ConvProblem& p, int64_t tasks) {
  if (!GathersPixels(p)) return 0;
  int64_t channels = std::min(p.c_per_group(), CeilDiv(p.batch * p.c, tasks));
  return kGatheredPixels * channels * static_cast<int64_t>(sizeof(float));
}

Status GemmWgradTask(const ConvProblem& p, int64_t task, int64_t tasks, const float* x,
                     const float* dy, float* scratch, float* dw) {
  int64_t c_per_group = p.c_per_group(), k_per_group = p.k_per_group();
  int64_t all = p.batch * p.c;
  int64_t begin = task * all / tasks, end = (task + 1) * all / tasks;
  while (begin < end) {
    int64_t b = begin / p.c, c = begin % p.c, first_k = c / c_per_group * k_per_group;
    ChannelRange range;
    range.channels = std::min(end - begin, c_per_group - c % c_per_group);
    range.x = x + b * p.n * p.in_pixels() * p.c + c;
    range.dy = dy + b * p.n * p.out_pixels() * p.k + first_k;
    range.dw = dw + b * (p.w_elements() / p.batch) + c % c_per_group * p.k + first_k;
    for (int64_t t = 0; t < p.taps(); ++t) {
      for (int64_t i = 0; i < range.channels; ++i) {
        std::memset(range.dw + (t * c_per_group + i) * p.k, 0, k_per_group * sizeof(float));
      }
    }
    JAXCONV_RETURN_IF_ERROR(GathersPixels(p) ? MultiplyGathered(p, range, scratch)
                                             : MultiplyInPlace(p, range));
    begin += range.channels;
  }
  return {};
}

}  // namespace jaxconv::cpu
