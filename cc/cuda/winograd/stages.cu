#include <cmath>

#include "cuda/winograd/launch_stages.cuh"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {

StagePointers Locate(const LaunchParams& launch, const Operands& operands) {
  char* const workspace = static_cast<char*>(operands.workspace);
  const Workspace& parts = launch.workspace;
  StagePointers at;
  at.input = operands.lhs;
  at.filter = operands.rhs;
  at.output = operands.out;
  at.u = launch.prepared ? static_cast<const char*>(operands.rhs) + kWinogradRecordBytes
                         : workspace + parts.u;
  at.v = workspace + parts.v;
  at.m = workspace + parts.m;
  if (launch.scaled()) {
    at.input_scale.partials = reinterpret_cast<const uint32_t*>(workspace + parts.input_partials);
  }
  const bool unscaled = launch.measured() && launch.dtype == DType::kF16;  // V and U
  if (launch.prepared) {
    at.filter_scale.value = static_cast<const float*>(operands.rhs) + (unscaled ? 1 : 0);
  } else if (launch.scaled()) {
    at.filter_scale.partials = reinterpret_cast<const uint32_t*>(workspace + parts.filter_partials);
  }
  if (unscaled) at.input_scale.assumed = at.filter_scale.assumed = 1.0f;
  if (launch.assumes()) {
    at.input_scale.assumed = kAssumedInputScale;
    at.input_scale.repaired = true;
    if (!launch.prepared) {
      at.filter_scale.assumed = kAssumedFilterScale;
      at.filter_scale.repaired = true;
    }
  }
  return at;
}

Products ProductsOf(const LaunchParams& launch, const StagePointers& at, int32_t tiles) {
  const Geometry& g = launch.geometry;
  return {g,
          at.v,
          at.u,
          launch.half_products ? nullptr : static_cast<float*>(at.m),
          launch.half_products ? at.m : nullptr,
          std::ldexp(1.0f, -ProductExponent(g.red)),
          launch.measured() ? at.input_scale : ScaleSource(),
          launch.measured() ? at.filter_scale : ScaleSource(),
          launch.points(),
          tiles,
          int64_t{launch.chunk_tiles} * g.in_channels(),
          int64_t{g.out_channels()} * g.red,
          int64_t{launch.chunk_tiles} * g.out_channels()};
}

template Status LaunchFilterStage<false>(const LaunchParams&, const StagePointers&, void*);
template Status LaunchInputStage<false>(const LaunchParams&, const StagePointers&, int32_t, int32_t,
                                        void*);
template Status LaunchOutputStage<false>(const LaunchParams&, const StagePointers&, int32_t,
                                         int32_t, void*);

}  // namespace jaxconv::winograd
