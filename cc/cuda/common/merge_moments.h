// The statistics of a result from the moments of its parts.
//
// A kernel that stores y in tiles writes, for each slot (the rows of a tile, or of a part of one) and
// channel, the mean of its elements and the sum of their squared deviations from it, in float32; of
// numbers as stored, and each slot by one thread. What merges them adds doubles in an order that the
// number of slots alone settles:
//
//     mean = sum n_i m_i / n,    squares = sum q_i + sum n_i m_i^2 - (sum n_i m_i)^2 / n
//
// Its difference loses nothing that matters: m_i has 24 digits, a double 53.
#ifndef JAXCONV_CUDA_COMMON_MERGE_MOMENTS_H_
#define JAXCONV_CUDA_COMMON_MERGE_MOMENTS_H_

#include <cstdint>

#include "core/status.h"
#include "cuda/common/epilogue_params.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

inline constexpr int kMomentColumns = 32;  // channels of a CTA that merges

// The workspace: (slots, channels) pairs of floats, counters, (slots) rows, and three sums of each of
// some parts of the slots. A CTA adds a part of the slots of 32 channels; the last of them, by an
// integer counter, adds the parts in their order.
struct MomentSlots {
  int64_t slots = 0;  // 0: no statistics
  int64_t channels = 0;

  int64_t Parts() const;
  int64_t Bytes() const;
  // Predicted, of the kernel that merges.
  double Microseconds(const Gpu& gpu) const;
  // The pointers of a launch, whose workspace is aligned to 16 bytes.
  void Bind(void* workspace, EpilogueParams* params) const;

  int64_t Counters() const { return (channels + kMomentColumns - 1) / kMomentColumns; }
  int64_t CountersAt() const { return slots * channels * 2 * int64_t{sizeof(float)}; }
  int64_t RowsAt() const { return CountersAt() + Counters() * int64_t{sizeof(int32_t)}; }
  int64_t PartsAt() const { return (RowsAt() + slots * int64_t{sizeof(int32_t)} + 15) / 16 * 16; }
};

// statistics: (2, channels), mean and sum of squared deviations of all `rows` rows of y.
Status LaunchMergeMoments(const MomentSlots& slots, int64_t rows, void* workspace,
                          float* statistics, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_MERGE_MOMENTS_H_
