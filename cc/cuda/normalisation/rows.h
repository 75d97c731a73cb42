// Shape checks of the arrays of a pass over rows of channels.
#ifndef JAXCONV_CUDA_NORMALISATION_ROWS_H_
#define JAXCONV_CUDA_NORMALISATION_ROWS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/conv_problem.h"

namespace jaxconv {

struct RowsOfChannels {
  int64_t segments = 1, rows = 0, channels = 0;  // rows of a segment
  ArrayType whole, bits, vector;  // bits: one for each element, eight channels in a byte

  // Sets the types from an array with channels on the last axis, whose leading axis is divided into
  // segments. Returns false unless the array has elements, two to seven axes, and equal segments.
  template <class Shape>
  bool Set(DType dtype, const Shape& shape, int64_t equal_segments) {
    const size_t rank = shape.size();
    if (rank < 2 || rank > whole.shape.values.size() || equal_segments < 1) return false;
    const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
    if (empty || shape[0] % equal_segments != 0) return false;
    segments = equal_segments;
    channels = shape[rank - 1];
    rows = 1;
    for (size_t i = 0; i + 1 < rank; ++i) rows *= shape[i];
    rows /= segments;
    whole = {dtype, Extents::Of(shape)};
    bits = {DType::kU8, whole.shape};
    bits.shape.values[rank - 1] = CeilDiv(channels, 8);
    vector = {DType::kF32, Extents::Of({channels})};
    return true;
  }

  // A vector over the channels for all segments or, if `shape` has two axes, one for each segment.
  template <class Shape>
  ArrayType NumbersOf(const Shape& shape) const {
    if (shape.size() != 2) return vector;
    return {DType::kF32, Extents::Of({segments, channels})};
  }

  // Results of several kinds in parts of every segment: (parts, kinds, channels), with a leading
  // segment axis if there are several segments; `shape` gives the number of parts.
  template <class Shape>
  ArrayType PartsOf(const Shape& shape, int64_t kinds, int64_t* parts) const {
    const bool several = segments > 1;
    *parts = shape.size() == 3u + several ? std::max<int64_t>(shape[several], 1) : 1;
    return {DType::kF32, several ? Extents::Of({segments, *parts, kinds, channels})
                                 : Extents::Of({*parts, kinds, channels})};
  }
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_ROWS_H_
