// The plans of the four-stage forms: filter, input, products, output, each a kernel of its own.
#ifndef JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_PLAN_H_

#include "cuda/winograd/form_plan.h"

namespace jaxconv::winograd {

// All tiles at once: V and M in DRAM.
Status PlanFourStage(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                     double* microseconds);
// In chunks of tiles whose V and M stay in L2 between the stages.
Status PlanChunked(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                   double* microseconds);

// The tiles of a chunk whose V and M fit kChunkBytes: all, or a multiple of tile_m. Refuses
// where not even tile_m tiles do.
Status PlaceChunks(int64_t tile_m, LaunchParams* launch);

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_PLAN_H_
