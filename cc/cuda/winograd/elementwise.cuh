// The products of the Winograd domain element by element, on CUDA cores (seeds/004, algorithm 1):
// the lower baseline of the batched GEMMs.
//
//     for c:  M[i, j][tile][k] += V[i, j][tile][c] U[i, j][k][c]    for all points (i, j)
//
// A thread has one tile and one output channel, with the sums of all points; it uses each loaded
// operand for one product. CTA: 8 tiles x 16 output channels, a warp 4 x 8, so that L1 serves the
// lines that threads share: a warp loads 4 rows of V and 8 of U for a point, 16 bytes each.
//
// A product of 2 FLOP loads 4 bytes into registers: 0.5 FLOP/B, against (TB_M TB_N) / (TB_M + TB_N)
// of sync_free.cuh. 8 loaded channels take 16 conversions to float32 and 8 FMA.
//
// Shared memory: none. Registers: 16 sums, and the loads in flight. No barrier. Refuses:
// channels of a group that are not multiples of 8.
#ifndef JAXCONV_CUDA_WINOGRAD_ELEMENTWISE_CUH_
#define JAXCONV_CUDA_WINOGRAD_ELEMENTWISE_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/winograd/element_pair.cuh"
#include "cuda/winograd/four_stage.cuh"
#include "cuda/winograd/products_params.h"

namespace jaxconv::winograd {

inline constexpr int kElementwiseTiles = 8, kElementwiseColumns = 16;
inline constexpr int kElementwiseThreads = kElementwiseTiles * kElementwiseColumns;

// sum + the products of eight channels, in their order.
__device__ __forceinline__ float AddProducts(const uint4& v, const uint4& u, float sum) {
  const uint32_t words[2][4] = {{v.x, v.y, v.z, v.w}, {u.x, u.y, u.z, u.w}};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(ElementOfPair<__half, 0>(words[0][i]), ElementOfPair<__half, 0>(words[1][i]), sum);
    sum = fmaf(ElementOfPair<__half, 1>(words[0][i]), ElementOfPair<__half, 1>(words[1][i]), sum);
  }
  return sum;
}

template <class Tag>
__global__ void __launch_bounds__(kElementwiseThreads, Tag::kCtasPerSm)
    ElementwiseKernel(const __grid_constant__ ProductsParams params) {
  constexpr int kPoints = Tag::kPoints;
  int32_t block = blockIdx.x, column_block, group;
  params.column_blocks.Divmod(block, &block, &column_block);
  params.groups.Divmod(block, &block, &group);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t tile = block * kElementwiseTiles + warp / 2 * 4 + lane / 8;
  const int32_t column = column_block * kElementwiseColumns + warp % 2 * 8 + lane % 8;
  if (tile >= params.tiles || column >= params.cols) return;

  const __half* v = static_cast<const __half*>(params.v) + int64_t{tile} * params.v_row +
                    int64_t{group} * params.reduction;
  const __half* u = static_cast<const __half*>(params.u) +
                    (int64_t{group} * params.cols + column) * params.reduction;
  float sum[kPoints] = {};
#pragma unroll 1
  for (int32_t r = 0; r < params.reduction; r += 8) {
#pragma unroll
    for (int p = 0; p < kPoints; ++p) {
      sum[p] = AddProducts(__ldg(reinterpret_cast<const uint4*>(v + p * params.v_point)),
                           __ldg(reinterpret_cast<const uint4*>(u + p * params.u_point)), sum[p]);
    }
    v += 8;
    u += 8;
  }
  float* m = params.m + int64_t{tile} * params.m_row + int64_t{group} * params.cols + column;
#pragma unroll
  for (int p = 0; p < kPoints; ++p) m[p * params.m_point] = sum[p];
}

template <Op kOp, DType kType, int m>
struct Elementwise {
  static constexpr int kPoints = (m + 2) * (m + 2);
  static constexpr int kCtasPerSm = 3;  // more would spill the loads in flight

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return RunFourStage(plan, operands, stream, [&](const Products& products) {
      const ProductsParams params =
          DescribeProducts(products, kElementwiseTiles, kElementwiseColumns);
      LaunchConfig config;
      config.grid = static_cast<unsigned>(params.ctas);
      config.threads = kElementwiseThreads;
      return jaxconv::Launch<ElementwiseKernel<Tag>>(plan.kernel->name, config, stream, params);
    });
  }
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_ELEMENTWISE_CUH_
