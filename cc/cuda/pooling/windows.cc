#include "cuda/pooling/windows.h"

#include <string>

namespace jaxconv {

Status CheckPoolWindows(const PoolWindows& w, bool places) {
  // Coordinates, and the numbers of vectors that threads are decoded from, have 31 bits.
  constexpr int64_t kMost = int64_t{1} << 30;
  if (w.channels < kPoolVector || w.channels % kPoolVector != 0 || w.channels >= kMost) {
    return Status::Unimplemented("pooling: expected a multiple of 8 channels, got " +
                                 std::to_string(w.channels));
  }
  if (w.size[0] * w.size[1] * w.size[2] > kMaxPoolWindow) {
    return Status::Unimplemented("pooling: expected at most 49 elements in a window");
  }
  // Windows, and strides on the padded array, of 8 channels.
  int64_t windows = w.batch * (w.channels / kPoolVector), strides = windows;
  for (int i = 0; i < kPoolAxes; ++i) {
    const bool legal = w.in[i] >= 1 && w.out[i] >= 1 && w.size[i] >= 1 && w.stride[i] >= 1 &&
                       w.low[i] >= 0 && w.stride[i] < kMost && w.low[i] < kMost &&
                       w.in[i] < kMost && w.out[i] < kMost && (w.out[i] - 1) * w.stride[i] < kMost;
    if (!legal) return Status::Unimplemented("pooling: an extent is out of range");
    windows *= w.out[i];
    strides *= (w.low[i] + w.in[i] + w.stride[i] - 1) / w.stride[i];
    if (windows >= 2 * kMost || strides >= 2 * kMost) {
      return Status::Unimplemented("pooling: expected fewer than 2^31 vectors of 8 channels");
    }
  }
  if (places && w.last_place() >= kNoPlace) {
    return Status::Unimplemented("pooling: expected places below 255, got " +
                                 std::to_string(w.last_place()));
  }
  return {};
}

}  // namespace jaxconv
