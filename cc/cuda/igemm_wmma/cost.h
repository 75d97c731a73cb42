// The terms of the predicted time of a tiled GEMM by mma.sync (cuda/common/predicted_time.h).
//
// One k-block of a CTA uses
//
//     tensor cores     tile_m * tile_n * tile_k multiply-adds
//     loads            the slowest of L2, of shared memory (the fragments that the warps read and the
//                      chunks that the copies write), and of the copies' issue
//
// A CTA also fills its pipeline and stores its outputs. The busiest SM determines the time.
#ifndef JAXCONV_CUDA_IGEMM_WMMA_COST_H_
#define JAXCONV_CUDA_IGEMM_WMMA_COST_H_

#include <cstdint>

#include "cuda/common/gpu.h"
#include "cuda/common/predicted_time.h"

namespace jaxconv::igemm_wmma {

// The model's inputs from an instance.
struct TileCost {
  int64_t tile_m = 0, tile_n = 0;
  int64_t tile_k_bytes = 0;  // of reduction in one stage
  int64_t warps_m = 0, warps_n = 0;
  int64_t ctas_per_sm = 1;
  int64_t products = 1;      // tensor-core products for one product of operands
  int64_t shared_bytes = 0;  // of one CTA
};

// The model's inputs from a problem divided into such tiles.
struct TiledWork {
  int64_t element_bytes = 2;
  int64_t ctas = 0;
  double blocks = 0;                             // k-blocks of a CTA, on average
  int64_t a_copy_bytes = 16, b_copy_bytes = 16;  // of one copy
  double dram_bytes = 0;                         // every tensor once
  double partial_bytes = 0;       // split-K: bytes that the slices write and the reduction reads
  bool unaligned_output = false;  // stored by pairs or single elements
};

// CTAs that an SM of the GPU holds at a time; 0 if none fits.
int64_t ResidentCtas(const TileCost& tile, const Gpu& gpu);

// The tile must fit on the GPU.
TimeTerms TermsOf(const TileCost& tile, const TiledWork& work, const Gpu& gpu);

}  // namespace jaxconv::igemm_wmma

#endif  // JAXCONV_CUDA_IGEMM_WMMA_COST_H_
