// The types of the arrays that passes over rows of channels take together.
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

  // By an array with its channels on the last axis, whose leading axis is cut into segments. False
  // unless it has elements, along two to seven axes, and equal segments.
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

  // Numbers of the channels: a vector of all segments or, where `shape` has two axes, one for each.
  template <class Shape>
  ArrayType NumbersOf(const Shape& shape) const {
    if (shape.size() != 2) return vector;
    return {DType::kF32, Extents::Of({segments, channels})};
  }

  // Numbers of several kinds that are formed in parts of every segment, with so many parts as
  // `shape` has: (parts, kinds, channels), with the segments in front where there are several.
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
