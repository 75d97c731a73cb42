// Problems on which oneDNN 3.2 computes wrong results, crashes or hangs. Random tests found them
// (tests/cc/onednn_conv_test.cc); where the exact condition is not known, a wider one is stated.
#ifndef JAXCONV_CPU_ONEDNN_BUGS_H_
#define JAXCONV_CPU_ONEDNN_BUGS_H_

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cpu/geometry.h"
#include "cpu/onednn.h"

namespace jaxconv::cpu {

// Fails where a stride, dilation or padding is larger than 4096 and than the tensors. oneDNN
// computes with such values in 32 bits without checks, and with AMX copies padded rows. Seen, with
// tensors of at most 6 positions an axis: wrong results from a stride of 32765 (bf16 weight
// gradient) and a dilation of 16382 (f32 weight gradient, AVX2), crashes and endless lookups from a
// stride of 2^19, 22 GB of scratch for strides of 8193 and 32765 (AMX). Up to 4096 no random
// problem failed.
inline Status RequireTrustedWindow(const ConvProblem& p) {
  for (int a = 0; a < 3; ++a) {
    int64_t limit = std::max({int64_t{4096}, p.in[a], p.out[a], p.filter[a]});
    for (auto [name, value] : {std::pair{"stride ", p.stride[a]},
                               {"dilation ", p.dilation[a]},
                               {"low padding ", p.pad_lo[a]},
                               {"high padding ", p.pad_hi[a]}}) {
      if (std::abs(value) <= limit) continue;
      return Status::Unimplemented(name + std::to_string(value) + OnAxis(p, a) +
                                   " is larger than " + std::to_string(limit) +
                                   ": oneDNN is only verified up to 4096 and the tensors' extents");
    }
  }
  return {};
}

// Whether oneDNN crashes while it looks for an implementation: on CPUs with AMX, for operands
// narrower than float32, where a dilated window is larger than the input on some axis (9 of 5,300
// random problems, each with one input element on that axis).
inline bool LookupCrashes(const ConvProblem& p, DType operands) {
  if (operands == DType::kF32 || !IsaHas(dnnl::cpu_isa::avx512_core_amx)) return false;
  for (int a = 0; a < 3; ++a) {
    if (p.dilation[a] > 1 && (p.filter[a] - 1) * p.dilation[a] + 1 > p.in[a]) return true;
  }
  return false;
}

// Three spatial axes: taps that reach over the front and the back of the input at once; or over the
// back in the first window that does not begin in front of it, where the stride takes several
// windows to there. The kernel then reads beside y (48 of 50 random problems, between poisoned
// bytes).
inline bool ReachesOverFrontAndBack(const ConvProblem& p) {
  const int64_t window = (p.filter[0] - 1) * p.dilation[0] + 1;
  if (window > p.in[0]) return true;
  const int64_t stride = p.stride[0], in_front = p.pad_lo[0] % stride;  // of the last of them
  return in_front > 0 && p.pad_lo[0] > stride && p.pad_lo[0] / stride + 1 < p.out[0] &&
         stride - in_front + window > p.in[0];
}

// Columns of y that the float32 kernel divides into blocks of 14, which it does for 29 to 55 of
// them where high padding is at least what 28 leave, and low padding beyond the first block (all of
// 1,901 random problems, and no other of 19,278).
inline bool PadsBeyondBlock(const ConvProblem& p) {
  const int64_t columns = p.out[2];
  const int64_t window = (p.filter[2] - 1) * p.dilation[2] + 1;
  const int64_t high = (columns - 1) * p.stride[2] + window - p.in[2] - p.pad_lo[2];
  return p.stride[2] > 1 && columns > 28 && columns < 56 && p.pad_lo[2] > 14 &&
         high >= columns - 28;
}

// 8-bit operands, 8 groups of one channel, filters of 2x2x2: the offset for signed operands is
// wrong, by multiples of 128. None of 1 to 19 such groups with 14 other filters is (filters of one
// to 27 taps).
inline bool OffsetIsWrong(const ConvProblem& p, DType operands) {
  const bool eight_bit = operands == DType::kS8 || operands == DType::kU8;
  return eight_bit && p.groups == 8 && p.c == 8 && p.k == 8 && p.filter == Spatial{2, 2, 2};
}

// Sums of 8-bit products beyond 2^24, which float32 does not hold. All implementations but brgemm
// convert the int32 sums to float32 and back. So does brgemm for s8 images where the instruction
// set has no product of two s8 numbers: it multiplies x + 128 and adds an offset to the sums. With
// padding it also converts the sums of outputs whose windows it finishes early.
inline bool RoundsSums(const std::string& implementation, const ConvProblem& p, DType operands) {
  if (operands != DType::kS8 && operands != DType::kU8) return false;
  const int64_t largest = operands == DType::kS8 ? 128 * 128 : 255 * 128;
  int64_t terms = p.op == Op::kFprop ? p.c_per_group() : p.k_per_group();
  for (int a = 0; a < 3; ++a) {  // a data gradient meets every so manieth tap
    const int64_t step =
        p.op == Op::kDgrad ? p.stride[a] / std::gcd(p.stride[a], p.dilation[a]) : 1;
    terms *= CeilDiv(p.filter[a], step);
  }
  if (terms <= (1 << 24) / largest) return false;
  const auto has = [&](const char* word) { return implementation.find(word) != std::string::npos; };
  for (int a = 0; a < 3; ++a) {
    if (p.pad_lo[a] > 0 || p.pad_hi[a] > 0) return true;
  }
  return !(has("brg") || has("brdgmm")) ||
         (operands == DType::kS8 && !has("amx") && !has("avx2_vnni_2"));
}

// Whether the number of channels that fprop or dgrad sums is odd.
inline bool SumsOddChannels(const ConvProblem& p) {
  return p.op != Op::kWgrad && (p.op == Op::kFprop ? p.c_per_group() : p.k_per_group()) % 2 != 0;
}

// An odd number of channels is summed, in 16 bits: a kernel that multiplies pairs of channels
// multiplies the first channel of the next pixel with a zero of the filter, which is NaN where that
// channel is Inf or NaN. Kernels on AMX multiply copies of the pixels with zeros; "jit_bf16", which
// oneDNN has for all such problems, masks the channel at the same speed (docs/notes/cpu.md).
inline bool ReadsNextPixel(const std::string& implementation, const ConvProblem& p,
                           DType operands) {
  const auto has = [&](const char* word) { return implementation.find(word) != std::string::npos; };
  const bool pairs = operands == DType::kBF16 || (operands == DType::kF16 && has("avx2_vnni_2"));
  return SumsOddChannels(p) && pairs && has("brg") && !has("amx");
}

// The same for the other sums in 16 bits, of an odd number: a data gradient's over channels of dy,
// a weight gradient's over the columns of a row of y. Without AMX every implementation multiplies
// the last number with a zero as well, which is NaN where it is Inf, or the one behind it.
inline bool PairsLastWithZero(const std::string& implementation, const ConvProblem& p,
                              DType operands) {
  if (operands != DType::kBF16 || implementation.find("amx") != std::string::npos) return false;
  return p.op == Op::kDgrad ? SumsOddChannels(p) : p.op == Op::kWgrad && p.out[2] % 2 != 0;
}

// The same channels, 1x1, bfloat16, a number of pixels that is a multiple of 30: wrong results (60 of
// 946 random problems, all of them such).
inline bool PixelsOfThirtyAreWrong(const std::string& implementation, const ConvProblem& p) {
  return SumsOddChannels(p) && implementation.rfind("jit_bf16_1x1", 0) == 0;
}

// Three spatial axes, the data gradient on AMX: rows of x behind the last window stay unwritten (5
// of some 40,000 random problems in bfloat16, with filters of 3 or 4 rows and x of 19 to 24
// columns).
inline bool LeavesRowsUnwritten(const std::string& implementation, const ConvProblem& p) {
  const int64_t window = (p.filter[0] - 1) * p.dilation[0] + 1;
  return p.op == Op::kDgrad && p.rank == 3 && implementation == "jit:avx512_core_amx" &&
         (p.out[0] - 1) * p.stride[0] + window < p.in[0] + p.pad_lo[0];
}

// Whether the implementation of this name gives wrong results.
inline bool IsWrong(const std::string& implementation, const ConvProblem& p, DType operands) {
  if (OffsetIsWrong(p, operands) || LeavesRowsUnwritten(implementation, p) ||
      RoundsSums(implementation, p, operands) || ReadsNextPixel(implementation, p, operands) ||
      PairsLastWithZero(implementation, p, operands) || PixelsOfThirtyAreWrong(implementation, p)) {
    return true;
  }
  if (p.op != Op::kWgrad || implementation.rfind("x64:gemm", 0) == 0) return false;
  if (p.rank == 3 && ReachesOverFrontAndBack(p)) return true;
  if (PadsBeyondBlock(p)) return true;
  if (operands != DType::kBF16) return false;
  // 1x1, strided: an incomplete block of input channels, for some odd widths.
  bool strided = p.stride != Spatial{1, 1, 1};
  if (p.taps() == 1 && strided && p.c_per_group() % 16 != 0) return true;
  // Low padding of more than 20 columns, strided (156 of 536) or dilated (2 of some 900).
  return p.pad_lo[2] > 20;
}

// Whether the scratch has to be cleared. The bf16 weight gradient orders the columns of x by their
// remainder modulo the stride and reads scratch for remainders without a column: it multiplies the
// values by zero, which is NaN where the scratch holds NaN or Inf.
inline bool ReadsUnwrittenScratch(const ConvProblem& p, DType operands) {
  return p.op == Op::kWgrad && operands == DType::kBF16 && p.in[2] <= 2 * p.stride[2];
}

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_ONEDNN_BUGS_H_
