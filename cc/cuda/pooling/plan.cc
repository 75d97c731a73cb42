#include "cuda/pooling/plan.h"

#include <algorithm>
#include <string>

namespace jaxconv {

Status CheckPoolWindows(const PoolWindows& w, bool places) {
  // Coordinates, and the vector indices from which threads are decoded, have 31 bits.
  constexpr int64_t kMost = int64_t{1} << 30;
  if (w.channels < kPoolVector || w.channels % kPoolVector != 0 || w.channels >= kMost) {
    return Status::Unimplemented("expected a multiple of 8 channels, got " +
                                 std::to_string(w.channels));
  }
  if (w.size[0] * w.size[1] * w.size[2] > kMaxPoolWindow) {
    return Status::Unimplemented("expected at most 49 elements in a window");
  }
  // Windows, and strides of the padded array, times vectors of 8 channels.
  int64_t windows = w.batch * (w.channels / kPoolVector), strides = windows;
  for (int i = 0; i < kPoolAxes; ++i) {
    const bool legal = w.in[i] >= 1 && w.out[i] >= 1 && w.size[i] >= 1 && w.stride[i] >= 1 &&
                       w.low[i] >= 0 && w.stride[i] < kMost && w.low[i] < kMost &&
                       w.in[i] < kMost && w.out[i] < kMost && (w.out[i] - 1) * w.stride[i] < kMost;
    if (!legal) return Status::Unimplemented("an extent is out of range");
    windows *= w.out[i];
    strides *= (w.low[i] + w.in[i] + w.stride[i] - 1) / w.stride[i];
    if (windows >= 2 * kMost || strides >= 2 * kMost) {
      return Status::Unimplemented("expected fewer than 2^31 vectors of 8 channels");
    }
  }
  if (places && w.last_place() >= kNoPlace) {
    return Status::Unimplemented("expected places below 255, got " +
                                 std::to_string(w.last_place()));
  }
  return {};
}

namespace pooling {
namespace {

// The most windows of a thread: for 3x3 with stride 2 it reads 17 rows for 8 windows.
constexpr int64_t kMaxWalk = 8;
// Threads have fewer windows if the GPU would otherwise have less than four times its resident
// threads.
constexpr int64_t kThreadsOfSm = 4 * kPoolCtas<2, true> * kPoolThreads;

// The window counts whose positions and gradients a thread of the gradient holds; at most 9, for
// 3x3 with stride 1. More windows are held in groups.
constexpr int kHeld[] = {1, 2, 4, 9};
constexpr int kGroup = 4;

// A thread's instructions for an element of a window, and once more for normalising it, and for
// recording its place or comparing it. Fitted to ResNet-50's layer on an H200 (docs/notes/fuse.md):
// 262 us, gradient 442 us.
constexpr double kElementInstructions = 9;

Status WindowsOf(const PassKey& key, PoolWindows* w) {
  const std::vector<int64_t> in = key.Extents('i'), size = key.Extents('f'), out = key.Extents('o'),
                             stride = key.Extents('s'), low = key.Extents('p');
  w->batch = key.Number('b', 0), w->channels = key.Number('c', 0);
  for (const auto& each : {size, out, stride, low}) {
    if (in.empty() || in.size() > kPoolAxes || each.size() != in.size()) {
      return Status::InvalidArgument("expected i, f, o, s and p of one to three axes");
    }
  }
  for (size_t i = 0; i < in.size(); ++i) {
    w->SetAxis(i, in.size(), in[i], size[i], out[i], stride[i], low[i]);
  }
  return {};
}

double Count(int64_t batch, const int64_t (&extents)[kPoolAxes], int64_t channels) {
  double count = static_cast<double>(batch) * static_cast<double>(channels);
  for (const int64_t extent : extents) count *= static_cast<double>(extent);
  return count;
}

}  // namespace

const std::vector<PassKernel>& Kernels() {
  static const std::vector<PassKernel> kernels = {
#define JAXCONV_PASS_FAMILY "pooling"
#define PASS(pass, types, variant, form) JAXCONV_PASS_KERNELS(pass, types, variant, false, form)
#define PASS_SM90(pass, types, variant, form) JAXCONV_PASS_KERNELS(pass, types, variant, true, form)
#include "cuda/pooling/kernels.def"
#undef PASS
#undef PASS_SM90
  };
  return kernels;
}

int64_t WalkOf(const PoolWindows& w, int64_t sm_count) {
  const int64_t columns = w.batch * w.out[1] * w.out[2] * (w.channels / kPoolVector);
  const int64_t longest =
      std::min({columns * w.out[0] / (kThreadsOfSm * sm_count), kMaxWalk, w.out[0]});
  return std::max<int64_t>(1, longest);
}

PassForm FormOfPool(const PoolWindows& w, DType dtype, bool affine, bool places, int64_t walk) {
  // A thread with one window keeps nothing.
  const int64_t shared = std::min(walk, w.out[0]) > 1 ? w.size[0] - w.stride[0] : 0;
  const bool row = w.size[1] == 1 && w.size[2] <= kPoolColumns;
  PassForm form = {affine, places, shared == 1 || shared == 2 ? static_cast<int>(shared) : 0, row};
  if (FindForm(Kernels(), "max_pool", dtype, form) == nullptr) form[2] = 0;
  return form;
}

PassForm FormOfGradient(const PoolWindows& w, bool two, bool affine) {
  const int64_t windows = w.overlaps(0) * w.overlaps(1) * w.overlaps(2);
  for (const int held : kHeld) {
    if (windows <= held) return {held, true, two, affine};
  }
  return {kGroup, false, two, affine};
}

Status PlanOf(const PassKey& key, const Gpu& gpu, PassPlan* plan) {
  PoolWindows w;
  JAXCONV_RETURN_IF_ERROR(WindowsOf(key, &w));
  const bool back = key.pass() == "max_pool_gradient", affine = key.Has("affine");
  const bool two = key.Number('g', 1) == 2, places = back || key.Has("places");
  JAXCONV_RETURN_IF_ERROR(CheckPoolWindows(w, places));
  const bool sm90 = gpu.compute_capability() == 90;
  const auto width = static_cast<double>(ByteWidth(key.dtype()));
  const double elements = Count(w.batch, w.in, w.channels);
  const double windows = Count(w.batch, w.out, w.channels);
  PassCost cost;
  PassForm form;
  if (back) {
    form = FormOfGradient(w, two, affine);
    const double overlaps = static_cast<double>(w.overlaps(0) * w.overlaps(1) * w.overlaps(2));
    cost.bytes = elements * width * (1 + affine) + windows * (width * (1 + two) + 1);
    cost.instructions = elements * overlaps * kElementInstructions * 2;
    cost.ctas = static_cast<int64_t>(elements) /
                (kPoolVector * w.stride[0] * w.stride[1] * w.stride[2] * kPoolThreads);
    cost.ctas_of_sm = 4;
  } else {
    const int64_t walk = WalkOf(w, gpu.sm_count);
    form = FormOfPool(w, key.dtype(), affine, places, walk);
    cost.bytes = elements * width + windows * (width * (1 + key.Has("operands")) + places);
    const double taken =
        windows * static_cast<double>((w.size[0] - form[2]) * w.size[1] * w.size[2]);
    cost.instructions = taken * kElementInstructions * (1 + affine + places);
    cost.ctas = static_cast<int64_t>(windows) / (kPoolVector * walk * kPoolThreads);
    cost.ctas_of_sm = width == 4 ? kPoolCtas<4, true>
                      : sm90     ? kPoolCtas<2, true>
                                 : kPoolCtas<2, false>;
  }
  cost.ctas = std::max<int64_t>(cost.ctas, 1);
  const PassKernel* const kernel = FindForm(Kernels(), key.pass(), key.dtype(), form, sm90);
  if (kernel == nullptr) return Status::Unimplemented("no kernel has this form");
  plan->kernel = kernel->name;
  plan->microseconds = PassMicroseconds(cost, gpu);
  return {};
}

}  // namespace pooling
}  // namespace jaxconv
