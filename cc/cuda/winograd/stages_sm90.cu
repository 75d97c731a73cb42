#include "cuda/winograd/launch_stages.cuh"
#include "cuda/winograd/repair_sm90.cuh"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {

namespace {

template <int m, bool kTransposed>
Status LaunchRepair(const RepairParams& params, int32_t ctas, void* stream) {
  LaunchConfig config;
  config.grid = static_cast<unsigned>(ctas);
  config.threads = kInputThreads;
  config.overlaps = true;
  return Launch<RepairKernel<m, __nv_bfloat16, kTransposed>>("winograd repair", config, stream,
                                                             params);
}

}  // namespace

Status LaunchRepairStage(const LaunchParams& launch, const StagePointers& at, void* stream) {
  if (!launch.assumes()) return {};
  const Geometry& g = launch.geometry;
  RepairParams params;
  params.input = stages_internal::DescribeInputTransform(launch, at, 0, g.tiles);
  const LaunchConfig grid = stages_internal::TransformGrid(
      g.in_channels(), g.tiles, kInputThreads, &params.input.pairs, &params.input.channel_blocks);
  params.input_blocks = static_cast<int32_t>(grid.grid.x);
  params.filter = stages_internal::DescribeFilterTransform(launch, at);
  if (!launch.prepared) {
    params.filter_blocks = static_cast<int32_t>(stages_internal::FilterGrid(g).grid.x);
  }
  const int32_t ctas = std::max(1, kRepairCtas * launch.ctas);
  const bool transposed = launch.filter.col == 1;
  if (launch.m == 4) {
    return transposed ? LaunchRepair<4, true>(params, ctas, stream)
                      : LaunchRepair<4, false>(params, ctas, stream);
  }
  if (launch.m == 6) {
    return transposed ? LaunchRepair<6, true>(params, ctas, stream)
                      : LaunchRepair<6, false>(params, ctas, stream);
  }
  return Status::Internal("no form of F(2x2) has float16 products");
}

template Status LaunchFilterStage<true>(const LaunchParams&, const StagePointers&, void*);
template Status LaunchInputStage<true>(const LaunchParams&, const StagePointers&, int32_t, int32_t,
                                       void*);
template Status LaunchOutputStage<true>(const LaunchParams&, const StagePointers&, int32_t, int32_t,
                                        void*);

}  // namespace jaxconv::winograd
