// The mean and the sum of squared deviations M of every channel, by part, in one pass:
//
//     mean = pivot + offset,    offset = sum of (y - pivot) / rows,    M = sum of (y - mean)^2
//
// y is (segments, rows, channels), contiguous. Each of a segment's `parts` CTAs adds y - pivot and
// its square over its share of the rows in a fixed order. The pivot is the CTA's first row, so that
// a mean that is large relative to the deviations does not cancel. Pivot and offset are separate
// results, because their sum would lose digits of the offset. Part i has the blocks of rows
// blocks - 1 - i, blocks - 1 - i - parts, ... (PassPlan::block_rows rows each); the last block of a
// segment may be shorter.
#ifndef JAXCONV_CUDA_NORMALISATION_MOMENTS_H_
#define JAXCONV_CUDA_NORMALISATION_MOMENTS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv {

struct Moments {
  int64_t segments, rows, channels, parts;  // rows and parts of a segment; every part has rows
  const void* y;
  float* moments;  // (segments, parts, 3, channels): pivot, offset, M
};

// Unimplemented: a type, number of channels or number of parts that the kernels do not accept;
// operands whose address is no multiple of 16 bytes.
Status LaunchMoments(DType dtype, const Moments& moments, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_MOMENTS_H_
