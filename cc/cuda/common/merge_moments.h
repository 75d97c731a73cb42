// The statistics of a result from the sums of its parts.
//
// A slot is the rows of a tile, or of several tiles that one consumer processes in a fixed order. A
// kernel that stores y in tiles writes for each slot and channel the sums of y and y^2, over the
// values as stored, in double, each by one thread. The merging kernel adds them in an order that
// depends only on the number of slots:
//
//     mean = S / n,    squared deviations = Q - S^2 / n
//
// The subtraction has the relative error 2^-52 (mean / deviation)^2, negligible for 16-bit numbers:
// one ulp of float32 at a ratio of 16,000. The kernel that forms the sums documents its own error
// (igemm_wgmma/statistics_sm90.cuh).
#ifndef JAXCONV_CUDA_COMMON_MERGE_MOMENTS_H_
#define JAXCONV_CUDA_COMMON_MERGE_MOMENTS_H_

#include <cstdint>

#include "core/status.h"
#include "cuda/common/epilogue_params.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

inline constexpr int kMomentColumns = 16;  // channels of a merging CTA

// The workspace: the sums (slots, channels). A CTA of the merging kernel adds one part of the slots
// for 16 channels; the first CTA of a cluster adds the parts in order.
struct MomentSlots {
  int64_t slots = 0;  // 0: no statistics
  int64_t channels = 0;

  int64_t Parts() const;
  int64_t Bytes() const;
  // Predicted time of the merging kernel.
  double Microseconds(const Gpu& gpu) const;
  // Sets the pointer of a launch; the workspace is aligned to 16 bytes.
  void Bind(void* workspace, EpilogueParams* params) const;
};

// statistics: (2, channels), the mean and the sum of squared deviations over all `rows` rows of y.
Status LaunchMergeMoments(const MomentSlots& slots, int64_t rows, void* workspace,
                          float* statistics, void* stream);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_MERGE_MOMENTS_H_
