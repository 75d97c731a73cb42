// F(m x m, 3x3) of int8 operands in four stages, which communicate through memory:
//
//     x [n][h][w][C] -- V = B^T d B ----> V int8, a scale of each tile and point
//     w [K][3x3][C]  -- U = G g G^T ----> U int8, a scale of each output channel and point
//     V, U           -- products -------> M float16
//     M              -- Y = A^T M A ----> int32 sums -- epilogue --> y
//
// The products' epilogue multiplies a column's sums by u_scale and rounds them to float16; its 11
// bits add no visible error to the 8 bits of V and U. A power of two keeps them below 2^15. The
// output transform multiplies by the tile's scales.
//
// Bytes written and read for a tile and channel, with C = K: V 2 (m + 2)^2, M 4 (m + 2)^2; int32
// sums would double those of M.
//
// Refused, with a reason (plan.cc): groups, windows other than 3x3 of stride 1, channels that are
// no multiples of 32.
#ifndef JAXCONV_CUDA_WINOGRAD_INT8_FOUR_STAGE_SM90_CUH_
#define JAXCONV_CUDA_WINOGRAD_INT8_FOUR_STAGE_SM90_CUH_

#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/winograd_int8/params.h"
#include "cuda/winograd_int8/products_sm90.cuh"
#include "cuda/winograd_int8/transforms.cuh"

namespace jaxconv::winograd_int8 {

template <Op kOp, DType kType, int m>
struct FourStage {
  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<LaunchParams>();
    const char* const name = plan.kernel->name;
    char* const workspace = static_cast<char*>(operands.workspace);
    LaunchConfig config;

    FilterParams filter = launch.filter;
    filter.w = static_cast<const int8_t*>(operands.rhs);
    filter.u = reinterpret_cast<int8_t*>(workspace + launch.u);
    filter.u_scale = reinterpret_cast<float*>(workspace + launch.u_scale);
    config.grid = filter.rows.ctas();
    config.threads = filter.rows.threads();
    JAXCONV_RETURN_IF_ERROR(
        (jaxconv::Launch<FilterTransformKernel<Tag, m>>(name, config, stream, filter)));

    InputParams input = launch.input;
    input.x = static_cast<const int8_t*>(operands.lhs);
    input.v = reinterpret_cast<int8_t*>(workspace + launch.v);
    input.v_scale = reinterpret_cast<float*>(workspace + launch.v_scale);
    config.grid = input.rows.ctas();
    config.threads = input.rows.threads();
    JAXCONV_RETURN_IF_ERROR(
        (jaxconv::Launch<InputTransformKernel<Tag, m>>(name, config, stream, input)));

    ProductsParams products = launch.products;
    products.u_scale = filter.u_scale;
    products.m = workspace + launch.m;
    JAXCONV_RETURN_IF_ERROR(LaunchProducts<Tag>(name, products, input.v, filter.u, input.channels,
                                                launch.products_ctas, stream));

    OutputParams output = launch.output;
    BindRequantize(operands, &output.requantize);
    output.m = products.m;
    output.v_scale = input.v_scale;
    const int32_t tiles_of_cta = 2 * kOutputThreads / output.block_channels;
    config.grid = dim3((output.tiles + tiles_of_cta - 1) / tiles_of_cta,
                       output.columns / output.block_channels);
    config.threads = kOutputThreads;
    return jaxconv::Launch<OutputTransformKernel<Tag, m>>(name, config, stream, output);
  }
};

}  // namespace jaxconv::winograd_int8

#endif  // JAXCONV_CUDA_WINOGRAD_INT8_FOUR_STAGE_SM90_CUH_
