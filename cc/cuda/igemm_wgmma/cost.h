// The terms of a plan's predicted time (cuda/common/predicted_time.h).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_COST_H_
#define JAXCONV_CUDA_IGEMM_WGMMA_COST_H_

#include <cstdint>

#include "cuda/common/gpu.h"
#include "cuda/common/predicted_time.h"
#include "cuda/igemm_wgmma/geometry.h"

namespace jaxconv::igemm_wgmma {

// Of all kernels of the call. `partial_bytes`: the bytes that split-K slices write.
// `epilogue_cycles`: those of a consumer for an output.
TimeTerms TermsOf(const Instance& instance, const ConvProblem& problem, const Geometry& geometry,
                  int64_t slices, int64_t partial_bytes, double epilogue_cycles, const Gpu& gpu);

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_COST_H_
