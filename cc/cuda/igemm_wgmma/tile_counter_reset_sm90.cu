#include "cuda/common/launch.cuh"
#include "cuda/igemm_wgmma/params.h"
#include "cuda/igemm_wgmma/tile_counter_reset.h"
#include "cuda/ptx/grid_dependency_sm90.cuh"

namespace jaxconv::igemm_wgmma {
namespace {

__global__ void TileCounterReset(int32_t* counters) {
  WaitForPrecedingGrids();
  LetNextGridStart();
  counters[threadIdx.x] = 0;
}

}  // namespace

Status LaunchTileCounterReset(int32_t* counters, void* stream) {
  LaunchConfig config;
  config.threads = kTileCounters;
  config.overlaps = true;
  return Launch<TileCounterReset>("tile_counter_reset", config, stream, counters);
}

}  // namespace jaxconv::igemm_wgmma
