// The instances of igemm_wgmma compiled with the fused epilogue, for the tests of its forms.
// Compiled for sm_90a.
#ifndef JAXCONV_TESTS_CC_FUSED_IGEMM_WGMMA_SM90_CUH_
#define JAXCONV_TESTS_CC_FUSED_IGEMM_WGMMA_SM90_CUH_

#include "cc/fused_epilogue.cuh"
#include "cuda/igemm_wgmma/cluster_sm90.cuh"
#include "cuda/igemm_wgmma/cooperative_sm90.cuh"
#include "cuda/igemm_wgmma/filter_row_sm90.cuh"
#include "cuda/igemm_wgmma/pingpong_sm90.cuh"
#include "cuda/igemm_wgmma/plan.h"
#include "cuda/igemm_wgmma/pointwise_sm90.cuh"
#include "cuda/igemm_wgmma/three_tf32_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_filter_row_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_mma_sync_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_three_tf32_sm90.cuh"

namespace jaxconv {

#define KERNEL(ops, types, variant, header, form, arguments, ...) \
  JAXCONV_FOR_EACH(ops, types, JAXCONV_FUSED_TAG, variant, igemm_wgmma, form, arguments)
#define PADDED(...)
#define FUSED(...)
#include "cuda/igemm_wgmma/kernels.def"

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_FUSED_IGEMM_WGMMA_SM90_CUH_
