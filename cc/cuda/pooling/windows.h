// The windows of pooling on a contiguous array (batch, outer, middle, inner, channels). Arrays with
// two spatial axes have extent 1 along the middle axis; with one, also along the inner axis.
#ifndef JAXCONV_CUDA_POOLING_WINDOWS_H_
#define JAXCONV_CUDA_POOLING_WINDOWS_H_

#include <cstddef>
#include <cstdint>

namespace jaxconv {

inline constexpr int kPoolAxes = 3;

// Channels of a thread: 16 bytes of 16-bit elements, 32 bytes of float32.
inline constexpr int kPoolVector = 8;

// The most elements of a window, 7x7.
inline constexpr int64_t kMaxPoolWindow = 49;

// The value for "no position".
inline constexpr int kNoPlace = 255;

struct PoolWindows {
  int64_t batch = 1, channels = 0;
  int64_t in[kPoolAxes] = {1, 1, 1};      // elements
  int64_t out[kPoolAxes] = {1, 1, 1};     // windows
  int64_t size[kPoolAxes] = {1, 1, 1};    // elements of a window
  int64_t stride[kPoolAxes] = {1, 1, 1};  // from window to window
  int64_t low[kPoolAxes] = {0, 0, 0};     // elements of padding before the first

  // Sets one of an array's spatial axes. With two axes these are the outer and the inner one, with
  // one the outer one.
  void SetAxis(size_t axis, size_t axes, int64_t elements, int64_t of_window, int64_t windows,
               int64_t step, int64_t padding) {
    const size_t at = axis == 1 && axes == 2 ? 2 : axis;
    in[at] = elements, size[at] = of_window, out[at] = windows;
    stride[at] = step, low[at] = padding;
  }

  // The most windows that contain an element.
  int64_t overlaps(int axis) const { return (size[axis] + stride[axis] - 1) / stride[axis]; }

  // The place of a position in a window is its dot product with these weights, which are row-major
  // for window extents rounded up to a multiple of the stride.
  int64_t weight(int axis) const {
    int64_t weight = 1;
    for (int i = axis + 1; i < kPoolAxes; ++i) weight *= overlaps(i) * stride[i];
    return weight;
  }
  int64_t last_place() const {
    int64_t place = 0;
    for (int i = 0; i < kPoolAxes; ++i) place += (size[i] - 1) * weight(i);
    return place;
  }
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_POOLING_WINDOWS_H_
