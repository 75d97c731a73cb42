// What the kernels of family winograd know of a problem. Plain data, made on the host without CUDA
// headers.
//
// fprop and dgrad are one geometry: an input (images, in_h, in_w, groups * red) and an output
// (images, out_h, out_w, groups * cols), between them a 3x3 window of stride 1. dgrad's input is
// dy, its padding 2 - pad, and its filter is turned by 180 degrees and transposed, which is a
// matter of the filter's strides.
//
// Tiles of m x m outputs (1 x m of a one-dimensional transform) are counted along W, then H, then
// images: t = (image * tiles_h + row) * tiles_w + column. Those at the lower and right edge reach
// past the output: their inputs outside the image are zeros, their outputs outside are not stored.
//
// In memory (points are counted row by row):
//     V [point][tile][groups * red]     float16    tiles of a chunk
//     U [point][groups * cols][red]     float16    one-dimensional: row_filter.h for each group
//     M [point][tile][groups * cols]    float32    tiles of a chunk; of half_products float16,
//                                                  times 2^-ProductExponent(red)
#ifndef JAXCONV_CUDA_WINOGRAD_PARAMS_H_
#define JAXCONV_CUDA_WINOGRAD_PARAMS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/fast_divmod.h"

namespace jaxconv::winograd {

// float16's largest number is 65504. A tensor of bfloat16 or float32 is multiplied by a power of
// two that brings its largest magnitude to 2^13 .. 2^14: B^T and G, balanced, enlarge nothing, but
// rounding may.
inline constexpr int kScaledExponent = 13;
// Products of two scaled operands are below 2^28 each, so that this many powers of two less bring
// their sum below 2^15: no M overflows float16.
inline int32_t ProductExponent(int32_t red) {
  int32_t exponent = kScaledExponent;
  while (int64_t{1} << (exponent - kScaledExponent) < red) ++exponent;
  return exponent;
}
// CTAs of the amax pass, each of which leaves one partial maximum: with 132 SMs four CTAs an SM.
// Every CTA of a reader takes the largest of them by itself.
inline constexpr int kMaxPartials = 512;

// The place of a tile.
struct TilePlace {
  int32_t image, row, column;  // of the tile in its image, in tiles
};

struct Geometry {
  int32_t images = 1, in_h = 1, in_w = 1, out_h = 1, out_w = 1;
  int32_t pad_h = 0, pad_w = 0;           // low sides, of any sign
  int32_t groups = 1, red = 1, cols = 1;  // channels of a group
  int32_t tiles = 1;                      // of the whole problem
  FastDivmod tiles_h, tiles_w;            // of an image

  JAXCONV_HOST_DEVICE int32_t in_channels() const { return groups * red; }
  JAXCONV_HOST_DEVICE int32_t out_channels() const { return groups * cols; }
  JAXCONV_HOST_DEVICE TilePlace Place(int32_t tile) const {
    TilePlace place;
    int32_t rows;
    tiles_w.Divmod(tile, &rows, &place.column);
    tiles_h.Divmod(rows, &place.image, &place.row);
    return place;
  }
};

// Tap (r, s) of reduction channel c and column k of group g lies .first + r * .r + s * .s + c *
// .red + k * .col + g * .group elements into the filter. dgrad's first tap is the filter's last,
// and its steps go back. One of .red and .col is 1.
struct FilterStrides {
  int64_t first = 0, r = 0, s = 0, red = 0, col = 0, group = 0;
};

// Where a tensor's power of two comes from: from its partial maxima, or a number in memory (of a
// prepared filter). Where both are null it is 1.
//
// The transform multiplies the tensor by this number (assumed == 0), or, where the maxima are taken
// by the transform itself, by `assumed`. With a repair (kMostAssumedRatio) it is made once more,
// with the number itself, where the assumption does not hold.
struct ScaleSource {
  const uint32_t* partials = nullptr;
  const float* value = nullptr;
  float assumed = 0;
  bool repaired = false;
};

// bfloat16 operands whose maxima the transforms take are multiplied by these, which suits
// activations with a largest magnitude between 2^-3 and 2^9, and filters between 2^-7 and 2^5.
inline constexpr float kAssumedInputScale = 32.0f, kAssumedFilterScale = 512.0f;
// The assumption holds where the tensor's own power of two is between the assumed one and this many
// times it: no element overflows, and those 2^16 times smaller than the largest are normal numbers.
inline constexpr float kMostAssumedRatio = 2048.0f;

// The parts of the workspace, as offsets in bytes.
struct Workspace {
  int64_t input_partials = 0;   // kMaxPartials words: the input's partial maxima (if scaled)
  int64_t filter_partials = 0;  // the filter's
  int64_t u = 0, v = 0, m = 0;
  int64_t bytes = 0;
};

// The parameter block of a plan.
struct LaunchParams {
  Geometry geometry;
  FilterStrides filter;
  int32_t m = 2;                 // outputs of a tile along an axis
  bool one_dimensional = false;  // tiles of 1 x m
  bool prepared = false;         // the filter is a record and U
  bool out_is_f32 = false;       // else the operand type
  bool half_products = false;    // M is float16
  bool forward = true;           // fprop
  DType dtype = DType::kF16;     // of the input and, if it is not prepared, of the filter
  Workspace workspace;
  int32_t chunk_tiles = 1;                       // tiles whose V and M the workspace holds
  int32_t ctas = 0;                              // of a persistent kernel, at most
  int32_t column_parts = 1;                      // of a group's columns, of different CTAs
  int64_t in_elements = 0, filter_elements = 0;  // of the operands

  int32_t alpha() const { return m + 2; }
  int32_t points() const { return one_dimensional ? alpha() : alpha() * alpha(); }
  bool scaled() const { return dtype != DType::kF16 || half_products; }
  // The transforms take the largest magnitudes while they read the operands, and M is scaled by
  // them. float16 holds V and U of float16 operands as they are. Activations and filters of
  // bfloat16 it mostly holds with constant scales; gradients, often below 2^-3, have a pass in
  // front.
  bool measured() const { return half_products && (dtype == DType::kF16 || assumes()); }
  bool assumes() const { return half_products && dtype == DType::kBF16 && forward; }
  int32_t element_bytes() const { return dtype == DType::kF32 ? 4 : 2; }  // of the operands
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_PARAMS_H_
