// How passes over (segments, rows, channels) are cut. The cut of a sum follows from the shape alone,
// so that its bits are the same on every device.
#ifndef JAXCONV_CUDA_NORMALISATION_PLAN_H_
#define JAXCONV_CUDA_NORMALISATION_PLAN_H_

#include <cstdint>
#include <vector>

#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/pass.h"

namespace jaxconv {

// What tells a sum's mask: the activation's result, its operand, which is computed, or bits.
// kDerivative computes the operand and multiplies by the activation's derivative; kNone is no mask.
struct MaskBy {
  enum Kind : int { kResult, kAffine, kBits, kDerivative, kNone };
};

inline constexpr int kPassThreads = 256;     // of a CTA
inline constexpr int kChannelsOfThread = 8;  // 16 bytes of 16-bit elements
inline constexpr int kMaxLanes = 32;         // threads of a CTA along the channels

// The rows of a thread that are loaded at a time, of so many bytes each: 64 to 192 bytes are in
// flight, in up to 48 registers of 128.
template <int kBytes>
inline constexpr int kRowsInFlight = kBytes <= 16   ? 8
                                     : kBytes <= 48 ? 4
                                     : kBytes <= 96 ? 2
                                                    : 1;

// Which threads of a CTA have which channels and rows.
struct ChannelThreads {
  explicit ChannelThreads(int64_t channels);

  int lanes, steps;  // vectors of channels, and rows, of a CTA
  int64_t slices;    // of `lanes` vectors of channels
};

// Into how many parts, a CTA each, the rows of a segment are cut for a sum.
int64_t PartsOfRows(int64_t segments, int64_t rows, int64_t channels);

// Unimplemented: what no kernel of this folder takes.
Status CheckCut(int64_t segments, int64_t rows, int64_t channels, int64_t parts);

namespace normalisation {

const std::vector<PassKernel>& Kernels();

// Rows of a thread that `moments` loads at a time; 0 of a type that it does not take.
int RowsOfMoments(DType dtype);

// Plans masked_sums, moments and normalise_add on r rows in each of s segments and c channels, with
// the words g and y for the numbers of gradients and of arrays, "result", "affine" or "bits",
// "activation:" and a name in front of a derivative's, "stores", "bounded".
Status PlanOf(const PassKey& key, const Gpu& gpu, PassPlan* plan);

}  // namespace normalisation
}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_PLAN_H_
