#include "cuda/kernels/igemm_wgmma.h"
#include "cuda/kernels/overlapping_launch.cuh"
#include "cuda/ptx/grid_dependency_sm90.cuh"

namespace jaxconv {
namespace {

__global__ void WgmmaDrawReset(int32_t* drawn) {
  WaitForPrecedingGrids();
  LetNextGridStart();
  drawn[threadIdx.x] = 0;
}

}  // namespace

Status LaunchWgmmaDrawReset(int32_t* drawn, void* stream) {
  OverlappingLaunch launch;
  launch.threads = kWgmmaDrawCounters;
  return Launch(WgmmaDrawReset, launch, stream, drawn);
}

}  // namespace jaxconv
