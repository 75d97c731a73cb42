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
  int64_t elements = w.batch * (w.channels / kPoolVector), windows = elements;
  for (int i = 0; i < kPoolAxes; ++i) {
    const bool legal = w.in[i] >= 1 && w.out[i] >= 1 && w.size[i] >= 1 && w.stride[i] >= 1 &&
                       w.low[i] >= 0 && w.stride[i] < kMost && w.low[i] < kMost &&
                       w.in[i] < kMost && w.out[i] < kMost && (w.out[i] - 1) * w.stride[i] < kMost;
    if (!legal) return Status::Unimplemented("pooling: an extent is out of range");
    elements *= w.in[i] + w.low[i] + w.stride[i];
    windows *= w.out[i];
    if (elements >= 2 * kMost || windows >= 2 * kMost) {
      return Status::Unimplemented("pooling: more than 2^31 vectors of 8 channels");
    }
  }
  if (places && w.last_place() >= kNoPlace) {
    return Status::Unimplemented("pooling: expected places below 255, got " +
                                 std::to_string(w.last_place()));
  }
  return {};
}

}  // namespace jaxconv
