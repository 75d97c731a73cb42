// The parameter block of igemm_wmma. Plain data, made on the host without CUDA headers.
#ifndef JAXCONV_CUDA_IGEMM_WMMA_PARAMS_H_
#define JAXCONV_CUDA_IGEMM_WMMA_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "core/implicit_gemm.h"
#include "cuda/common/epilogue_params.h"

namespace jaxconv::igemm_wmma {

// The most taps of a stride residue class in the shared-memory table of kernels with a compile-time
// copy width: 7x7 and 4x4x4 fit.
inline constexpr int kMaxTableTaps = 64;

// The kernel's parameters. A launch sets the pointers.
struct Params {
  ImplicitGemm gemm;
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  int32_t out_is_f32 = 0;  // else the operand type
  int32_t out_vector = 0;  // rows of the output are aligned to 16 bytes and a multiple of them
  // Bytes of one copy: 16, 8, 4 or 2, the most that the channel counts allow.
  int32_t a_copy_bytes = 16, b_copy_bytes = 16;
  // Whether there is one residue class with all the filter's taps in order, so that the filter is
  // one matrix.
  int32_t all_taps = 1;
  // A one-dimensional grid: n tiles fastest, so that neighbours share their rows of A; then
  // m tiles, split-K slices, batch * groups, stride residue classes (the ones with most taps
  // first).
  FastDivmod n_tiles, m_tiles, slices, batch_groups;
  int32_t blocks_per_slice = 0;  // k-blocks of one slice
  int64_t slice_elements = 0;    // of one slice's partial result; 0: the output itself is written
  EpilogueParams epilogue;
};

// The parameter block of a plan: the kernel's parameters and the launch configuration.
struct LaunchParams {
  Params kernel;
  int64_t ctas = 0;
  DType out_dtype = DType::kF32;
};

}  // namespace jaxconv::igemm_wmma

#endif  // JAXCONV_CUDA_IGEMM_WMMA_PARAMS_H_
