// The plans of the four-stage forms whose products are not tiled through shared memory:
// sync_free.cuh and elementwise.cuh.
#ifndef JAXCONV_CUDA_WINOGRAD_PRODUCTS_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_PRODUCTS_PLAN_H_

#include "cuda/winograd/form_plan.h"

namespace jaxconv::winograd {

// All tiles at once.
Status PlanSyncFree(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                    TimeTerms* terms);
// The seed's PKF-LLC: chunks of tiles whose V and M fit in the GPU's L2, at most kChunkBytes.
Status PlanPkfLlc(const Instance& instance, const Gpu& gpu, LaunchParams* launch, TimeTerms* terms);
Status PlanElementwise(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                       TimeTerms* terms);

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_PRODUCTS_PLAN_H_
