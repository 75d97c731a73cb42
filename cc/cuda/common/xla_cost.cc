#include "cuda/common/xla_cost.h"

#include <algorithm>
#include <cmath>

#include "core/epilogue.h"
#include "cuda/common/epilogue_cost.h"
#include "cuda/common/epilogue_params.h"
#include "cuda/common/rates.h"

namespace jaxconv {
namespace {

// XLA's autotuner picks a kernel of cuDNN or cuBLAS. A class holds the convolutions for which it
// picks kernels of one kind and is a form of the calibration; docs/notes/xla.md has the
// measurements.
constexpr std::string_view kDepthwise = "xla depthwise";  // one input and output channel a group
// FP32 wgrad of depthwise filters above 3x3, where cuDNN's own kernel ends.
constexpr std::string_view kDepthwiseAbove3x3 = "xla depthwise above 3x3";
constexpr std::string_view kGrouped = "xla grouped";             // 2 to kBlock channels a group
constexpr std::string_view kFewChannels = "xla few channels";    // at most kFewest input channels
constexpr std::string_view kDilatedWgrad = "xla dilated wgrad";  // XLA swaps stride and dilation
constexpr std::string_view kPointwise = "xla pointwise";  // 1x1 of stride 1: a matrix product
constexpr std::string_view kFft = "xla fft";              // 3x3 in FP32 on many images
constexpr std::string_view kDense = "xla dense";

constexpr std::string_view k16Bit = "16-bit", kTf32 = "tf32", kFp32 = "fp32";

// --- kernels around the convolution --------------------------------------------------------------

double PassMicroseconds(double bytes, const Gpu& gpu) {
  return bytes / (kPassShare * gpu.dram_bytes_per_us);
}

// What a pass takes without data: fprop of 384 -> 64 channels on 256x14x14, whose filter is
// transposed, takes 1.3 us more than dgrad of the same product.
constexpr double kPassUs = 1;

// silu of an element in XLA's elementwise kernels, which divide exactly, relative to ours.
// Measured: 0.14 to 0.26 ns of an H200's SM for the activations that take as long in ours, gelu
// 0.41.
constexpr double kExactDivision = 2;

// What the activation adds to a pass that reads and writes the result: nothing while its bytes take
// longer.
double ActivationMicroseconds(const ConvProblem& problem, const Gpu& gpu) {
  const auto outputs = static_cast<double>(problem.y_elements());
  const auto width = static_cast<double>(ByteWidth(problem.output_dtype()));
  const double computed = outputs / gpu.sm_count * ActivationFactor(problem.epilogue.activation) *
                          kExactDivision * EpilogueCost::kLoopCycles / gpu.cycles_per_us();
  return std::max(0.0, computed - PassMicroseconds(2 * width * outputs, gpu));
}

double EpilogueMicroseconds(const ConvProblem& problem, const Gpu& gpu) {
  const auto outputs = static_cast<double>(problem.y_elements());
  double us = 0;
  Epilogue terms = problem.epilogue;
  terms.statistics = false;
  if (!terms.Plain()) {
    // The convolution's result is float32; an XLA kernel reads it and applies the epilogue.
    const auto floats = 2 * outputs * static_cast<double>(ByteWidth(DType::kF32));
    us += gpu.launch_us +
          PassMicroseconds(floats + static_cast<double>(EpilogueBytes(problem)), gpu) +
          ActivationMicroseconds(problem, gpu);
  }
  if (problem.epilogue.statistics) {
    // Another kernel reads the result for its statistics, and one more adds the partial sums.
    const auto width = static_cast<double>(ByteWidth(problem.output_dtype()));
    us += 2 * gpu.launch_us + PassMicroseconds(width * outputs, gpu);
  }
  return us;
}

// XLA computes rank 3 in another layout: all tensors are moved this many more times. With 128
// channels on 2x16x56x56 it is 7 to 8 in 16 bits, 5 to 7 in TF32.
constexpr double kRank3Passes = 7;

// --- classes
// ---------------------------------------------------------------------------------------

constexpr int64_t kFewest = 4;
// Not measured: fewer channels, and channels that are no multiple of so many bytes, which separate
// kernels pad.
constexpr int64_t kLeastChannels = 16, kAlignedBytes = 16;
constexpr int64_t kTaps3x3 = 9;

// cuDNN gathers groups into blocks of this many channels, with zeros between the groups.
constexpr int64_t kBlock = 32;
// From this many channels a group on, 16-bit fprop and dgrad and 16-bit wgrad have Hopper kernels,
// in which the cost of these zeros grows with their square root.
constexpr int64_t kHopperGroup = 16, kHopperWgradGroup = 8;

// cuDNN's FFT has tiles of 32x32 pixels, or 16x16 where the padded map fits. The autotuner picks it
// from this many images and channels on.
constexpr int64_t kFftTile = 32, kFftImages = 32, kFftChannels = 64;

constexpr int kComplexFma = 4;  // of a complex product and its addition

// Channels of the tiles of a matrix product on tensor cores.
constexpr int64_t kTile = 128;

bool AllOnes(const Spatial& value) { return value == Spatial{1, 1, 1}; }

// The problem's class; empty if nothing like it was measured.
std::string_view ClassOf(const ConvProblem& problem, std::string_view operands) {
  const bool wgrad = problem.op == Op::kWgrad;
  if (problem.batch > 1 || !AllOnes(problem.lhs_dilation)) return {};
  if (problem.groups > 1) {
    const int64_t least = std::min(problem.c_per_group(), problem.k_per_group());
    const int64_t most = std::max(problem.c_per_group(), problem.k_per_group());
    if (!AllOnes(problem.dilation) || problem.rank != 2 || most > kBlock) return {};
    if (most == 1) {
      const bool above = wgrad && operands == kFp32 && problem.taps() > kTaps3x3;
      return above ? kDepthwiseAbove3x3 : kDepthwise;
    }
    return least > 1 ? kGrouped : std::string_view();
  }
  if (problem.c <= kFewest) return kFewChannels;
  const int64_t aligned = kAlignedBytes / ByteWidth(problem.lhs_dtype());
  if (std::min(problem.c, problem.k) < kLeastChannels || problem.c % aligned != 0 ||
      problem.k % aligned != 0) {
    return {};
  }
  if (wgrad && !AllOnes(problem.dilation)) return kDilatedWgrad;
  return problem.taps() == 1 && AllOnes(problem.stride) ? kPointwise : kDense;
}

// What XLA multiplies in; empty if it is not accurate enough or has no such convolution.
std::string_view OperandsOf(const ConvProblem& problem) {
  const DType type = problem.lhs_dtype();
  if (problem.rhs_dtype() != type || problem.output_dtype() != type) return {};
  if (type == DType::kBF16 || type == DType::kF16) return k16Bit;
  if (type != DType::kF32) return {};
  // Depthwise kernels multiply in FP32 at every precision.
  if (problem.groups > 1 && problem.c_per_group() == 1 && problem.k_per_group() == 1) return kFp32;
  // At HIGH the others multiply in TF32, with an rms error of 3e-4; a direct FP32 sum has 5e-7.
  if (problem.precision == Precision::kHigh) return {};
  if (problem.precision == Precision::kDefault) return kTf32;
  // At HIGHEST, wgrad with stride 1 uses Winograd or short sums, with rms errors of 4e-6 to 4e-5.
  // The errors of groups were not measured.
  const bool wgrad = problem.op == Op::kWgrad;
  const bool direct = problem.groups == 1 && (problem.taps() == 1 || !AllOnes(problem.stride));
  return wgrad && !direct ? std::string_view() : kFp32;
}

std::string_view OperationsOf(const ConvProblem& problem, std::string_view form) {
  if (form != kFewChannels || problem.op == Op::kWgrad) return OperationsName(problem);
  return problem.op == Op::kFprop ? "fprop" : "dgrad";
}

// --- terms
// -----------------------------------------------------------------------------------------

// FLOPs per microsecond of the pipe on which the class's kernels multiply.
double FlopsPerUs(const XlaTerms& terms, const Gpu& gpu) {
  const bool depthwise = terms.form == kDepthwise;
  const bool product = terms.form == kPointwise || terms.form == kDense;
  double per_clock = gpu.fma_per_clock;
  if (terms.operands != kFp32 && !depthwise) {
    const bool wgmma = product && gpu.wgmma_per_clock > 0;
    per_clock = wgmma ? gpu.wgmma_per_clock : gpu.mma_sync_per_clock;
    if (terms.operands == kTf32) per_clock /= 2;
  }
  return 2 * per_clock * gpu.sm_count * gpu.cycles_per_us();
}

// An extent in whole blocks of this many elements, relative to the extent.
double BlockedExcess(int64_t extent, int64_t block) {
  return static_cast<double>(CeilDiv(extent, block) * block) / static_cast<double>(extent);
}

// The outputs of whole tiles, and in dense fprop and dgrad of whole waves of them, relative to
// those of the matrix product. Wgrad and cuBLAS fill the last wave with slices of the reduction.
// Smaller tiles waste less and run slower: the square root is between both. Dense tiles have at
// least half of kTile on each side, and multiply the reduced channels of a tap in whole cache
// lines.
double ProductExcess(const ConvProblem& problem, const XlaTerms& terms, const Gpu& gpu) {
  const bool pointwise = terms.form == kPointwise, wgrad = problem.op == Op::kWgrad;
  if (pointwise && !wgrad && terms.operands == k16Bit) return 1;  // cuBLAS has tiles of all widths
  const bool fprop = problem.op == Op::kFprop;
  const int64_t pixels = problem.n * (fprop ? problem.out_pixels() : problem.in_pixels());
  const int64_t gemm_m = wgrad ? problem.c : pixels,
                gemm_n = fprop || wgrad ? problem.k : problem.c;
  int64_t tiles = CeilDiv(gemm_m, kTile) * CeilDiv(gemm_n, kTile);
  if (!pointwise && !wgrad) tiles = CeilDiv(tiles, gpu.sm_count) * gpu.sm_count;
  const double excess = std::sqrt(static_cast<double>(tiles * kTile * kTile) /
                                  (static_cast<double>(gemm_m) * static_cast<double>(gemm_n)));
  if (pointwise) return excess;
  const int64_t line = kLineBytes / ByteWidth(problem.lhs_dtype());
  const double least = BlockedExcess(gemm_m, kTile / 2) * BlockedExcess(gemm_n, kTile / 2);
  const double lines = wgrad ? 1 : BlockedExcess(fprop ? problem.c : problem.k, line);
  return excess * std::sqrt(least) * lines;
}

// The FLOPs of a block of groups, relative to those of its groups.
double BlockExcess(const ConvProblem& problem, const XlaTerms& terms, const Gpu& gpu) {
  const int64_t group = problem.c_per_group();
  const double waste = static_cast<double>(kBlock) / static_cast<double>(group);
  if (terms.operands != k16Bit || gpu.wgmma_per_clock == 0) return waste;
  if (problem.op == Op::kWgrad) return group >= kHopperWgradGroup ? std::sqrt(waste / 2) : waste;
  return group >= kHopperGroup ? std::sqrt(waste) : waste;
}

// Tensors whose pixels are no whole cache lines take longer, by this share, in 16-bit fprop and
// dgrad of pointwise layers and in depthwise wgrad. Without it the rms error of the logarithm in
// the former is 0.073 instead of 0.058.
constexpr double kPartialLineExcess = 0.15;

bool PartialLines(const ConvProblem& problem, const XlaTerms& terms) {
  const bool product = terms.form == kPointwise && terms.operands == k16Bit;
  const bool wgrad = problem.op == Op::kWgrad;
  if (!(wgrad ? terms.form == kDepthwise : product)) return false;
  const int64_t reduced = problem.op == Op::kDgrad ? problem.k : problem.c;
  return reduced * ByteWidth(problem.lhs_dtype()) % kLineBytes != 0;
}

// Adds the terms of kernels that gather their operands or read them as matrices.
void AddTerms(const ConvProblem& problem, const Gpu& gpu, XlaTerms* terms) {
  const bool pointwise = terms->form == kPointwise;
  const bool fprop = problem.op == Op::kFprop, wgrad = problem.op == Op::kWgrad;
  const bool dgrad = problem.op == Op::kDgrad, tensor_cores = terms->operands != kFp32;
  const auto width = static_cast<double>(ByteWidth(problem.lhs_dtype()));
  const double x =
      width * (dgrad ? 1 : problem.PartOfX()) * static_cast<double>(problem.x_elements());
  const double w = width * static_cast<double>(problem.w_elements());
  double y = width * static_cast<double>(problem.y_elements());
  auto flops = static_cast<double>(problem.flops());
  if (terms->form == kGrouped) flops *= BlockExcess(problem, *terms, gpu);
  if (dgrad && problem.groups > 1 && !AllOnes(problem.stride)) {
    // XLA inserts zeros between the pixels of dy and convolves the result. The first kernel takes
    // as long for 16-bit elements as for float32.
    const double dilation =
        static_cast<double>(problem.in_pixels()) / static_cast<double>(problem.out_pixels());
    const auto bytes = static_cast<double>(ByteWidth(DType::kF32) * problem.y_elements());
    terms->time.launch += kPassUs + PassMicroseconds(bytes * (1 + dilation), gpu);
    flops *= dilation;
    y *= dilation;
  }
  double bytes = x + w + y;
  if (problem.rank == 3) terms->time.launch += kRank3Passes * bytes / gpu.dram_bytes_per_us;
  if (tensor_cores && (pointwise || terms->form == kDense)) {
    flops *= ProductExcess(problem, *terms, gpu);
  }
  if (pointwise && !wgrad) {
    // Bytes written beyond the L2 take longer than bytes read.
    const double written = fprop ? y : x;
    bytes += kWrittenExcess * std::max(0.0, written - static_cast<double>(gpu.l2_bytes));
  }
  if (PartialLines(problem, *terms)) bytes *= 1 + kPartialLineExcess;
  if (pointwise && fprop && terms->operands == k16Bit &&
      problem.filter_layout == FilterLayout::kRsck) {
    // cuBLAS reads the filter as (k, c): a kernel transposes it from (c, k).
    terms->time.launch += kPassUs + PassMicroseconds(2 * w, gpu);
  }
  terms->time.tensor_cores = flops / FlopsPerUs(*terms, gpu);
  terms->time.dram = bytes / gpu.dram_bytes_per_us;
}

// The FFT's terms; false if cuDNN does not take it. fprop's padded map must fit in one tile; dgrad
// divides larger maps into tiles.
bool FftTermsOf(const ConvProblem& problem, const Gpu& gpu, XlaTerms* terms) {
  if (problem.op == Op::kWgrad || problem.rank != 2 || problem.taps() == 1 ||
      !AllOnes(problem.stride) || !AllOnes(problem.dilation) || problem.n < kFftImages ||
      std::min(problem.c, problem.k) < kFftChannels) {
    return false;
  }
  int64_t padded = 0, maps = problem.n, tile = kFftTile;
  for (const int axis : {1, 2}) {
    if (problem.filter[axis] > tile) return false;
    padded = std::max(padded, problem.out[axis] + problem.filter[axis] - 1);
    if (problem.op == Op::kDgrad)
      maps *= CeilDiv(problem.in[axis], tile - problem.filter[axis] + 1);
  }
  if (problem.op == Op::kFprop) {
    if (padded > tile) return false;
    if (padded <= tile / 2) tile /= 2;
  }
  // A real tile's spectrum has tile * (tile / 2 + 1) complex numbers, and a complex product with
  // its addition takes four FMA. Spectra are written and read; x and y change layout, which writes
  // and reads them once more.
  const auto frequencies = static_cast<double>(tile * (tile / 2 + 1));
  const auto m = static_cast<double>(maps);
  const auto c = static_cast<double>(problem.c), k = static_cast<double>(problem.k);
  const auto width = static_cast<double>(ByteWidth(DType::kF32));
  const double spectra = 2 * width * frequencies * (m * (c + k) + c * k);
  const double tensors = width * static_cast<double>(problem.x_elements() + problem.y_elements());
  const double flops = 2 * kComplexFma * frequencies * m * c * k;
  terms->form = kFft;
  terms->time.tensor_cores = flops / FlopsPerUs(*terms, gpu);
  terms->time.dram = 2 * (spectra + tensors) / gpu.dram_bytes_per_us;
  return true;
}

}  // namespace

bool XlaTermsOf(const ConvProblem& problem, const Gpu& gpu, XlaTerms* terms) {
  *terms = XlaTerms();
  if (!problem.RequireChannelsLast().ok()) return false;
  terms->operands = OperandsOf(problem);
  if (terms->operands.empty()) return false;
  terms->form = ClassOf(problem, terms->operands);
  if (terms->form.empty()) return false;
  terms->operations = OperationsOf(problem, terms->form);
  terms->time.launch = EpilogueMicroseconds(problem, gpu);
  AddTerms(problem, gpu, terms);
  if (terms->form == kDense && terms->operands == kFp32) {
    XlaTerms fft = *terms;
    const bool possible = FftTermsOf(problem, gpu, &fft);
    if (possible && fft.time.tensor_cores + fft.time.dram < terms->time.tensor_cores) *terms = fft;
  }
  return true;
}

double PredictXlaMicroseconds(const ConvProblem& problem, const Gpu& gpu) {
  XlaTerms terms;
  if (!XlaTermsOf(problem, gpu, &terms)) return 0;
  const FormTime* form = FindFormTime(terms.form, terms.operations, terms.operands, gpu);
  if (form == nullptr) return 0;
  return PredictedMicroseconds(terms.time, *form);
}

}  // namespace jaxconv
