// The parameter block of igemm_simt. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_IGEMM_SIMT_PARAMS_H_
#define JAXCONV_CUDA_IGEMM_SIMT_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "core/implicit_gemm.h"
#include "cuda/common/epilogue_params.h"

namespace jaxconv::igemm_simt {

// Reduction indices of one shared-memory stage. 8 keeps the two staged quads of a thread at 8
// registers and still gives 512 FMAs between barriers.
inline constexpr int kTileK = 8;

// The kernel's parameters. A launch sets the pointers.
struct Params {
  ImplicitGemm gemm;
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  int32_t out_is_f32 = 1;  // else the operand type
  // The grid is one-dimensional, because gridDim.y and .z end at 65535. n tiles run fastest, so
  // that neighbours share their rows of A; then m tiles, then
  //     fprop, dgrad   batch * groups, stride residue classes (the ones with most taps first)
  //     wgrad          split-K slices, batch * groups
  FastDivmod n_tiles, m_tiles, batch_groups, slices;
  uint32_t b_step_bytes = 0;  // fprop, dgrad: bytes of B from one stage to the next within a tap
  // wgrad: k-blocks of kTileK pixels in a slice, and the elements of a slice's partial result (0:
  // the slice writes the output).
  int32_t blocks_per_slice = 0;
  int64_t slice_elements = 0;
  EpilogueParams epilogue;
};

// The parameter block of a plan: the kernel's parameters and the launch configuration.
struct LaunchParams {
  Params kernel;
  int64_t ctas = 0;
  DType out_dtype = DType::kF32;
};

}  // namespace jaxconv::igemm_simt

#endif  // JAXCONV_CUDA_IGEMM_SIMT_PARAMS_H_
