#include <cuda_runtime.h>

#include <type_traits>

#include "core/fast_divmod.h"
#include "cuda/common/element.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/pooling/element_words.cuh"
#include "cuda/pooling/max_pool_gradient.h"
#include "cuda/pooling/plan.h"
#include "cuda/ptx/kept.cuh"

namespace jaxconv {
namespace {

// Rounded up to groups of four windows.
constexpr int kMaxBefore = kMaxPoolWindow + 3;

// One of the windows that contain a thread's elements.
struct Before {
  uint8_t strides[kPoolAxes];  // strides from the window's start to the elements
  uint32_t number;             // the place of that position in the window, in every byte
};

struct Params {
  int32_t in[kPoolAxes], out[kPoolAxes], size[kPoolAxes], stride[kPoolAxes], low[kPoolAxes];
  int32_t weight[kPoolAxes];
  int32_t windows, channels;
  Before before[kMaxBefore];
  // Masks of all windows, and of those that start farthest before along an axis: these do not reach
  // elements whose coordinate within the stride is at least `reach`.
  uint64_t all, farthest[kPoolAxes];
  int32_t reach[kPoolAxes];
  int64_t threads;
  FastDivmod vectors, grid[kPoolAxes];  // strides of the padded array
  const void* dy;
  const void* dy2;
  const uint8_t* places;
  const void* y;
  const float *scale, *y_scale, *offset;
  void* dx;
};

// A thread has 8 channels of the elements from stride * i to stride * (i + 1) - 1 along each axis.
// These lie in the same windows: window i and windows that begin before it. The thread holds the
// places and gradients of kHeld windows: of all, or of one group at a time for each element. A warp
// loads and stores whole cache lines, or lines shared with the next warp. Loops are uniform: in
// place of a window that does not exist, a thread reads another window and ignores its places;
// elements in the padding are not stored.
template <typename T, int kHeldArg, bool kAllArg, bool kTwoArg, bool kAffineArg>
struct GatherForm {
  using Element = T;
  static constexpr int kHeld = kHeldArg;
  static constexpr bool kAll = kAllArg, kTwo = kTwoArg, kAffine = kAffineArg;
  static constexpr int kCtas = kHeld > 4 ? 2 : sizeof(T) == 4 ? 3 : 4;  // of an SM
};

template <class Tag>
__global__ void __launch_bounds__(kPoolThreads, Tag::kCtas)
    GatherGradient(const __grid_constant__ Params p) {
  using T = typename Tag::Element;
  using Words = ElementWords<T>;
  constexpr int kHeld = Tag::kHeld;
  constexpr bool kAll = Tag::kAll, kTwo = Tag::kTwo, kAffine = Tag::kAffine;
  const int64_t index = int64_t{blockIdx.x} * kPoolThreads + threadIdx.x;
  if (index >= p.threads) return;
  int32_t rest, vector, example, block[kPoolAxes];
  p.vectors.Divmod(static_cast<int32_t>(index), &rest, &vector);
  p.grid[2].Divmod(rest, &rest, &block[2]);
  p.grid[1].Divmod(rest, &rest, &block[1]);
  p.grid[0].Divmod(rest, &example, &block[0]);
  const int32_t channel = vector * kPoolVector;
  const uint32_t step = static_cast<uint32_t>(p.weight[2]) * 0x01010101u;
  using Bits = std::conditional_t<kAll, uint32_t, uint64_t>;

  float dy[kHeld][kPoolVector];
  uint2 places[kHeld];
  auto load = [&](int32_t first) {
    Words gradients[kHeld], gradients2[Tag::kTwo ? Tag::kHeld : 1];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const Before& before = p.before[first + k];
      bool exists = true;
      int32_t pixel = example;
#pragma unroll
      for (int i = 0; i < kPoolAxes; ++i) {
        const int32_t window = block[i] - before.strides[i];
        const int32_t read = min(max(window, 0), p.out[i] - 1);
        exists = exists && window == read;
        pixel = pixel * p.out[i] + read;
      }
      const int64_t at = int64_t{pixel} * p.channels + channel;
      places[k] = __ldg(reinterpret_cast<const uint2*>(p.places + at));
      gradients[k] = Words::Load(p.dy, at);
      if constexpr (kTwo) gradients2[k] = Words::Load(p.dy2, at);
      if (!exists) places[k] = make_uint2(0xffffffffu, 0xffffffffu);  // kNoPlace
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if constexpr (kTwo) gradients[k] = gradients[k].Plus(gradients2[k]);
      gradients[k].Unpack(dy[k]);
    }
  };
  // Adds the gradient where the position is the element's.
  auto add = [&](int k, uint32_t number, float (&sum)[kPoolVector]) {
    const uint32_t low = places[k].x ^ number, high = places[k].y ^ number;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((low & 0xffu << 8 * i) == 0) sum[i] += dy[k][i];
      if ((high & 0xffu << 8 * i) == 0) sum[i + 4] += dy[k][i + 4];
    }
  };

  if constexpr (kAll) load(0);
  float scale[kPoolVector], y_scale[kPoolVector], offset[kPoolVector];
  if constexpr (kAffine) {
    LoadNumbers(p.scale + channel, scale);
    LoadNumbers(p.y_scale + channel, y_scale);
    LoadNumbers(p.offset + channel, offset);
  }
  int32_t first[kPoolAxes];
#pragma unroll
  for (int i = 0; i < kPoolAxes; ++i) first[i] = Kept(block[i] * p.stride[i] - p.low[i]);
  const int64_t line = int64_t{p.in[2]} * p.channels;
  int64_t plane = ((int64_t{example} * p.in[0] + first[0]) * p.in[1] + first[1]) * line +
                  int64_t{first[2]} * p.channels + channel;
  for (int32_t a = 0; a < p.stride[0]; ++a, plane += p.in[1] * line) {
    const Bits in_a = static_cast<Bits>(a < p.reach[0] ? p.all : p.all & ~p.farthest[0]);
    int64_t row = plane;
    for (int32_t b = 0; b < p.stride[1]; ++b, row += line) {
      const Bits in_b = b < p.reach[1] ? in_a : in_a & static_cast<Bits>(~p.farthest[1]);
      const int32_t h = first[0] + a, d = first[1] + b;
      const bool inside = h >= 0 && h < p.in[0] && d >= 0 && d < p.in[1];
      uint32_t within = static_cast<uint32_t>(a * p.weight[0] + b * p.weight[1]) * 0x01010101u;
      int64_t at = row;
      for (int32_t c = 0; c < p.stride[2]; ++c, at += p.channels, within += step) {
        Bits contain = c < p.reach[2] ? in_b : in_b & static_cast<Bits>(~p.farthest[2]);
        const int32_t w = first[2] + c;
        const bool stored = inside && w >= 0 && w < p.in[2];
        Words y = {};
        if constexpr (kAffine) {
          if (stored) y = Words::Load(p.y, at);
        }
        float sum[kPoolVector] = {};
        for (int32_t group = 0; group < (kAll ? 1 : p.windows); group += kHeld) {
          if constexpr (!kAll) load(group);
#pragma unroll
          for (int k = 0; k < kHeld; ++k) {
            if ((contain >> k & 1) != 0) add(k, p.before[group + k].number + within, sum);
          }
          if constexpr (!kAll) contain >>= kHeld;
        }
        if constexpr (kAffine) {
          float of_y[kPoolVector];
          y.Unpack(of_y);
#pragma unroll
          for (int i = 0; i < kPoolVector; ++i) {
            sum[i] = sum[i] * scale[i] + (of_y[i] * y_scale[i] + offset[i]);
          }
        }
        if (stored) Words::Rounded(sum).Store(p.dx, at);
      }
    }
  }
}

template <class Tag>
Status LaunchGather(const Params& p, void* stream) {
  LaunchConfig config;
  config.threads = kPoolThreads;
  config.grid = static_cast<unsigned>((p.threads + kPoolThreads - 1) / kPoolThreads);
  return Launch<GatherGradient<Tag>>("max_pool_gradient", config, stream, p);
}

#define JAXCONV_OF_max_pool(...)
#define PASS_SM90(...)
#define PASS(pass, types, variant, form) JAXCONV_OF_##pass(types, variant, JAXCONV_PASS_UNPACK form)
#define JAXCONV_OF_max_pool_gradient(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_TAG, max_pool_gradient, variant, GatherForm, __VA_ARGS__)
#include "cuda/pooling/kernels.def"
#undef JAXCONV_OF_max_pool_gradient

constexpr PassLaunch<Params> kLaunches[] = {
#define JAXCONV_OF_max_pool_gradient(types, variant, ...)                                \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_ROW, max_pool_gradient, variant, LaunchGather, \
                             __VA_ARGS__)
#include "cuda/pooling/kernels.def"
};

}  // namespace

Status LaunchMaxPoolGradient(DType dtype, const MaxPoolGradient& gradient, void* stream) {
  const PoolWindows& w = gradient.windows;
  JAXCONV_RETURN_IF_ERROR(CheckPoolWindows(w, /*places=*/true));
  JAXCONV_RETURN_IF_ERROR(
      CheckAligned({gradient.dy, gradient.dy2, gradient.y, gradient.places, gradient.scale,
                    gradient.y_scale, gradient.offset, gradient.dx}));
  Params p = {};
  p.threads = w.batch * (w.channels / kPoolVector);
  for (int i = 0; i < kPoolAxes; ++i) {
    p.in[i] = static_cast<int32_t>(w.in[i]), p.out[i] = static_cast<int32_t>(w.out[i]);
    p.size[i] = static_cast<int32_t>(w.size[i]), p.stride[i] = static_cast<int32_t>(w.stride[i]);
    p.low[i] = static_cast<int32_t>(w.low[i]), p.weight[i] = static_cast<int32_t>(w.weight(i));
    const int64_t grid = (w.low[i] + w.in[i] + w.stride[i] - 1) / w.stride[i];
    p.grid[i] = FastDivmod(grid);
    p.reach[i] = static_cast<int32_t>(w.size[i] - (w.overlaps(i) - 1) * w.stride[i]);
    p.threads *= grid;
  }
  for (int64_t a = 0; a < w.overlaps(0); ++a) {
    for (int64_t b = 0; b < w.overlaps(1); ++b) {
      for (int64_t c = 0; c < w.overlaps(2); ++c) {
        const int64_t strides[] = {a, b, c};
        const uint64_t bit = uint64_t{1} << p.windows;
        Before& before = p.before[p.windows++];
        p.all |= bit;
        for (int i = 0; i < kPoolAxes; ++i) {
          before.strides[i] = static_cast<uint8_t>(strides[i]);
          before.number += static_cast<uint32_t>(strides[i] * w.stride[i] * w.weight(i));
          if (strides[i] + 1 == w.overlaps(i)) p.farthest[i] |= bit;
        }
        before.number *= 0x01010101u;
      }
    }
  }
  p.channels = static_cast<int32_t>(w.channels);
  p.vectors = FastDivmod(w.channels / kPoolVector);
  p.dy = gradient.dy, p.dy2 = gradient.dy2, p.places = gradient.places, p.dx = gradient.dx;
  p.y = gradient.y, p.scale = gradient.scale, p.y_scale = gradient.y_scale;
  p.offset = gradient.offset;
  const PassForm form = pooling::FormOfGradient(w, p.dy2 != nullptr, p.y != nullptr);
  return LaunchOfForm(kLaunches, dtype, form, p, stream);
}

}  // namespace jaxconv
