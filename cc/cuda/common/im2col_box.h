// Limits of TMA's im2col boxes.
#ifndef JAXCONV_CUDA_COMMON_IM2COL_BOX_H_
#define JAXCONV_CUDA_COMMON_IM2COL_BOX_H_

#include <algorithm>
#include <cstdint>

namespace jaxconv {

// The fields of a tensor map and of the im2col copy instruction, by spatial rank: the corners of
// the box of base pixels, and a tap's offset from them.
struct Im2colLimits {
  int64_t lower, upper, offset;
};
inline constexpr Im2colLimits kIm2colLimits[] = {
    {0, 0, 0}, {-32768, 32767, 65535}, {-128, 127, 255}, {-16, 15, 31}};
inline constexpr int32_t kMaxElementStride = 8;

// Pixel numbers of a tile past the end still fit in 32 bits.
inline constexpr int64_t kMaxIm2colRows = (int64_t{1} << 31) - 4096;

// Filter-row reuse: the base pixels of a row that TMA loads. They cover the padded row, so that tap
// s reads the pixel s places further on. A read past the row's end reaches the start of the next
// row; both hold zeros there, so adjacent rows share their padding. `span`: from the first tap to
// the last; `lower`: the first base pixel.
inline int64_t WalkedPixels(int64_t outputs, int64_t span, int64_t src_extent, int64_t lower) {
  return std::min(outputs + span, std::max({outputs, src_extent - lower, outputs + span + lower}));
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_IM2COL_BOX_H_
