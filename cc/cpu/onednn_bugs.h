// Problems on which oneDNN 3.2 computes wrong results, crashes or hangs. Random tests found them
// (tests/cc/onednn_conv_test.cc); if the exact condition is unknown, the code tests a wider one.
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

// Fails if a stride, dilation or padding exceeds both 4096 and the tensors. oneDNN computes with
// these values in 32 bits without checks, and with AMX it copies padded rows. Observed with tensors
// of at most 6 positions an axis: wrong results from a stride of 32765 (bf16 weight gradient) and a
// dilation of 16382 (f32 weight gradient, AVX2), crashes and endless lookups from a stride of 2^19,
// 22 GB of scratch for strides of 8193 and 32765 (AMX). Up to 4096 no random problem failed.
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

// Whether oneDNN crashes while it searches for an implementation: on CPUs with AMX, for operands
// narrower than float32, if a dilated window is larger than the input on an axis (9 of 5,300 random
// problems, each with one input element on that axis).
inline bool LookupCrashes(const ConvProblem& p, DType operands) {
  if (operands == DType::kF32 || !IsaHas(dnnl::cpu_isa::avx512_core_amx)) return false;
  for (int a = 0; a < 3; ++a) {
    if (p.dilation[a] > 1 && (p.filter[a] - 1) * p.dilation[a] + 1 > p.in[a]) return true;
  }
  return false;
}

// Three spatial axes, and either a window whose taps extend past both ends of the depth; or the
// first window that does not begin before the input extends past its end, after several windows
// that begin before it. The kernel then reads outside y (48 of 50 random problems, between poisoned
// bytes).
inline bool ReachesOverFrontAndBack(const ConvProblem& p) {
  const int64_t window = (p.filter[0] - 1) * p.dilation[0] + 1;
  if (window > p.in[0]) return true;
  // in_front: by how much the last window that begins before the input does so.
  const int64_t stride = p.stride[0], in_front = p.pad_lo[0] % stride;
  return in_front > 0 && p.pad_lo[0] > stride && p.pad_lo[0] / stride + 1 < p.out[0] &&
         stride - in_front + window > p.in[0];
}

// The float32 kernel divides 29 to 55 columns of y into blocks of 14. It fails if the high padding
// is at least the columns beyond 28, and the low padding reaches past the first block (all of 1,901
// random problems, and none of 19,278 others).
inline bool PadsBeyondBlock(const ConvProblem& p) {
  const int64_t columns = p.out[2];
  const int64_t window = (p.filter[2] - 1) * p.dilation[2] + 1;
  const int64_t high = (columns - 1) * p.stride[2] + window - p.in[2] - p.pad_lo[2];
  return p.stride[2] > 1 && columns > 28 && columns < 56 && p.pad_lo[2] > 14 &&
         high >= columns - 28;
}

// 8-bit operands, 8 groups of one channel, filters of 2x2x2: the offset for signed operands is
// wrong by multiples of 128. No other case is: 1 to 19 groups of one channel with 14 other filters
// (1 to 27 taps).
inline bool OffsetIsWrong(const ConvProblem& p, DType operands) {
  const bool eight_bit = operands == DType::kS8 || operands == DType::kU8;
  return eight_bit && p.groups == 8 && p.c == 8 && p.k == 8 && p.filter == Spatial{2, 2, 2};
}

// Sums of 8-bit products beyond 2^24 are rounded, because all implementations but brgemm convert
// the int32 sums to float32 and back. brgemm does so for s8 images on instruction sets without a
// product of two s8 numbers, where it multiplies x + 128 and adds an offset to the sums. With
// padding it also converts the sums of outputs whose windows it finishes early.
inline bool RoundsSums(const std::string& implementation, const ConvProblem& p, DType operands) {
  if (operands != DType::kS8 && operands != DType::kU8) return false;
  const int64_t largest = operands == DType::kS8 ? 128 * 128 : 255 * 128;
  int64_t terms = p.op == Op::kFprop ? p.c_per_group() : p.k_per_group();
  for (int a = 0; a < 3; ++a) {  // a data gradient uses one of every `stride` taps
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

// Sums over an odd number of 16-bit channels: a kernel that multiplies pairs of channels multiplies
// the first channel of the next pixel by a zero of the filter, which gives NaN if that channel is
// Inf or NaN. AMX kernels multiply copies of the pixels that are padded with zeros; "jit_bf16",
// which oneDNN has for all these problems, masks the channel at the same speed (docs/notes/cpu.md).
inline bool ReadsNextPixel(const std::string& implementation, const ConvProblem& p,
                           DType operands) {
  const auto has = [&](const char* word) { return implementation.find(word) != std::string::npos; };
  const bool pairs = operands == DType::kBF16 || (operands == DType::kF16 && has("avx2_vnni_2"));
  return SumsOddChannels(p) && pairs && has("brg") && !has("amx");
}

// The same for the other odd 16-bit sums: over channels of dy in a data gradient, over the columns
// of a row of y in a weight gradient. Without AMX every implementation also multiplies the last
// number, or the one after it, by zero, which gives NaN if it is Inf.
inline bool PairsLastWithZero(const std::string& implementation, const ConvProblem& p,
                              DType operands) {
  if (operands != DType::kBF16 || implementation.find("amx") != std::string::npos) return false;
  return p.op == Op::kDgrad ? SumsOddChannels(p) : p.op == Op::kWgrad && p.out[2] % 2 != 0;
}

// An odd number of channels, 1x1, bfloat16, and a number of pixels that is a multiple of 30: wrong
// results (60 of 946 random problems, all of this kind).
inline bool PixelsOfThirtyAreWrong(const std::string& implementation, const ConvProblem& p) {
  return SumsOddChannels(p) && implementation.rfind("jit_bf16_1x1", 0) == 0;
}

// 1x1, strided, the weight gradient on AVX2, an incomplete block of 8 input channels: the kernel
// gathers the strided pixels into scratch, and some sums are wrong (17 of 500 random 1x1 problems,
// all of this kind).
inline bool GathersIncompleteBlock(const std::string& implementation, const ConvProblem& p) {
  return p.op == Op::kWgrad && implementation == "jit_1x1:avx2" && p.stride != Spatial{1, 1, 1} &&
         p.c_per_group() % 8 != 0;
}

// Three spatial axes, the data gradient on AMX: rows of x past the last window are not written (5
// of some 40,000 random problems in bfloat16, with filters of 3 or 4 rows and x of 19 to 24
// columns).
inline bool LeavesRowsUnwritten(const std::string& implementation, const ConvProblem& p) {
  const int64_t window = (p.filter[0] - 1) * p.dilation[0] + 1;
  return p.op == Op::kDgrad && p.rank == 3 && implementation == "jit:avx512_core_amx" &&
         (p.out[0] - 1) * p.stride[0] + window < p.in[0] + p.pad_lo[0];
}

// Fewer than 32 channels of 16 bits on AMX: the kernel copies the taps and channels of a window into
// one row and multiplies a multiple of 32 numbers of it. The numbers behind the window meet zeros of
// the filter, which gives NaN if they are Inf or NaN (4 of 3,550 random programs).
inline bool ReadsBehindWindow(const std::string& implementation, const ConvProblem& p,
                              DType operands) {
  return p.op == Op::kFprop && p.rank < 3 && operands == DType::kBF16 &&
         implementation == "jit:avx512_core_amx" && p.taps() > 1 && p.c_per_group() < 32 &&
         p.taps() * p.c_per_group() % 32 != 0;
}

// Whether the implementation of this name gives wrong results.
inline bool IsWrong(const std::string& implementation, const ConvProblem& p, DType operands) {
  if (OffsetIsWrong(p, operands) || LeavesRowsUnwritten(implementation, p) ||
      RoundsSums(implementation, p, operands) || ReadsNextPixel(implementation, p, operands) ||
      PairsLastWithZero(implementation, p, operands) || PixelsOfThirtyAreWrong(implementation, p) ||
      GathersIncompleteBlock(implementation, p) || ReadsBehindWindow(implementation, p, operands)) {
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

// Whether the scratch must be cleared. The bf16 weight gradient orders the columns of x by their
// remainder modulo the stride. For remainders without a column it multiplies uninitialised scratch
// by zero, which gives NaN if the scratch holds NaN or Inf.
inline bool ReadsUnwrittenScratch(const ConvProblem& p, DType operands) {
  return p.op == Op::kWgrad && operands == DType::kBF16 && p.in[2] <= 2 * p.stride[2];
}

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_ONEDNN_BUGS_H_
