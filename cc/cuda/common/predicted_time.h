// The predicted time of a plan: five terms, and one rule that combines them.
//
// A form computes the terms from what its plan does (FLOPs with those of padded tiles, rows loaded,
// bytes) and from the GPU's full rates. A line of the calibration says which shares of these rates
// the form reaches. The same terms and the same rule serve XLA's convolutions (common/xla_cost.h).
// docs/architecture.md explains each term and how to check it with a profiler.
#ifndef JAXCONV_CUDA_COMMON_PREDICTED_TIME_H_
#define JAXCONV_CUDA_COMMON_PREDICTED_TIME_H_

#include <string>
#include <string_view>

#include "core/conv_problem.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

// Microseconds at full rates. The first three are those of the SM with the most work.
struct TimeTerms {
  double tensor_cores = 0;  // products, and waits of the tensor cores that nothing hides
  double loads = 0;         // from L2 into shared memory, by TMA or cp.async
  double stores = 0;        // of results, beside the products
  double dram = 0;          // bytes of DRAM, for all SMs together
  double launch = 0;        // launches, the first fill and the last store: nothing overlaps them
};

// A line of the calibration.
struct FormTime {
  std::string_view form, operations, operands;
  double sm_share = 1;    // of the rates of tensor cores, loads and stores
  double dram_share = 1;  // of the DRAM rate of a copy; above 1 where loads come nearer to the peak
  double fixed_us = 0;    // beside the launch term
};

// The bytes that written ones cost beside their number: writes beyond half the L2, which holds the
// rest until the next kernel, take longer than reads.
double WrittenExcess(double bytes, const Gpu& gpu);

// Cycles that two pingpong consumers need for `tiles` tiles, until the last is multiplied. They
// take turns to multiply; if they store for longer, each is busy with half of the tiles.
double PingpongCycles(double tiles, double multiply, double store);

// The operands of a convolution as the calibration names them: "16-bit", "tf32", "3xtf32", "fp32".
// `three_tf32`: the kernel multiplies float32 as three products; `tf32`: as one.
std::string_view OperandsName(const ConvProblem& problem, bool tf32, bool three_tf32);
// "fprop, dgrad" or "wgrad".
std::string_view OperationsName(const ConvProblem& problem);

// The line of a form in the GPU's own calibration, otherwise in the H200's; or the line of the form
// that LIKE names; or the form's in any other calibration. Null if there is none.
const FormTime* FindFormTime(std::string_view form, std::string_view operations,
                             std::string_view operands, const Gpu& gpu);

// The same under the form's own names; full rates if the calibration has no such form.
FormTime FormTimeOf(std::string_view form, std::string_view operations, std::string_view operands,
                    const Gpu& gpu);

// Which file of cuda/calibration serves a GPU, for the user: its own, or the nearest
// architecture's, scaled by the rates of the GPU.
std::string CalibrationOf(const Gpu& gpu);

// The rule: what overlaps nothing, the longest of the other terms, and a share of the rest.
double PredictedMicroseconds(const TimeTerms& terms, const FormTime& form);

// The number of slices, 1 to `most`, of `blocks` k-blocks that is predicted to be fastest. All
// slices but the last have the same length, and none is empty. terms(count): those of so many
// slices.
template <typename Terms>
int64_t FastestSlices(int64_t most, int64_t blocks, const FormTime& form, Terms terms) {
  int64_t fastest = 1;
  double least = PredictedMicroseconds(terms(1), form);
  for (int64_t count = 2; count <= most; ++count) {
    if (CeilDiv(blocks, CeilDiv(blocks, count)) != count) continue;
    const double microseconds = PredictedMicroseconds(terms(count), form);
    if (microseconds < least) least = microseconds, fastest = count;
  }
  return fastest;
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_PREDICTED_TIME_H_
