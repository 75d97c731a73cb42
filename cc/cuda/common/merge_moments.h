// The statistics of a result from the sums of its parts.
//
// A kernel that stores y in tiles writes, for each slot (the rows of a tile, or of several that one
// consumer has in a fixed order) and channel, the sum of y and of y^2 in double, of numbers as
// stored, and each slot by one thread. What merges them adds them in an order that the number of
// slots alone settles:
//
//     mean = S / n,    squared deviations = Q - S^2 / n
//
// The difference of doubles loses a share of 2^-52 (mean / deviation)^2, which for 16-bit numbers
// is nothing: float32's last digit at a ratio of 16,000. What the kernel loses in forming the sums
// is its own promise (igemm_wgmma/statistics_sm90.cuh).
#ifndef JAXCONV_CUDA_COMMON_MERGE_MOMENTS_H_
#define JAXCONV_CUDA_COMMON_MERGE_MOMENTS_H_

#include <cstdint>

#include "core/status.h"
#include "cuda/common/epilogue_params.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

inline constexpr int kMomentColumns = 16;  // channels of a CTA that merges

// The workspace: counters, the sums (slots, channels), and those of each of some parts of the
// slots. A CTA adds a part of the slots of 16 channels; the last of them, by an integer counter,
// adds the parts in their order.
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
  int64_t SumsAt() const { return (Counters() * int64_t{sizeof(int32_t)} + 15) / 16 * 16; }
  int64_t PartsAt() const { return SumsAt() + slots * channels * int64_t{sizeof(ChannelSums)}; }
};

// statistics: (2, channels), mean and sum of squared deviations of all `rows` rows of y.
Status LaunchMergeMoments(const MomentSlots& slots, int64_t rows, void* workspace,
                          float* statistics, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_MERGE_MOMENTS_H_
