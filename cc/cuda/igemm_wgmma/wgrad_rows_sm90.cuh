// The store of TF32 weight gradients whose A comes from registers (sm_90a): a lane's channels 2 g
// and 2 g + 1 are rows g and g + 8 of a fragment, so that it reads them as one pair.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_ROWS_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_ROWS_SM90_CUH_

#include <cstdint>

#include "cuda/common/epilogue.cuh"
#include "cuda/igemm_wgmma/params.h"
#include "cuda/igemm_wgmma/tile_walk.cuh"

namespace jaxconv::igemm_wgmma {

// Stores both rows of a lane: sums[4 j + 2 r + e] is row r, column 8 j + 2 t + e of the columns from
// n on. `row`: the filter's row of the lane's first channel; `rows`: how many of the two exist.
template <int kColumns, class Epilogue>
__device__ __forceinline__ void StoreWgradRows(const Params& params, const TilePlace& place,
                                               const float* sums, int32_t n,
                                               int32_t row, int rows, const Epilogue& epilogue) {
  float* const out = static_cast<float*>(params.out);
  const int32_t columns = params.gemm_n - n, column = threadIdx.x % 4 * 2;
  const int64_t at =
      place.OutputOffset(params, n) + int64_t{row} * params.out_channels + column;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r >= rows) break;
    const int64_t to = at + r * params.out_channels;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (j * 8 >= columns) break;
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        pair[e] = epilogue.template operator()<float>(
            sums[j * 4 + r * 2 + e],
            OutputPlace{to + j * 8 + e, row + r,
                        place.group * params.gemm_n + n + j * 8 + column + e,
                        /*inside=*/true});
      }
      *reinterpret_cast<float2*>(out + to + j * 8) = make_float2(pair[0], pair[1]);
    }
  }
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_ROWS_SM90_CUH_
