// The tensor maps of imma_wgmma. Every launch makes them (0.1 us each), so none can be stale.
#ifndef JAXCONV_CUDA_IMMA_WGMMA_TENSOR_MAPS_H_
#define JAXCONV_CUDA_IMMA_WGMMA_TENSOR_MAPS_H_

#include <cuda.h>

#include <cstdint>

#include "core/status.h"
#include "cuda/common/kernel.h"
#include "cuda/imma_wgmma/params.h"

namespace jaxconv::imma_wgmma {

struct Maps {
  CUtensorMap x, filter;
};

// Boxes of tile_m pixels by one unit, and of tile_n rows by 128 bytes of the filter.
Status EncodeMaps(const LaunchParams& launch, const Operands& operands, int32_t tile_m,
                  int32_t tile_n, Maps* maps);

}  // namespace jaxconv::imma_wgmma

#endif  // JAXCONV_CUDA_IMMA_WGMMA_TENSOR_MAPS_H_
