#include "cuda/few_channels/cost.h"

#include <algorithm>
#include <cmath>

namespace jaxconv::few_channels {
namespace {

// Cycles for float32, counted (docs/notes/few_channels.md) and not fitted. A k-block of 64 columns
// costs the larger of two terms: 16 or 48 products of each warp with the other instructions, and
// the loads of its fragments. Stores of 8 pixels cost 8 cycles each. Copies cost as much as those
// of 16-bit elements with the same bytes.
TileCycles CyclesOfFloatTile(const Instance& instance, const ConvProblem& problem,
                             const Tiling& tiling) {
  const Params& params = tiling.params;
  const auto elements = static_cast<double>(tiling.halo_elements);
  const double k_blocks = params.k_blocks;
  const double copies = (params.word_copies != 0 ? 0.5 : 0.12) * elements;
  // The tensor cores take 103 cycles, or 309 for three products.
  const double products = tiling.three_tf32 ? 360 : 140;
  if (problem.op == Op::kFprop) {
    // Warps of 64x64 load less for each product than warps of 32x64.
    const double tiles = static_cast<double>(instance.extent) / 128;
    const double stores = params.k_vector != 0 ? 700 : 1700;
    const double loads = 4 * (8.0 * tiling.conflicts * tiles + 18);
    const double of_block = std::max(tiles > 1 ? 1.8 * products : products, loads);
    const double work = stores * tiles + copies + of_block * k_blocks;
    return {1500, work, work + 2900 + 80 * k_blocks};
  }
  if (problem.op == Op::kDgrad) {
    const double lines = elements / 32 * std::ceil(k_blocks / 4);
    const double of_rows = static_cast<double>(params.rows.filter) / params.rows.stride * k_blocks *
                           static_cast<double>(instance.extent);
    const double outputs = static_cast<double>(params.tile_rows) * params.tile_columns * params.c;
    const double work = 210 + 1.07 * lines + products / 22 * of_rows + 0.5 * outputs;
    return {8000, work, work + 4800 + 1500 * std::ceil(k_blocks / 4)};
  }
  // For 16 rows, 16 steps of 8 pixels; each has half a k-block's products, and 4 loads by 2 warps.
  const double loads = 8 * (tiling.conflicts + 1);
  const double work =
      1500 + copies + std::max(products / 10, loads) * static_cast<double>(instance.extent);
  return {5500, work, work + 2600};
}

}  // namespace

// The constants are fitted to 70 timings on an H200, within 10 % (docs/notes/few_channels.md),
// except for float32.
TileCycles CyclesOfTile(const Instance& instance, const ConvProblem& problem,
                        const Tiling& tiling) {
  if (tiling.width == 4) return CyclesOfFloatTile(instance, problem, tiling);
  const Params& params = tiling.params;
  const auto elements = static_cast<double>(tiling.halo_elements);
  const double k_blocks = params.k_blocks;
  if (problem.op == Op::kFprop) {
    const double twice = params.copy_bytes > 0 ? 1.19 : 1.0;
    const double pairwise_stores = params.k_vector != 0 ? 0 : 2200;
    // A chunk costs as much as a pair without the copy through registers.
    const double copies = instance.by_chunks ? 0.06 * elements : 0.42 * elements * twice;
    const double work = 375 + copies + 157 * k_blocks + pairwise_stores;
    return {300, work, work + 2900 + 630 * k_blocks};
  }
  if (problem.op == Op::kDgrad) {
    const double copies = elements / 64 * std::ceil(k_blocks / 4);
    const double products = static_cast<double>(params.rows.filter) / params.rows.stride *
                            k_blocks * static_cast<double>(instance.extent);
    const double outputs = static_cast<double>(params.tile_rows) * params.tile_columns * params.c;
    const double work = 210 + 1.07 * copies + 6.4 * products + 0.46 * outputs;
    return {6700, work, work + 4800};
  }
  const double copies = (instance.by_chunks ? 0.05 : 0.34) * elements;
  const double work = 880 + copies + 6.8 * static_cast<double>(instance.extent);
  return {5500, work, work + 2600};
}

}  // namespace jaxconv::few_channels
