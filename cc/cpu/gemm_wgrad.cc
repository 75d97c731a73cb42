// The matrix products of a task, and the gather of their pixels.
#include "cpu/gemm_wgrad.h"

#include <algorithm>
#include <cstring>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <vector>

#include "cpu/geometry.h"

namespace jaxconv::cpu {
namespace {

// Rows of dy this long keep a matrix product efficient without gathering.
constexpr int64_t kLongRow = 192;
// This many pixels of x and dy, with the sums of a tap, fit in L2.
constexpr int64_t kGatheredPixels = 256;
// This many pixels of a long row of dy stay in L2 while every tap uses them.
constexpr int64_t kRowPixels = 512;
// A range of input channels for one tap, one group and one independent convolution; the pointers
// address its first channel, or the group's first output channel.
struct Piece {
  Spatial tap;
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

// Copies x[tap] for `count` pixels of dy to `gathered`, zeros in the padding.
void Gather(const ConvProblem& p, const Piece& piece, int64_t first, int64_t count,
            float* gathered) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t image = first + i;
    Spatial at;
    bool inside = true;
    for (int a = 2; a >= 0; --a) {
      at[a] = image % p.out[a] * p.stride[a] + piece.tap[a] * p.dilation[a] - p.pad_lo[a];
      image /= p.out[a];
      inside &= at[a] >= 0 && at[a] < p.in[a];
    }
    float* to = gathered + i * piece.channels;
    if (inside) {
      int64_t pixel = ((image * p.in[0] + at[0]) * p.in[1] + at[1]) * p.in[2] + at[2];
      std::memcpy(to, piece.x + pixel * p.c, piece.channels * sizeof(float));
    } else {
      std::memset(to, 0, piece.channels * sizeof(float));
    }
  }
}

Status MultiplyGathered(const ConvProblem& p, const std::vector<Piece>& pieces, float* gathered) {
  int64_t pixels = p.n * p.out_pixels();
  for (int64_t first = 0; first < pixels; first += kGatheredPixels) {
    int64_t count = std::min(kGatheredPixels, pixels - first);
    for (const Piece& piece : pieces) {
      Gather(p, piece, first, count, gathered);
      JAXCONV_RETURN_IF_ERROR(AddProduct(p, piece.channels, count, gathered, piece.channels,
                                         piece.dy + first * p.k, piece.dw));
    }
  }
  return {};
}

Status MultiplyInPlace(const ConvProblem& p, const std::vector<Piece>& pieces) {
  for (int64_t row = 0; row < p.n * p.out[0] * p.out[1]; ++row) {
    int64_t image = row / (p.out[0] * p.out[1]);
    int64_t p0 = row / p.out[1] % p.out[0], p1 = row % p.out[1];
    for (int64_t q = 0; q < p.out[2]; q += kRowPixels) {
      for (const Piece& piece : pieces) {
        int64_t i0 = p0 * p.stride[0] + piece.tap[0] * p.dilation[0] - p.pad_lo[0];
        int64_t i1 = p1 * p.stride[1] + piece.tap[1] * p.dilation[1] - p.pad_lo[1];
        if (i0 < 0 || i0 >= p.in[0] || i1 < 0 || i1 >= p.in[1]) continue;
        int64_t shift = piece.tap[2] * p.dilation[2] - p.pad_lo[2];
        int64_t q_begin = std::max(q, CeilDiv(-shift, p.stride[2]));
        int64_t q_end =
            std::min({q + kRowPixels, p.out[2], FloorDiv(p.in[2] - 1 - shift, p.stride[2]) + 1});
        if (q_begin >= q_end) continue;
        int64_t pixel =
            ((image * p.in[0] + i0) * p.in[1] + i1) * p.in[2] + q_begin * p.stride[2] + shift;
        JAXCONV_RETURN_IF_ERROR(AddProduct(p, piece.channels, q_end - q_begin,
                                           piece.x + pixel * p.c, p.stride[2] * p.c,
                                           piece.dy + (row * p.out[2] + q_begin) * p.k, piece.dw));
      }
    }
  }
  return {};
}

bool GathersPixels(const ConvProblem& p) { return p.out[2] < kLongRow; }

// Tasks divide the input channels, so that each reads a part of x, while each has at least 64,
// enough for an efficient matrix product. More tasks divide such a part by taps, and a tap's
// channels into blocks of 16, a vector.
constexpr int64_t kEfficientChannels = 64, kChannelBlock = 16;

int64_t ChannelParts(const ConvProblem& p, int64_t tasks) {
  return std::clamp<int64_t>(p.batch * p.c / kEfficientChannels, 1, tasks);
}

// Adds the pieces of channels [begin, end) for one tap, in all independent convolutions.
void AddPieces(const ConvProblem& p, int64_t tap, int64_t begin, int64_t end, const float* x,
               const float* dy, float* dw, std::vector<Piece>* pieces) {
  const int64_t c_per_group = p.c_per_group();
  while (begin < end) {
    const int64_t b = begin / p.c, c = begin % p.c, first_k = c / c_per_group * p.k_per_group();
    Piece piece;
    piece.tap = TapAt(p, tap);
    piece.channels = std::min(end - begin, c_per_group - c % c_per_group);
    piece.x = x + b * p.n * p.in_pixels() * p.c + c;
    piece.dy = dy + b * p.n * p.out_pixels() * p.k + first_k;
    piece.dw =
        dw + b * (p.w_elements() / p.batch) + (tap * c_per_group + c % c_per_group) * p.k + first_k;
    pieces->push_back(piece);
    begin += piece.channels;
  }
}

}  // namespace

Status GemmWgradPays(const ConvProblem& p, int64_t onednn_tasks) {
  const int64_t c = p.c_per_group(), k = p.k_per_group();
  // Every oneDNN task unpacks and adds its own filter, which does not pay for few pixels. Matrix
  // products with few channels are less efficient, so they win only for fewer pixels (measured: 1x1
  // and 3x3, 64 to 512 channels, 1 to 32 tasks, docs/notes/cpu.md).
  const int64_t few_pixels = std::clamp<int64_t>(c * k / 64, 64, 512) * onednn_tasks;
  if (p.n * p.out_pixels() > few_pixels && (p.rank != 1 || GathersPixels(p))) {
    return Status::Unimplemented("pays for long one-dimensional rows or few pixels only");
  }
  if (c < 64 || k < 64) return Status::Unimplemented("pays from 64 channels per group on");
  return {};
}

int64_t GemmWgradTasks(const ConvProblem& p, int64_t most) {
  return std::min(most, p.taps() * CeilDiv(p.batch * p.c, kChannelBlock));
}

int64_t GemmWgradScratchBytes(const ConvProblem& p, int64_t tasks) {
  if (!GathersPixels(p)) return 0;
  int64_t channels = std::min(p.c_per_group(), CeilDiv(p.batch * p.c, ChannelParts(p, tasks)));
  return kGatheredPixels * channels * static_cast<int64_t>(sizeof(float));
}

Status GemmWgradTask(const ConvProblem& p, int64_t task, int64_t tasks, const float* x,
                     const float* dy, float* scratch, float* dw) {
  const int64_t parts = ChannelParts(p, tasks), all = p.batch * p.c;
  const int64_t part = task * parts / tasks;
  const int64_t first_task = CeilDiv(part * tasks, parts);  // first task of the part
  const int64_t sharing = CeilDiv((part + 1) * tasks, parts) - first_task;
  const int64_t first = part * all / parts, channels = (part + 1) * all / parts - first;
  const int64_t blocks = CeilDiv(channels, kChannelBlock), share = task - first_task;
  std::vector<Piece> pieces;
  const int64_t end = (share + 1) * p.taps() * blocks / sharing;
  for (int64_t at = share * p.taps() * blocks / sharing; at < end;) {
    const int64_t tap = at / blocks, next = std::min(end, (tap + 1) * blocks);
    AddPieces(p, tap, first + at % blocks * kChannelBlock,
              first + std::min(channels, (next - tap * blocks) * kChannelBlock), x, dy, dw,
              &pieces);
    at = next;
  }
  for (const Piece& piece : pieces) {
    for (int64_t i = 0; i < piece.channels; ++i) {
      std::memset(piece.dw + i * p.k, 0, p.k_per_group() * sizeof(float));
    }
  }
  return GathersPixels(p) ? MultiplyGathered(p, pieces, scratch) : MultiplyInPlace(p, pieces);
}

}  // namespace jaxconv::cpu
