// The parameters of family winograd. Plain data, made on the host without CUDA headers.
//
// fprop and dgrad share one geometry: a 3x3 window of stride 1 maps an input (images, in_h, in_w,
// groups * red) to an output (images, out_h, out_w, groups * cols). In dgrad the input is dy, the
// padding is 2 - pad, and the filter is rotated by 180 degrees and transposed, by means of its
// strides.
//
// Tiles of m x m outputs (1 x m of a one-dimensional transform) are counted along W, then H, then
// images: t = (image * tiles_h + row) * tiles_w + column. Tiles at the lower and right edge may
// reach past the output: inputs outside the image are zeros, outputs outside are not stored.
//
// In memory (points are counted row by row):
//     V [point][tile][groups * red]     float16    tiles of a chunk
//     U [point][groups * cols][red]     float16    one-dimensional: row_filter.h, per group
//     M [point][tile][groups * cols]    float32    tiles of a chunk; of half_products float16,
//                                                  times 2^-ProductExponent(red)
#ifndef JAXCONV_CUDA_WINOGRAD_PARAMS_H_
#define JAXCONV_CUDA_WINOGRAD_PARAMS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/fast_divmod.h"

namespace jaxconv::winograd {

// float16's largest number is 65504. A bfloat16 or float32 tensor is scaled by a power of two that
// brings its largest magnitude to 2^13 .. 2^14. The balanced B^T and G do not enlarge magnitudes,
// except by rounding.
inline constexpr int kScaledExponent = 13;
// A product of two scaled operands is below 2^28. Dividing by 2 to this power brings a sum of `red`
// products below 2^15, so M does not overflow float16.
inline int32_t ProductExponent(int32_t red) {
  int32_t exponent = kScaledExponent;
  while (int64_t{1} << (exponent - kScaledExponent) < red) ++exponent;
  return exponent;
}
// CTAs of the amax pass, one partial maximum each: about four CTAs an SM with 132 SMs. Every
// reading warp takes their maximum itself.
inline constexpr int kMaxPartials = 512;

// The position of a tile.
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

// The source of a tensor's power of two: its partial maxima, or a number in memory (prepared
// filter). If both are null, it is 1.
//
// The transform multiplies the tensor by this number if assumed == 0. If the transform itself
// computes the maxima, it multiplies by `assumed`. With a repair, the transform is repeated with
// the number itself where the assumption fails (kMostAssumedRatio).
struct ScaleSource {
  const uint32_t* partials = nullptr;
  const float* value = nullptr;
  float assumed = 0;
  bool repaired = false;
};

// The constants that multiply bfloat16 operands whose maxima the transforms compute. They suit
// activations with a largest magnitude between 2^-3 and 2^9, and filters between 2^-7 and 2^5.
inline constexpr float kAssumedInputScale = 32.0f, kAssumedFilterScale = 512.0f;
// The assumption holds if the tensor's own power of two lies between the assumed one and this
// multiple of it: then no element overflows, and elements 2^16 times smaller than the largest are
// normal.
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
  DType dtype = DType::kF16;     // type of the input and, unless it is prepared, of the filter
  Workspace workspace;
  int32_t chunk_tiles = 1;                       // tiles whose V and M the workspace holds
  int32_t ctas = 0;                              // CTAs of a persistent kernel, at most
  int32_t column_parts = 1;                      // parts of a group's columns, in different CTAs
  int64_t in_elements = 0, filter_elements = 0;  // of the operands

  int32_t alpha() const { return m + 2; }
  int32_t points() const { return one_dimensional ? alpha() : alpha() * alpha(); }
  bool scaled() const { return dtype != DType::kF16 || half_products; }
  // Whether the transforms compute the largest magnitudes while they read the operands, to scale M.
  // float16 operands need no scale for V and U. bfloat16 activations and filters mostly fit with
  // constant scales; gradients, often below 2^-3, have an amax pass.
  bool measured() const { return half_products && (dtype == DType::kF16 || assumes()); }
  bool assumes() const { return half_products && dtype == DType::kBF16 && forward; }
  int32_t element_bytes() const { return dtype == DType::kF32 ? 4 : 2; }  // of the operands
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_PARAMS_H_
