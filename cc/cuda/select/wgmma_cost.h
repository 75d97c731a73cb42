// Predicted time of a persistent, warp-specialised wgmma kernel.
//
// A step (128 bytes of the reduction) passes through the tensor cores, line by line through the
// copy engine, and through the thread that issues its copies; the slowest sets the pace, because
// the ring decouples them. The epilogue stands alone: math warpgroups store what they multiplied.
// Constants have names and were measured (docs/notes/hopper.md).
#ifndef JAXCONV_CUDA_SELECT_WGMMA_COST_H_
#define JAXCONV_CUDA_SELECT_WGMMA_COST_H_

#include <cstdint>

#include "cuda/select/device_info.h"

namespace jaxconv {

struct WgmmaTileCost {
  int64_t tile_m = 0, tile_n = 0;
  bool pingpong = false;  // one warpgroup stores while the other multiplies
  bool resident = false;  // the filter is loaded once a CTA
  bool columns = false;   // pixels are the columns of the product
  double pace = 1;        // of wgmma's, where mma.sync multiplies
};

struct WgmmaWork {
  int64_t tiles = 0;        // of the grid, split-K slices counted
  double taps = 0;          // 128-byte pieces of a tile's reduction
  double taps_of_load = 1;  // that share a load of activations
  int64_t gemm_n = 0;
  // Tiles that want the same activations.
  int64_t n_tiles = 1;
  // Wgrad in rows: rows of the tile that a line of a load serves, pieces of a step.
  double rows_of_load = 1, pieces_of_step = 1;
  double extra_copies = 0;  // of a piece, beside one of activations and those of the columns
  // Bytes from one line of a box to the next in global memory, of both operands; and of the output.
  int64_t pitch_a = 128, pitch_b = 128, pitch_out = 128;
  double filter_bytes = 0;   // of a group, where the other operand is the filter
  double dram_bytes = 0;     // every tensor once
  double written_bytes = 0;  // of them
  double partial_bytes = 0;  // split-K: what the slices write and the reduction reads again
  double out_bytes = 2;      // of an element that a tile stores
  bool tf32 = false;
  double sector_bytes = 0;      // of dram_bytes, those stored a sector at a time
  bool drawn = false;           // tiles go to the SM that is free
  double transposed_bytes = 0;  // of a filter that a kernel of its own transposes before
};

double PredictWgmmaMicroseconds(const WgmmaTileCost& tile, const WgmmaWork& work,
                                const DeviceInfo& device);

// The same where the CTAs of a cluster split a tile's reduction: `ranks` of them, each a tile of
// `work` (whose taps are those of one).
double PredictWgmmaClusterMicroseconds(const WgmmaTileCost& tile, const WgmmaWork& work,
                                       int64_t ranks, const DeviceInfo& device);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_SELECT_WGMMA_COST_H_
