// The division of passes over (segments, rows, channels) among CTAs and threads. The division of a
// sum depends only on the shape, so that its bits are the same on every device.
#ifndef JAXCONV_CUDA_NORMALISATION_PLAN_H_
#define JAXCONV_CUDA_NORMALISATION_PLAN_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/epilogue.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/pass.h"

namespace jaxconv {

// The source of a sum's mask: the activation's result, its computed operand, or bits. kDerivative
// computes the operand and multiplies by the activation's derivative; kActivation also adds the
// products with the activation; kNone has no mask.
struct MaskBy {
  enum Kind : int { kResult, kAffine, kBits, kDerivative, kActivation, kNone };
};

inline constexpr int kPassThreads = 256;     // of a CTA
inline constexpr int kChannelsOfThread = 8;  // 16 bytes of 16-bit elements
inline constexpr int kMaxLanes = 32;         // threads of a CTA along the channels

// The rows of kBytes bytes that a thread loads at a time: 64 to 192 bytes are in flight, in up to
// 48 of 128 registers.
template <int kBytes>
inline constexpr int kRowsInFlight = kBytes <= 16   ? 8
                                     : kBytes <= 48 ? 4
                                     : kBytes <= 96 ? 2
                                                    : 1;

// The assignment of channels and rows to the threads of a CTA.
struct ChannelThreads {
  explicit ChannelThreads(int64_t channels);
  // Slices of equal size, so that few threads of the last one are idle. Sums keep the division
  // above, because exported programs contain the rows of each part.
  static ChannelThreads Even(int64_t channels);

  int lanes, steps;  // vectors of channels, and rows, of a CTA
  int64_t slices;    // of `lanes` vectors of channels
};

// A vector of the channels. `stride`: numbers from one segment's vector to the next; 0: all
// segments share it.
struct ChannelNumbers {
  const float* numbers;
  int64_t stride;
};

// The number of parts, one CTA each, into which a sum divides the rows of a segment.
int64_t PartsOfRows(int64_t segments, int64_t rows, int64_t channels);

// Unimplemented if no kernel of this folder accepts the arguments.
Status CheckCut(int64_t segments, int64_t rows, int64_t channels, int64_t parts);

namespace normalisation {

const std::vector<PassKernel>& Kernels();

// Rows that a thread of `moments`, `activated_sums` or `normalise` loads at a time, the second
// perhaps with sums of derivatives; 0 for a type that it does not accept.
int RowsOfThread(std::string_view pass, DType dtype, bool derivatives = false);

// CTAs of `normalise` on an SM: 48 KB of loads in flight.
inline constexpr int kNormaliseCtas = 3;

// Unimplemented unless the activation takes an exponential: an XLA pass computes the others as fast
// as DRAM allows.
Status CheckExponential(Activation activation);

// Plans masked_sums, activated_sums, moments, normalise and normalise_add. Words of the key: "s",
// segments; "r", rows of a segment; "c", channels; "g" and "y", the numbers of gradients and arrays;
// "result", "affine" or "bits", the source of the mask; "activation:" and a name; "values", the sum
// with the activation's value; "derivative:" and the name of the activation's derivative; "stores";
// "bounded".
Status PlanOf(const PassKey& key, const Gpu& gpu, PassPlan* plan);

}  // namespace normalisation
}  // namespace jaxconv

#endif  // JAXCONV_CUDA_NORMALISATION_PLAN_H_
