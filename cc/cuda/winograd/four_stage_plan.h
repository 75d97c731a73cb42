// The plans of the four-stage forms: filter, input, products and output are separate kernels.
#ifndef JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_PLAN_H_

#include "cuda/winograd/form_plan.h"

namespace jaxconv::winograd {

// All tiles at once; V and M lie in DRAM.
Status PlanFourStage(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                     TimeTerms* terms);
// The same with the persistent GEMM of batched_gemm_pingpong_sm90.cuh.
Status PlanPingpong(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                    TimeTerms* terms);
// The same with M in float16.
Status PlanPingpongHalf(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                        TimeTerms* terms);
// In chunks of tiles whose V and M stay in L2 between the stages.
Status PlanChunked(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                   TimeTerms* terms);

// Sets the tiles of a chunk whose V and M fit in `bytes`: all, or a multiple of tile_m. Refuses if
// tile_m tiles do not fit.
Status PlaceChunks(int64_t tile_m, int64_t bytes, LaunchParams* launch);

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_PLAN_H_
