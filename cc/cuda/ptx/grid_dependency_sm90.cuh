// Programmatic dependent launch (sm_90): a kernel that was launched so may start while the one
// before it in the stream still runs.
#ifndef JAXCONV_CUDA_PTX_GRID_DEPENDENCY_SM90_CUH_
#define JAXCONV_CUDA_PTX_GRID_DEPENDENCY_SM90_CUH_

#include <cuda_runtime.h>

namespace jaxconv {

// Waits until the kernels on which this one depends have ended and their writes are visible to the
// whole grid. Returns at once if there are none.
__device__ __forceinline__ void WaitForPrecedingGrids() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Lets the next kernel start once every CTA has called this or ended.
__device__ __forceinline__ void LetNextGridStart() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_GRID_DEPENDENCY_SM90_CUH_
