// The plan of the fused one-dimensional form.
#ifndef JAXCONV_CUDA_WINOGRAD_FUSED_ROW_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_FUSED_ROW_PLAN_H_

#include "cuda/winograd/form_plan.h"
#include "cuda/winograd/fused_row_params.h"

namespace jaxconv::winograd {

Status PlanFusedRow(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                    TimeTerms* terms);

// The kernel's parameters without pointers, and the upper corners (W, H) of the box of base pixels.
RowParams MakeRowParams(const LaunchParams& launch, int32_t* upper);

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FUSED_ROW_PLAN_H_
