// The terms of a plan's predicted time (cuda/common/predicted_time.h).
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_COST_H_
#define JAXCONV_CUDA_IGEMM_WGMMA_COST_H_

#include <cstdint>

#include "cuda/common/gpu.h"
#include "cuda/common/predicted_time.h"
#include "cuda/igemm_wgmma/geometry.h"

namespace jaxconv::igemm_wgmma {

// What a plan decides beside the geometry.
struct Work {
  int64_t slices = 1;
  int64_t partial_bytes = 0;   // that split-K slices write
  bool dynamic = false;        // tiles are scheduled dynamically
  double epilogue_cycles = 0;  // of a consumer for an output
  bool clamps = true;          // for all columns of a tile; others for those that exist
};

// The time of all kernels of the call.
TimeTerms TermsOf(const Instance& instance, const ConvProblem& problem, const Geometry& geometry,
                  const Work& work, const Gpu& gpu);

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_COST_H_
