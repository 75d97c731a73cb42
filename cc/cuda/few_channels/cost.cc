#include "cuda/few_channels/cost.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/kernel.h"
#include "cuda/common/rates.h"

namespace jaxconv::few_channels {
namespace {

// Cycles of an SM for a word of the halo that is copied through registers; chunks of 16 bytes come
// from L2 by cp.async. Fitted (docs/notes/few_channels.md).
constexpr int64_t kWordBytes = 4;
constexpr double kWordCycles = 1;
constexpr int64_t kBlockBytes = 32;  // of a k-block in a row

double CopyCycles(const Instance& instance, const Tiling& tiling) {
  const auto bytes = static_cast<double>(tiling.halo_elements * tiling.width);
  const bool float_words = tiling.width == kWordBytes && tiling.params.word_copies != 0;
  if (instance.by_chunks || (tiling.width == kWordBytes && !float_words)) {
    return bytes / kTileL2BytesPerCycle;
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
    const double outputs = extent * kTileChannels;
    tile.tensor_cores = k_blocks * outputs * reduced / rate + CopyCycles(instance, tiling) +
                        outputs * static_cast<double>(stores * tiling.width) / kStoreBytesPerCycle;
  } else if (problem.op == Op::kDgrad) {
    const double rows = static_cast<double>(params.rows.filter) / params.rows.stride;
    // The warps that multiply also add up the terms of the outputs.
    tile.tensor_cores = rows * k_blocks * kDgradPixels * extent * reduced / rate +
                        static_cast<double>(params.tile_rows) * params.tile_columns * params.c *
                            EpilogueCost::kLoopCycles;
    // dy from L2, a line for several k-blocks.
    tile.loads = static_cast<double>(tiling.halo_elements * tiling.width) *
                 std::ceil(k_blocks * kBlockBytes / kLineBytes) / kSharedBytesPerCycle;
  } else {
    tile.tensor_cores = extent * kTileChannels * kTilePixels / rate;
    // For each row of dw, the fragments of all pixels are read from shared memory.
    tile.loads = CopyCycles(instance, tiling) +
                 extent * static_cast<double>(kTilePixels * kWordBytes) / kSharedBytesPerCycle;
  }
  return tile;
}

}  // namespace jaxconv::few_channels
