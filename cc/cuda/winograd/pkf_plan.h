// The plan of pkf_shmem.cuh: V in shared memory, M in registers.
#ifndef JAXCONV_CUDA_WINOGRAD_PKF_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_PKF_PLAN_H_

#include "cuda/winograd/form_plan.h"

namespace jaxconv::winograd {

// Refuses a problem if V of a CTA's tiles with all channels of a group, plus the exchange, exceeds
// a CTA's shared memory (the seed's V_e alpha^2 TB_M TB_K <= V_Shmem, seeds/004, 4.3). If there are
// fewer blocks of tiles than resident CTAs (the seed requires N_TB >> N_SM), several CTAs divide a
// block's output channels, and each transforms the block's input.
Status PlanPkfShmem(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                    TimeTerms* terms);

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_PKF_PLAN_H_
