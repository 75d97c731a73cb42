#include "cuda/few_channels/cost.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/rates.h"

namespace jaxconv::few_channels {
namespace {

// Cycles of an SM, from a fit to 70 times of an H200 (docs/notes/few_channels.md); kFragmentCycles is
// chosen to fit five rows of tests/cc/measured_times.tsv. A copy of 16 bytes of the
// halo by cp.async; of a word through registers; the second copy of the halo, shifted by an element.
constexpr int64_t kChunkBytes = 16, kWordBytes = 4;
constexpr double kChunkCycles = 0.48, kWordCycles = 0.84, kShiftedCycles = 0.16;
// fprop: a tile's stores of 128 rows, and where K allows no vectors; wgrad: the fragments of a row of dw.
constexpr double kStoreRows = 128, kStoreCycles = 375, kNarrowStoreCycles = 2200;
constexpr double kFragmentCycles = 4.6;
// dgrad: a line of 128 bytes of dy from L2, and a term of the sums of z for each output.
constexpr double kLineCycles = 1.07, kSumCycles = 0.46;
// Of a CTA before its first tile (fprop: the table; dgrad and wgrad: the filter and the places), and
// the latency of a tile that only other CTAs hide: its copies, and in fprop each k-block's loads.
constexpr double kTableCycles = 300, kFilterCycles = 6000;
constexpr double kTileLatency = 2900, kTileOfDyLatency = 4800, kBlockLatency = 80;
// Columns of the GEMM, and pixels of a tile of wgrad.
constexpr double kColumns = 64, kPixelsOfWgrad = 128;
// k-blocks that dgrad multiplies with one line of dy.
constexpr double kBlocksOfLine = 4;

double CopyCycles(const Instance& instance, const Tiling& tiling) {
  const auto bytes = static_cast<double>(tiling.halo_elements * tiling.width);
  const bool float_words = tiling.width == kWordBytes && tiling.params.word_copies != 0;
  if (instance.by_chunks || (tiling.width == kWordBytes && !float_words)) {
    return bytes / kChunkBytes * kChunkCycles;
  }
  const bool twice = tiling.params.copy_bytes > 0;
  return bytes / kWordBytes * (kWordCycles + (twice ? kShiftedCycles : 0));
}

}  // namespace

TileCycles CyclesOfTile(const Instance& instance, const ConvProblem& problem, const Tiling& tiling,
                        const Gpu& gpu) {
  const Params& params = tiling.params;
  const double k_blocks = params.k_blocks;
  const auto extent = static_cast<double>(instance.extent);
  // Elements of a k-block, 32 bytes; products a cycle.
  const double reduced = 32.0 / static_cast<double>(tiling.width);
  const double rate =
      gpu.mma_sync_per_clock * 2 / static_cast<double>(tiling.width) / (tiling.three_tf32 ? 3 : 1);
  TileCycles tile;
  if (problem.op == Op::kFprop) {
    // The same warps copy, multiply and store.
    tile.tensor_cores =
        k_blocks * extent * kColumns * reduced / rate + CopyCycles(instance, tiling) +
        extent / kStoreRows * (kStoreCycles + (params.k_vector != 0 ? 0 : kNarrowStoreCycles));
    tile.start = kTableCycles;
    tile.latency = kTileLatency + kBlockLatency * k_blocks;
  } else if (problem.op == Op::kDgrad) {
    const double rows = static_cast<double>(params.rows.filter) / params.rows.stride;
    // The warps that multiply also add up the terms of the outputs.
    tile.tensor_cores =
        rows * k_blocks * kDgradPixels * extent * reduced / rate +
        static_cast<double>(params.tile_rows) * params.tile_columns * params.c * kSumCycles;
    tile.loads = static_cast<double>(tiling.halo_elements * tiling.width) / kLineBytes *
                 std::ceil(k_blocks / kBlocksOfLine) * kLineCycles;
    tile.start = kFilterCycles;
    tile.latency = kTileOfDyLatency;
  } else {
    tile.tensor_cores = extent * kColumns * kPixelsOfWgrad / rate;
    tile.loads = CopyCycles(instance, tiling) + extent * kFragmentCycles;
    tile.start = kFilterCycles;
    tile.latency = kTileLatency;
  }
  return tile;
}

}  // namespace jaxconv::few_channels
