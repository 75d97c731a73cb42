#include "cuda/common/xla_cost.h"

#include <algorithm>
#include <cmath>

#include "core/epilogue.h"
#include "cuda/common/epilogue_params.h"

namespace jaxconv {
namespace {

// XLA's autotuner picks a kernel of cuDNN or cuBLAS. A class holds the convolutions for which it
// picks kernels of one kind.
enum class Class {
  kDepthwise,          // one input and one output channel per group
  kDepthwiseAbove3x3,  // FP32 wgrad of depthwise filters above 3x3: cuDNN's own kernel ends there
  kDepthwiseRank1,
  kGrouped,       // 2 to 32 channels per group
  kFewChannels,   // at most 4 input channels
  kDilatedWgrad,  // XLA swaps stride and dilation
  kPointwise,     // 1x1 of stride 1: a matrix product
  kDense,
  kUnmeasured,
};
enum class Operands { k16Bit, kTf32, kFp32 };
enum class Pipe { kWgmma, kMmaSync, kFma };  // kWgmma: mma.sync where the GPU has no wgmma

constexpr int kFprop = 1, kDgrad = 2, kWgrad = 4, kGather = kFprop | kDgrad;

// Predicted microseconds: fixed + (compute^p + memory^p)^(1/p). Compute is the FLOPs at flop_share
// of the pipe's rate. Memory is every tensor once, written bytes weighted by 1 + written_excess, at
// dram_share of the DRAM rate. The larger p, the better the two overlap (Overlap).
struct Row {
  Class problem_class;
  int ops;
  Operands operands;
  double fixed_us;  // launches, memsets, first and last tile, split-K reduction
  Pipe pipe;
  double flop_share, dram_share, written_excess = 0;
};

// Fitted to lax on an H200 with jax 0.11.2 (docs/notes/xla.md). The comment in each line: the
// number of measured times, and the least and greatest ratio of prediction to measurement.
// Predictions for 16-bit and TF32 kDense fprop and dgrad exceed most measured times on purpose:
// this library's kernels are about as fast there, so a layer goes to XLA only where that probably
// gains.
// clang-format off
constexpr Row kRows[] = {
    {Class::kDepthwise,         kGather, Operands::k16Bit,  7.5, Pipe::kFma,     0.18,   0.69},        //  32  0.81 1.13
    {Class::kDepthwise,         kWgrad,  Operands::k16Bit, 15,   Pipe::kFma,     0.26,   0.50},        //  16  0.02 1.18
    {Class::kDepthwise,         kGather, Operands::kFp32,   2.5, Pipe::kFma,     0.103,  1.00},        //  64  0.55 1.40
    {Class::kDepthwise,         kWgrad,  Operands::kFp32,   6.3, Pipe::kFma,     0.50,   0.86},        //  26  0.62 1.58
    {Class::kDepthwiseAbove3x3, kWgrad,  Operands::kFp32,   3,   Pipe::kFma,     0.0055, 0.30},        //   3  0.98 1.50
    {Class::kDepthwiseRank1,    kDgrad,  Operands::k16Bit,  2,   Pipe::kFma,     0.0035, 0.80},        //   1  0.95
    {Class::kGrouped,           kGather, Operands::k16Bit,  3.5, Pipe::kMmaSync, 0.23,   0.86},        //  16  0.92 1.12
    {Class::kGrouped,           kWgrad,  Operands::k16Bit,  3,   Pipe::kMmaSync, 0.105,  0.90},        //   8  0.81 1.59
    {Class::kGrouped,           kGather, Operands::kTf32,  10,   Pipe::kMmaSync, 0.39,   1.00},        //  16  0.79 1.30
    {Class::kGrouped,           kWgrad,  Operands::kTf32,   3,   Pipe::kMmaSync, 0.087,  0.26},        //   8  0.72 1.14
    {Class::kGrouped,           kGather, Operands::kFp32, 600,   Pipe::kFma,     1.00,   0.0514},      //  16  0.86 2.11
    {Class::kFewChannels,       kFprop,  Operands::k16Bit,  3,   Pipe::kMmaSync, 0.055,  0.14},        //   6  0.95 1.02
    {Class::kFewChannels,       kDgrad,  Operands::k16Bit,  3,   Pipe::kMmaSync, 0.027,  0.37},        //   5  0.38 1.14
    {Class::kFewChannels,       kWgrad,  Operands::k16Bit,  3,   Pipe::kMmaSync, 0.08,   0.22},        //   5  0.65 1.04
    {Class::kFewChannels,       kFprop,  Operands::kTf32,   3,   Pipe::kMmaSync, 0.125,  0.28},        //   1  1.00 1.00
    {Class::kFewChannels,       kDgrad,  Operands::kTf32,   3,   Pipe::kFma,     0.19,   0.30},        //   1  0.99 0.99
    {Class::kFewChannels,       kWgrad,  Operands::kTf32,   3,   Pipe::kMmaSync, 0.105,  0.28},        //   1  1.00 1.00
    {Class::kFewChannels,       kDgrad,  Operands::kFp32,   3,   Pipe::kFma,     0.19,   0.30},        //   1  0.99 0.99
    {Class::kFewChannels,       kWgrad,  Operands::kFp32,   3,   Pipe::kFma,     0.27,   0.30},        //   3  1.01 1.01
    {Class::kDilatedWgrad,      kWgrad,  Operands::k16Bit,  3,   Pipe::kMmaSync, 0.086,  0.30},        //   2  1.00 1.01
    {Class::kDilatedWgrad,      kWgrad,  Operands::kTf32,   3,   Pipe::kMmaSync, 0.106,  0.30},        //   1  1.00 1.00
    {Class::kPointwise,         kGather, Operands::k16Bit,  3.15, Pipe::kWgmma,  0.743,  1.037,  0.31}, // 112  0.85 1.13
    {Class::kPointwise,         kWgrad,  Operands::k16Bit,  9,   Pipe::kWgmma,   0.90,   0.99},        //  47  0.84 1.21
    {Class::kPointwise,         kGather, Operands::kTf32,   8.6, Pipe::kWgmma,   0.761,  1.20,   0.47}, //  97  0.83 1.13
    {Class::kPointwise,         kWgrad,  Operands::kTf32,   8.8, Pipe::kWgmma,   0.40,   1.10},        //  34  0.60 1.14
    {Class::kPointwise,         kGather, Operands::kFp32,   1.3, Pipe::kFma,     0.37,   0.20},        //  68  0.71 1.59
    {Class::kPointwise,         kWgrad,  Operands::kFp32,   6.3, Pipe::kFma,     0.32,   0.345},       //  34  0.36 1.58
    {Class::kDense,             kGather, Operands::k16Bit,  7,   Pipe::kWgmma,   0.78,   0.52},        //  44  0.78 1.49
    {Class::kDense,             kWgrad,  Operands::k16Bit, 15,   Pipe::kWgmma,   0.66,   0.58},        //  22  0.93 1.53
    {Class::kDense,             kGather, Operands::kTf32,   9,   Pipe::kWgmma,   0.77,   0.48},        //  44  0.63 1.86
    {Class::kDense,             kWgrad,  Operands::kTf32,  18,   Pipe::kWgmma,   0.36,   0.22},        //  22  0.65 2.48
    {Class::kDense,             kGather, Operands::kFp32,  10,   Pipe::kFma,     0.55,   0.15},        //  44  0.55 1.27
    {Class::kDense,             kWgrad,  Operands::kFp32,   3,   Pipe::kFma,     0.33,   0.50},        //   8  0.91 1.52
};
// clang-format on

// Share of the DRAM rate that an elementwise XLA kernel reaches, measured with a copy: 3.99 of 4.8
// TB/s.
constexpr double kPassShare = 0.83;

// The p of Row. Matrix products and depthwise kernels load while they compute, products with large
// outputs less so; the other kernels wait for a part of their gathered loads.
double Overlap(const Row& row) {
  const bool waits = row.problem_class == Class::kFewChannels ||
                     row.problem_class == Class::kDense ||
                     row.problem_class == Class::kDilatedWgrad;
  if (waits) return 2;
  if (row.problem_class != Class::kPointwise || row.ops == kWgrad) return 4;
  return row.operands == Operands::k16Bit ? 2.5 : row.operands == Operands::kTf32 ? 3.2 : 4;
}

// cuBLAS reads fprop's filter as (k, c): a preceding kernel transposes it from (c, k), at
// kTransposeShare of the DRAM rate.
constexpr double kTransposeUs = 1.2, kTransposeShare = 0.5;

// cuBLAS splits a wgrad along the reduction if its 64x64 tiles do not fill a wave, and then sums
// the partial results of kReducedPerUs outputs in a microsecond.
constexpr int64_t kSplitTile = 64 * 64;
constexpr double kReducedPerUs = 140e3;

// Exponents of TileExcess: for wgrad with tiles of 128x128 channels, for TF32 fprop and dgrad with
// tiles of 256.
constexpr double kWgradExcessPower = 0.9, kTf32WgradExcessPower = 0.68, kTf32ExcessPower = 0.54;

// A TF32 wgrad of more than 64 and less than 128 channels does not fit cuBLAS's tiles of 64; cuDNN
// computes it, this many times slower.
constexpr double kTf32WgradBetween = 1.6;

// The share of the L2 from which a result is written back during the next kernel's loads. Only the
// rest of the result counts as written.
constexpr double kWrittenLater = 0.64, kTf32WrittenLater = 0.22;
// DRAM time grows by these factors in matrix products whose rows along the reduction are no
// multiple of a cache line.
constexpr int64_t kLineBytes = 128;
constexpr double kPartialLines = 1.15, kTf32PartialLines = 1.08;

// A strided depthwise wgrad takes this many times longer: its tiles of 4x4 pixels read rows of x
// that the next tiles read again.
constexpr double kStridedTiles = 1.4;

// cuDNN gathers groups into blocks of this many channels, with zeros between the groups.
constexpr double kBlockChannels = 32;
// From this many channels per group on, wgrad has a Hopper kernel, whose blocks waste less.
constexpr int64_t kHopperGroup = 8;
// The same for 16-bit fprop and dgrad.
constexpr int64_t kWideGroup = 16;
// For a strided dgrad, an XLA kernel inserts zeros into dy at this share of the DRAM rate.
constexpr double kDilateShare = 0.32;
// XLA computes rank 3 in another layout: all tensors are moved this many more times.
constexpr double kRank3Passes = 7;

// cuDNN's FFT of 3x3 filters in FP32. The autotuner picks it from 32 images and 128 channels on
// (dgrad: 64). Tiles have 16x16 or 32x32 pixels, and the spectrum of a tile has 16 x 9 or 32 x 17
// numbers.
constexpr int64_t kFftImages = 32, kFftChannels = 128, kFftDgradChannels = 64;
constexpr int64_t kFftSmallTile = 16, kFftTile = 32;
constexpr double kFftFixedUs = 12;  // seven or eight kernels
constexpr double kFftFlopShare = 0.66;

bool AllOnes(const Spatial& value) { return value == Spatial{1, 1, 1}; }

Class ClassOf(const ConvProblem& problem) {
  const bool wgrad = problem.op == Op::kWgrad;
  if (problem.batch > 1 || !AllOnes(problem.lhs_dilation)) return Class::kUnmeasured;
  if (problem.groups > 1) {
    const int64_t least = std::min(problem.c_per_group(), problem.k_per_group());
    const int64_t most = std::max(problem.c_per_group(), problem.k_per_group());
    if (!AllOnes(problem.dilation) || problem.rank == 3) return Class::kUnmeasured;
    if (most == 1 && problem.rank == 1) return Class::kDepthwiseRank1;
    if (most == 1) {
      const bool fp32_wgrad = wgrad && problem.x_dtype == DType::kF32;
      return fp32_wgrad && problem.taps() > 9 ? Class::kDepthwiseAbove3x3 : Class::kDepthwise;
    }
    const bool blocks = least > 1 && most <= kBlockChannels && problem.rank == 2;
    return blocks ? Class::kGrouped : Class::kUnmeasured;
  }
  if (problem.c <= 4) return Class::kFewChannels;
  // Separate kernels pad channels that are no multiple of 16 bytes.
  const int64_t aligned = 16 / ByteWidth(problem.lhs_dtype());
  if (std::min(problem.c, problem.k) < 16 || problem.c % aligned != 0 || problem.k % aligned != 0) {
    return Class::kUnmeasured;
  }
  if (wgrad && !AllOnes(problem.dilation)) return Class::kDilatedWgrad;
  return problem.taps() == 1 && AllOnes(problem.stride) ? Class::kPointwise : Class::kDense;
}

// The problem's row, or null if nothing was measured or XLA is not accurate enough.
const Row* FindRow(const ConvProblem& problem) {
  const DType type = problem.lhs_dtype();
  if (problem.rhs_dtype() != type || problem.output_dtype() != type) return nullptr;
  if (type != DType::kF32 && type != DType::kBF16 && type != DType::kF16) return nullptr;
  if (!problem.RequireChannelsLast().ok()) return nullptr;
  const Class problem_class = ClassOf(problem);
  Operands operands = Operands::k16Bit;
  if (type == DType::kF32) {
    // Depthwise kernels multiply in FP32 at every precision.
    const bool depthwise =
        problem_class == Class::kDepthwise || problem_class == Class::kDepthwiseAbove3x3;
    // At HIGH the others multiply in TF32, with an rms error of 3e-4; a direct FP32 sum has 5e-7.
    if (problem.precision == Precision::kHigh && !depthwise) return nullptr;
    // At HIGHEST, wgrad with stride 1 uses Winograd or short sums, with rms errors of 4e-6 to 4e-5.
    if (problem.precision == Precision::kHighest && problem.op == Op::kWgrad &&
        problem.groups == 1 && problem.taps() > 1 && AllOnes(problem.stride)) {
      return nullptr;
    }
    const bool fp32 = depthwise || problem.precision == Precision::kHighest;
    operands = fp32 ? Operands::kFp32 : Operands::kTf32;
  }
  const int op = problem.op == Op::kFprop ? kFprop : problem.op == Op::kDgrad ? kDgrad : kWgrad;
  for (const Row& row : kRows) {
    if (row.problem_class == problem_class && row.operands == operands && (row.ops & op) != 0) {
      return &row;
    }
  }
  return nullptr;
}

double FmaFlopsPerUs(const Gpu& gpu) {
  return 2 * gpu.fma_per_clock * gpu.sm_count * gpu.cycles_per_us();
}

double FlopsPerUs(const Row& row, const Gpu& gpu) {
  if (row.pipe == Pipe::kFma) return FmaFlopsPerUs(gpu);
  const bool wgmma = row.pipe == Pipe::kWgmma && gpu.wgmma_per_clock > 0;
  const double per_clock = wgmma ? gpu.wgmma_per_clock : gpu.mma_sync_per_clock;
  const double operations = row.operands == Operands::kTf32 ? 1 : 2;  // TF32 at half the rate
  return operations * per_clock * gpu.sm_count * gpu.cycles_per_us();
}

// The outputs that whole waves of whole tiles compute, divided by the outputs of the fprop or
// dgrad, for the best tile.
double WaveExcess(const ConvProblem& problem, const Gpu& gpu) {
  struct Tile {
    int64_t m, n;
    double slower;  // than larger tiles with all SMs busy
  };
  constexpr Tile kTiles[] = {{256, 128, 1}, {128, 128, 1}, {256, 64, 1}, {128, 64, 1.12}};
  const bool fprop = problem.op == Op::kFprop;
  const int64_t m = problem.n * (fprop ? problem.out_pixels() : problem.in_pixels());
  const int64_t n = fprop ? problem.k : problem.c;
  double least = HUGE_VAL;
  for (const Tile& tile : kTiles) {
    const int64_t tiles = CeilDiv(m, tile.m) * CeilDiv(n, tile.n);
    const auto ctas = static_cast<double>(CeilDiv(tiles, gpu.sm_count) * gpu.sm_count);
    least = std::min(least, tile.slower * ctas * static_cast<double>(tile.m * tile.n));
  }
  return least / (static_cast<double>(m) * static_cast<double>(n));
}

// Channels rounded up to whole tiles, divided by the channels.
double TileExcess(int64_t channels, int64_t tile) {
  return static_cast<double>(CeilDiv(channels, tile) * tile) / static_cast<double>(channels);
}

// Microseconds of cuDNN's FFT, infinite where the autotuner does not pick it. fprop's padded map
// must fit in one tile; only dgrad divides larger maps into tiles.
double FftMicroseconds(const ConvProblem& problem, const Gpu& gpu) {
  if (problem.op == Op::kWgrad || problem.groups > 1 || problem.rank != 2 || problem.taps() == 1 ||
      !AllOnes(problem.stride) || !AllOnes(problem.dilation) || problem.n < kFftImages ||
      std::min(problem.c, problem.k) <
          (problem.op == Op::kDgrad ? kFftDgradChannels : kFftChannels)) {
    return HUGE_VAL;
  }
  int64_t padded = 0, tiles = 1, tile = kFftTile;
  for (int axis = 1; axis < 3; ++axis) {
    if (problem.filter[axis] > kFftTile) return HUGE_VAL;
    padded = std::max(padded, problem.out[axis] + problem.filter[axis] - 1);
    tiles *= CeilDiv(problem.in[axis], kFftTile - problem.filter[axis] + 1);
  }
  if (problem.op == Op::kFprop) {
    if (padded > kFftTile) return HUGE_VAL;
    if (padded <= kFftSmallTile) tile = kFftSmallTile;
    tiles = 1;
  }
  const auto frequencies = static_cast<double>(tile * (tile / 2 + 1));
  const auto maps = static_cast<double>(problem.n * tiles);
  const auto c = static_cast<double>(problem.c), k = static_cast<double>(problem.k);
  // A complex number has 8 bytes, and a complex product takes 8 operations. Spectra are written and
  // read; x and y change layout, which writes and reads them once more.
  const double spectra = 8 * frequencies * (maps * (c + k) + c * k);
  const double tensors = 4.0 * static_cast<double>(problem.x_elements() + problem.y_elements());
  const double flops = 8 * frequencies * maps * c * k;
  return kFftFixedUs + 2 * (spectra + tensors) / gpu.dram_bytes_per_us +
         flops / (kFftFlopShare * FmaFlopsPerUs(gpu));
}

}  // namespace

double PredictXlaMicroseconds(const ConvProblem& problem, const Gpu& gpu) {
  const Row* row = FindRow(problem);
  if (row == nullptr) return 0;
  const auto width = static_cast<double>(ByteWidth(problem.lhs_dtype()));
  const double part = problem.op == Op::kDgrad ? 1 : problem.PartOfX();
  const double x = width * part * static_cast<double>(problem.x_elements());
  const double w = width * static_cast<double>(problem.w_elements());
  const double y = width * static_cast<double>(problem.y_elements());
  const double written = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : w;
  const double bytes = x + w + y;
  auto flops = static_cast<double>(problem.flops());
  double us = row->fixed_us;
  if (problem.rank == 3) us += kRank3Passes * bytes / gpu.dram_bytes_per_us;
  if (row->problem_class == Class::kDense && row->ops == kGather) flops *= WaveExcess(problem, gpu);
  if (row->problem_class == Class::kGrouped) {
    const int64_t group = problem.c_per_group();
    const double waste = kBlockChannels / static_cast<double>(group);
    const bool wide =
        row->ops == kGather && row->operands == Operands::k16Bit && group >= kWideGroup;
    const bool hopper = problem.op == Op::kWgrad && row->operands == Operands::k16Bit &&
                        gpu.wgmma_per_clock > 0 && group >= kHopperGroup;
    flops *= hopper ? std::sqrt(waste / 2) : wide ? std::sqrt(waste) : waste;
  }
  if (problem.groups > 1 && problem.op == Op::kDgrad && !AllOnes(problem.stride)) {
    // XLA inserts zeros between the pixels of dy and convolves the result.
    const auto pixels = static_cast<double>(problem.in_pixels());
    flops *= pixels / static_cast<double>(problem.out_pixels());
    us += width * static_cast<double>(problem.n * problem.k) * pixels /
          (kDilateShare * gpu.dram_bytes_per_us);
  }
  const double later = row->operands == Operands::kTf32 ? kTf32WrittenLater : kWrittenLater;
  const double beyond = std::max(0.0, written - later * static_cast<double>(gpu.l2_bytes));
  double memory =
      (bytes + row->written_excess * beyond) / (row->dram_share * gpu.dram_bytes_per_us);
  const bool pointwise = row->problem_class == Class::kPointwise;
  if (pointwise && row->operands != Operands::kFp32 && problem.op == Op::kWgrad) {
    flops *= std::pow(TileExcess(problem.c, 128) * TileExcess(problem.k, 128),
                      width > 2 ? kTf32WgradExcessPower : kWgradExcessPower);
    const int64_t narrow = std::min(problem.c, problem.k);
    if (width > 2 && narrow > 64 && narrow < 128) flops *= kTf32WgradBetween;
    const bool split = problem.w_elements() < gpu.sm_count * kSplitTile;
    if (split) us += static_cast<double>(problem.w_elements()) / kReducedPerUs;
  } else if (pointwise && row->operands != Operands::kFp32) {
    const bool tf32 = row->operands == Operands::kTf32, fprop = problem.op == Op::kFprop;
    const int64_t reduced = fprop ? problem.c : problem.k;
    if (reduced * ByteWidth(problem.lhs_dtype()) % kLineBytes != 0) {
      memory *= tf32 ? kTf32PartialLines : kPartialLines;
    }
    if (tf32) {
      flops *= std::pow(TileExcess(fprop ? problem.k : problem.c, 256), kTf32ExcessPower);
    } else if (fprop && problem.filter_layout == FilterLayout::kRsck) {
      us += kTransposeUs + 2 * w / (kTransposeShare * gpu.dram_bytes_per_us);
    }
  }
  if (row->problem_class == Class::kDepthwise && row->operands == Operands::kFp32 &&
      problem.op == Op::kWgrad && !AllOnes(problem.stride)) {
    memory *= kStridedTiles;
  }
  const double compute = flops / (row->flop_share * FlopsPerUs(*row, gpu));
  const double overlap = Overlap(*row);
  us += std::pow(std::pow(compute, overlap) + std::pow(memory, overlap), 1 / overlap);
  Epilogue terms = problem.epilogue;
  terms.statistics = false;
  if (!terms.Plain()) {
    // The convolution's result is float32; an XLA kernel reads it and applies the epilogue.
    const auto outputs = static_cast<double>(problem.y_elements());
    us += gpu.launch_us + (8 * outputs + static_cast<double>(EpilogueBytes(problem))) /
                              (kPassShare * gpu.dram_bytes_per_us);
  }
  if (problem.epilogue.statistics) {
    // Another kernel reads the result for its statistics, and one more adds the partial sums.
    us += 2 * gpu.launch_us + y / (kPassShare * gpu.dram_bytes_per_us);
  }
  return row->operands == Operands::kFp32 ? std::min(us, FftMicroseconds(problem, gpu)) : us;
}

}  // namespace jaxconv
