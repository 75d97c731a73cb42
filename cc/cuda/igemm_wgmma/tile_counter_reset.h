// Resets the counters of dynamic scheduling.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_TILE_COUNTER_RESET_H_
#define JAXCONV_CUDA_IGEMM_WGMMA_TILE_COUNTER_RESET_H_

#include <cstdint>

#include "core/status.h"

namespace jaxconv::igemm_wgmma {

// Sets kTileCounters counters to 0 before the next kernel in the stream uses them.
Status LaunchTileCounterReset(int32_t* counters, void* stream);

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_TILE_COUNTER_RESET_H_
