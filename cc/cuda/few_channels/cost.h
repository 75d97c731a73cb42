// The data of an instance, the tiling that plan.cc chooses for a problem, and the cycles of a tile.
// Plain C++.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_COST_H_
#define JAXCONV_CUDA_FEW_CHANNELS_COST_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "cuda/common/gpu.h"
#include "cuda/few_channels/params.h"

namespace jaxconv::few_channels {

// The device kernels, by the operation that they are named after.
enum class Form { kFprop, kDgrad, kWgrad, kNarrowWgrad };

// A line of kernels.def: its arguments, in their order, then what its form says.
struct Instance {
  int64_t extent;          // pixels of fprop's tile, columns of z, rows of dw
  int64_t ctas_per_sm;     // limit from its registers
  bool by_chunks = false;  // copies the halo tile by chunks of 16 bytes
  int64_t warps_m = 1, warps_n = 1, warps_k = 1;
  Form form = Form::kFprop;
  bool three_tf32 = false;

  // Whether the line's operation has narrow outputs, so that another operation's kernel computes it
  // on the mirrored problem.
  constexpr bool Narrow(Op op) const {
    return form == Form::kNarrowWgrad || (form == Form::kFprop && op == Op::kDgrad) ||
           (form == Form::kDgrad && op == Op::kFprop);
  }
};

struct Tiling {
  Params params;
  int64_t shared_bytes = 0;
  int64_t grid_y = 1;
  int64_t halo_elements = 0;  // that a tile copies
  int64_t width = 2;          // bytes of an element
  int conflicts = 1;          // float32: wavefronts for a load of fragment words
  bool three_tf32 = false;
};

// Cycles of an SM for a tile.
struct TileCycles {
  double tensor_cores = 0, loads = 0;
};

TileCycles CyclesOfTile(const Instance& instance, const ConvProblem& problem, const Tiling& tiling,
                        const Gpu& gpu);

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_COST_H_
