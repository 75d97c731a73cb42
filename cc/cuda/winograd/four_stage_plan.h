// The plans of the four-stage forms: filter, input, products, output, each a kernel of its own.
#ifndef JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_PLAN_H_

#include "cuda/winograd/form_plan.h"

namespace jaxconv::winograd {

// All tiles at once: V and M in DRAM.
Status PlanFourStage(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                     double* microseconds);
// The same with the persistent GEMM of batched_gemm_pingpong_sm90.cuh.
Status PlanPingpong(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                    double* microseconds);
// The same with M in float16.
Status PlanPingpongHalf(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                        double* microseconds);
// In chunks of tiles whose V and M stay in L2 between the stages.
Status PlanChunked(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                   double* microseconds);

// The tiles of a chunk whose V and M fit `bytes`: all, or a multiple of tile_m. Refuses
// where not even tile_m tiles do.
Status PlaceChunks(int64_t tile_m, int64_t bytes, LaunchParams* launch);

// Bytes of V and M that move in the time of a byte of DRAM where a chunk's stay in L2, on an H200.
inline constexpr double kStoredL2Rate = 1.1;
// Of L2, what a chunk's V and M may take: kChunkBytes of 50 MB.
inline constexpr double kL2Share = 0.64;
// The rate at which V and M of a chunk move, in bytes of DRAM.
double StoredRate(const Gpu& gpu, const LaunchParams& launch);

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FOUR_STAGE_PLAN_H_
