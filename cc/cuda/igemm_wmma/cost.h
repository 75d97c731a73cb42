// Predicted time of a tiled GEMM on tensor cores: the slowest of four resources, times the waves.
//
// One k-block of a CTA's mainloop uses four resources, each with its own throughput:
//
//     tensor cores     tile_m * tile_n * tile_k multiply-adds
//     shared memory    the fragments that the warps read and the chunks that the copies write
//     L2               (tile_m + tile_n) * tile_k elements into this SM
//     DRAM             every tensor once, for all SMs together
//
// The slowest limits the mainloop, and an instance reaches a measured share of that limit. A CTA
// also fills its pipeline and writes its outputs. The busiest SM determines the time. The constants
// were fitted to 1200 timings of all instances on an H200 (docs/notes/igemm_wmma.md).
#ifndef JAXCONV_CUDA_IGEMM_WMMA_COST_H_
#define JAXCONV_CUDA_IGEMM_WMMA_COST_H_

#include <cstdint>

#include "cuda/common/gpu.h"

namespace jaxconv::igemm_wmma {

// The model's inputs from an instance.
struct TileCost {
  int64_t tile_m = 0, tile_n = 0;
  int64_t tile_k_bytes = 0;  // of reduction in one stage
  int64_t warps_m = 0, warps_n = 0;
  int64_t ctas_per_sm = 1;
  int64_t products = 1;      // tensor-core products for one product of operands
  int64_t shared_bytes = 0;  // of one CTA
  // The share of its throughput limit that the instance reaches on a full SM: in fprop and dgrad,
  // in wgrad.
  double gather_share = 1, wgrad_share = 1;
};

// The model's inputs from a problem divided into such tiles.
struct TiledWork {
  bool wgrad = false;
  int64_t element_bytes = 2;
  int64_t ctas = 0;
  double blocks = 0;              // k-blocks of a CTA, on average
  double dram_bytes = 0;          // every tensor once
  double partial_bytes = 0;       // split-K: bytes that the slices write and the reduction reads
  bool unaligned_output = false;  // stored by pairs or single elements
};

// CTAs that an SM of the GPU holds at a time; 0 if none fits.
int64_t ResidentCtas(const TileCost& tile, const Gpu& gpu);

// The tile must fit on the GPU.
double PredictMicroseconds(const TileCost& tile, const TiledWork& work, const Gpu& gpu);

}  // namespace jaxconv::igemm_wmma

#endif  // JAXCONV_CUDA_IGEMM_WMMA_COST_H_
