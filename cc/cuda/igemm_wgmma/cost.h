// The predicted time of a plan.
//
// A k-block passes through the tensor cores, through TMA row by row of its boxes, and through the
// producer that issues the copies; the slowest of the three sets the throughput, because the ring
// decouples them. The epilogue adds to it, except in pingpong, where one consumer warpgroup stores
// while the other multiplies. Constants were measured (docs/notes/igemm_wgmma.md).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_COST_H_
#define JAXCONV_CUDA_IGEMM_WGMMA_COST_H_

#include <cstdint>

#include "cuda/common/gpu.h"
#include "cuda/igemm_wgmma/geometry.h"

namespace jaxconv::igemm_wgmma {

// The time of all kernels of the call. `partial_bytes`: the bytes that split-K slices write.
// `dynamic`: tiles are scheduled dynamically.
double PredictMicroseconds(const Instance& instance, const ConvProblem& problem,
                           const Geometry& geometry, int64_t slices, int64_t partial_bytes,
                           bool dynamic, const Gpu& gpu);

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_COST_H_
