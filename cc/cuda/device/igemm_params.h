// The parameters of an implicit-GEMM kernel. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_DEVICE_IGEMM_PARAMS_H_
#define JAXCONV_CUDA_DEVICE_IGEMM_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "core/implicit_gemm.h"

namespace jaxconv {

struct IgemmParams {
  ImplicitGemm gemm;
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  int32_t out_is_f32 = 1;  // else the operand type
  // The grid is one-dimensional, because gridDim.y and .z end at 65535. n tiles run fastest, so
  // that neighbours share their rows of A; then m tiles, then
  //     fprop, dgrad   batch * groups, phases (the ones with most taps first)
  //     wgrad          split-K slices, batch * groups
  FastDivmod n_tiles, m_tiles, batch_groups, slices;
  uint32_t b_step_bytes = 0;  // fprop, dgrad: of B from one stage to the next inside a tap
  // wgrad: kSimtTileK-pixel blocks of one slice, and the elements of one slice's partial result.
  int32_t blocks_per_slice = 0;
  int64_t slice_elements = 0;
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_DEVICE_IGEMM_PARAMS_H_
