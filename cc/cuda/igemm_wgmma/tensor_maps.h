// The tensor maps of igemm_wgmma. Every launch makes them (0.1 us each), so none can be stale.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_TENSOR_MAPS_H_
#define JAXCONV_CUDA_IGEMM_WGMMA_TENSOR_MAPS_H_

#include <cuda.h>

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/igemm_wgmma/params.h"

namespace jaxconv::igemm_wgmma {

struct Maps {
  CUtensorMap a[kMaxResidueClasses];
  CUtensorMap b;
  CUtensorMap out;       // swap-AB pointwise with 16-bit results
  CUtensorMap residual;  // pointwise with a fused epilogue
};

// Boxes of `pixels` pixels by 128 bytes of channels for every residue class: im2col, or of a
// matrix. `whole_f32`: float32 elements are not rounded to TF32.
Status EncodeActivations(const LaunchParams& launch, DType dtype, const void* a, int32_t pixels,
                         Maps* maps, bool whole_f32 = false);
// Boxes of 64 rows by 128 bytes of the filter; wgrad: 64 pixels by 64 channels of dy.
Status EncodeFilter(const LaunchParams& launch, DType dtype, const void* b, Maps* maps,
                    bool whole_f32 = false);

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_TENSOR_MAPS_H_
