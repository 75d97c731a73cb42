#include "cuda/few_channels/cost.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/rates.h"

namespace jaxconv::few_channels {
namespace {

// Cycles of an SM, from a fit to 70 times of an H200 (docs/notes/few_channels.md); kFragmentCycles
// is chosen to fit five rows of tests/cc/measured_times.tsv. A copy of 16 bytes of the halo by
// cp.async; of a word through registers.
constexpr int64_t kWordBytes = 4;
constexpr double kChunkCycles = 0.48, kWordCycles = 0.84;
// fprop: the stores of a tile of kTilePixels by vectors; wgrad: the fragments of a row of dw.
constexpr double kStoreCycles = 375, kFragmentCycles = 4.6;
// dgrad: a term of the sums of z for each output.
constexpr double kSumCycles = 0.46;
// A CTA prepares the filter and the places of dgrad and wgrad before its first tile. Only other CTAs
// hide the latency of a tile: its copies, and in fprop each k-block's loads.
constexpr double kFilterCycles = 6000, kTileLatency = 2900, kBlockLatency = 80;
constexpr int64_t kBlockBytes = 32;  // of a k-block in a row

double CopyCycles(const Instance& instance, const Tiling& tiling) {
  const auto bytes = static_cast<double>(tiling.halo_elements * tiling.width);
  const bool float_words = tiling.width == kWordBytes && tiling.params.word_copies != 0;
  if (instance.by_chunks || (tiling.width == kWordBytes && !float_words)) {
    return bytes / kChunkBytes * kChunkCycles;
  }
  return bytes / kWordBytes * kWordCycles;
}

}  // namespace

TileCycles CyclesOfTile(const Instance& instance, const ConvProblem& problem, const Tiling& tiling,
                        const Gpu& gpu) {
  const Params& params = tiling.params;
  const double k_blocks = params.k_blocks;
  const auto extent = static_cast<double>(instance.extent);
  // Elements of a k-block; products a cycle.
  const auto reduced = static_cast<double>(kBlockBytes / tiling.width);
  const double rate = gpu.mma_sync_per_clock * 2 /
                      static_cast<double>(tiling.width * ProductsOf(tiling.three_tf32));
  TileCycles tile;
  if (problem.op == Op::kFprop) {
    // The same warps copy, multiply and store.
    // Where K allows no vectors, an element takes as long as a vector.
    const int64_t stores = params.k_vector != 0 ? 1 : kChunkBytes / tiling.width;
    tile.tensor_cores = k_blocks * extent * kTileChannels * reduced / rate +
                        CopyCycles(instance, tiling) +
                        extent / kTilePixels * static_cast<double>(stores) * kStoreCycles;
    tile.latency = kTileLatency + kBlockLatency * k_blocks;
  } else if (problem.op == Op::kDgrad) {
    const double rows = static_cast<double>(params.rows.filter) / params.rows.stride;
    // The warps that multiply also add up the terms of the outputs.
    tile.tensor_cores =
        rows * k_blocks * kDgradPixels * extent * reduced / rate +
        static_cast<double>(params.tile_rows) * params.tile_columns * params.c * kSumCycles;
    // dy from L2, a line for several k-blocks.
    tile.loads = static_cast<double>(tiling.halo_elements * tiling.width) *
                 std::ceil(k_blocks * kBlockBytes / kLineBytes) / kSharedBytesPerCycle;
    tile.start = kFilterCycles;
    tile.latency = kTileLatency;
  } else {
    tile.tensor_cores = extent * kTileChannels * kTilePixels / rate;
    tile.loads = CopyCycles(instance, tiling) + extent * kFragmentCycles;
    tile.start = kFilterCycles;
    tile.latency = kTileLatency;
  }
  return tile;
}

}  // namespace jaxconv::few_channels
