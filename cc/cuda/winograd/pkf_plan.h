// The plan of pkf_shmem.cuh: V in shared memory, M in registers.
#ifndef JAXCONV_CUDA_WINOGRAD_PKF_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_PKF_PLAN_H_

#include "cuda/winograd/form_plan.h"

namespace jaxconv::winograd {

// Refuses a problem of which V of a CTA's tiles, all channels of a group, and the exchange exceed
// the GPU's shared memory of a CTA (the seed's V_e alpha^2 TB_M TB_K <= V_Shmem, seeds/004, 4.3).
// Where there are fewer blocks of tiles than the GPU runs CTAs at a time (the seed asks for N_TB >>
// N_SM), a block's output channels are shared out among CTAs, each of which transforms the block's
// input.
Status PlanPkfShmem(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                    double* microseconds);

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_PKF_PLAN_H_
