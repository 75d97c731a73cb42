// Launches of the stages, for two translation units: stages.cu, for every GPU, and stages_sm90.cu,
// whose kernels overlap their neighbours in the stream (common/launch.cuh).
#ifndef JAXCONV_CUDA_WINOGRAD_LAUNCH_STAGES_CUH_
#define JAXCONV_CUDA_WINOGRAD_LAUNCH_STAGES_CUH_

#include <algorithm>
#include <cmath>

#include "cuda/common/launch.cuh"
#include "cuda/winograd/amax.cuh"
#include "cuda/winograd/filter_transform.cuh"
#include "cuda/winograd/input_transform.cuh"
#include "cuda/winograd/output_transform.cuh"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {
namespace stages_internal {

inline int64_t Blocks(int64_t extent, int64_t block) { return (extent + block - 1) / block; }

// Calls body(m, element of the operands), both as compile-time constants. F(6x6) exists for sm_90a
// only, without float32.
template <int m>
using Size = std::integral_constant<int, m>;
template <typename Body>
Status ForTile(const LaunchParams& launch, Body body) {
  return launch.m == 2 ? body(Size<2>()) : launch.m == 4 ? body(Size<4>()) : body(Size<6>());
}
template <bool kOverlaps, typename Body>
Status ForTileAndType(const LaunchParams& launch, Body body) {
  return ForTile(launch, [&](auto m) {
    if constexpr (m() < 6 && kOverlaps) {
      if (launch.dtype == DType::kF32) return body(m, float());
    }
    return launch.dtype == DType::kF16 ? body(m, __half()) : body(m, __nv_bfloat16());
  });
}

// Pairs of channels in a block: 32 (a line of float16), or wider blocks of a multiple of 16 bytes
// if they leave fewer lanes without channels.
inline int32_t PairsOfBlock(int32_t channels) {
  const int32_t all = channels / 2;
  int32_t best = std::min(all, 32);
  for (int32_t pairs = best; pairs >= 16; pairs -= 4) {
    if (Blocks(all, pairs) * pairs < Blocks(all, best) * best) best = pairs;
  }
  return best;
}

inline LaunchConfig TransformGrid(int32_t channels, int32_t tiles, int threads, FastDivmod* pairs,
                                  FastDivmod* channel_blocks) {
  const int32_t of_block = PairsOfBlock(channels);
  *pairs = FastDivmod(of_block);
  *channel_blocks = FastDivmod(Blocks(channels / 2, of_block));
  LaunchConfig config;
  // Below 2^31, because the pairs of channels of all tiles are, and a CTA has up to 128 of them.
  config.grid =
      static_cast<unsigned>(Blocks(int64_t{tiles} * of_block, threads) * channel_blocks->divisor);
  config.threads = threads;
  return config;
}

inline AmaxTensor DescribeAmax(const void* tensor, int64_t bytes, const ScaleSource& scale) {
  return {static_cast<const uint4*>(tensor), bytes / 16, const_cast<uint32_t*>(scale.partials)};
}

// For the input, and for the filter unless it is prepared.
template <bool kOverlaps>
Status LaunchAmax(const LaunchParams& launch, const StagePointers& at, void* stream) {
  AmaxParams params;
  params.tensor[0] =
      DescribeAmax(at.input, launch.in_elements * launch.element_bytes(), at.input_scale);
  LaunchConfig config;
  config.grid = kMaxPartials;
  config.threads = kAmaxThreads;
  if (!launch.prepared) {
    params.tensor[1] =
        DescribeAmax(at.filter, launch.filter_elements * launch.element_bytes(), at.filter_scale);
    config.grid.y = 2;
  }
  config.overlaps = kOverlaps;
  const char* name = "winograd amax";
  if (launch.dtype == DType::kF32) {
    return Launch<AmaxKernel<float, kOverlaps>>(name, config, stream, params);
  }
  return Launch<AmaxKernel<__nv_bfloat16, kOverlaps>>(name, config, stream, params);
}

// For the input, then for the filter unless it is prepared.
template <bool kOverlaps>
Status ClearMaxima(const LaunchParams& launch, const StagePointers& at, void* stream) {
  ClearMaximaParams params;
  params.maxima = const_cast<uint32_t*>(at.input_scale.partials);
  params.count = launch.prepared ? kMaxPartials : 2 * kMaxPartials;
  LaunchConfig config;
  config.grid = 1;
  config.threads = kClearThreads;
  config.overlaps = kOverlaps;
  return Launch<ClearMaximaKernel<kClearThreads, kOverlaps>>("winograd clear maxima", config,
                                                             stream, params);
}

inline FilterTransformParams DescribeFilterTransform(const LaunchParams& launch,
                                                     const StagePointers& at) {
  const Geometry& g = launch.geometry;
  FilterTransformParams params;
  params.filter = launch.filter;
  params.scale = at.filter_scale;
  if (launch.measured()) params.maxima = const_cast<uint32_t*>(at.filter_scale.partials);
  params.w = at.filter;
  params.u = static_cast<__half*>(const_cast<void*>(at.u));
  params.red = g.red;
  params.cols = g.cols;
  params.u_point = int64_t{g.out_channels()} * g.red;
  params.row_filter = RowFilter(launch.points(), g.cols, g.red);
  params.u_group = params.row_filter.elements();
  params.red_blocks = FastDivmod(Blocks(g.red, kFilterReds));
  params.col_blocks = FastDivmod(Blocks(g.cols, kFilterCols));
  return params;
}

inline LaunchConfig FilterGrid(const Geometry& g) {
  LaunchConfig config;
  config.grid =
      static_cast<unsigned>(Blocks(g.red, kFilterReds) * Blocks(g.cols, kFilterCols) * g.groups);
  config.threads = kFilterThreads;
  return config;
}

template <int m, bool kOneDimensional, typename T, bool kOverlaps>
Status LaunchFilterTransform(const LaunchParams& launch, const StagePointers& at, void* stream) {
  const FilterTransformParams params = DescribeFilterTransform(launch, at);
  LaunchConfig config = FilterGrid(launch.geometry);
  config.overlaps = kOverlaps;
  const char* name = "winograd filter transform";
  if (launch.filter.col == 1) {
    return Launch<FilterTransformKernel<m, kOneDimensional, T, true, kOverlaps>>(name, config,
                                                                                 stream, params);
  }
  return Launch<FilterTransformKernel<m, kOneDimensional, T, false, kOverlaps>>(name, config,
                                                                                stream, params);
}

inline InputTransformParams DescribeInputTransform(const LaunchParams& launch,
                                                   const StagePointers& at, int32_t first_tile,
                                                   int32_t tiles) {
  InputTransformParams params;
  params.geometry = launch.geometry;
  params.scale = at.input_scale;
  if (launch.measured()) params.maxima = const_cast<uint32_t*>(at.input_scale.partials);
  params.x = at.input;
  params.v = static_cast<__half*>(at.v);
  params.v_point = int64_t{launch.chunk_tiles} * launch.geometry.in_channels();
  params.first_tile = first_tile;
  params.tiles = tiles;
  params.behind_filter = !launch.prepared && first_tile == 0;
  return params;
}

template <int m, typename Out, bool kOverlaps>
Status LaunchOutputTransform(const LaunchParams& launch, const LaunchConfig& config,
                             const OutputTransformParams& params, void* stream) {
  const char* name = "winograd output transform";
  if (!launch.half_products) {
    return Launch<OutputTransformKernel<m, Out, float, kOverlaps>>(name, config, stream, params);
  }
  if constexpr (m == 2 || !kOverlaps) {
    return Status::Internal("no form of F(2x2), and none for all GPUs, has float16 products");
  } else {
    return Launch<OutputTransformKernel<m, Out, __half, kOverlaps>>(name, config, stream, params);
  }
}

}  // namespace stages_internal

template <bool kOverlaps>
Status LaunchFilterStage(const LaunchParams& launch, const StagePointers& at, void* stream) {
  if (launch.measured()) {
    JAXCONV_RETURN_IF_ERROR(stages_internal::ClearMaxima<kOverlaps>(launch, at, stream));
  } else if (launch.scaled()) {
    JAXCONV_RETURN_IF_ERROR(stages_internal::LaunchAmax<kOverlaps>(launch, at, stream));
  }
  if (launch.prepared) return {};
  return stages_internal::ForTileAndType<kOverlaps>(launch, [&](auto m, auto element) {
    using Element = decltype(element);
    if constexpr (!std::is_same_v<Element, float> && !kOverlaps) {
      if (launch.one_dimensional) {
        return stages_internal::LaunchFilterTransform<m, true, Element, kOverlaps>(launch, at,
                                                                                   stream);
      }
    }
    return stages_internal::LaunchFilterTransform<m, false, Element, kOverlaps>(launch, at, stream);
  });
}

template <bool kOverlaps>
Status LaunchInputStage(const LaunchParams& launch, const StagePointers& at, int32_t first_tile,
                        int32_t tiles, void* stream) {
  InputTransformParams params =
      stages_internal::DescribeInputTransform(launch, at, first_tile, tiles);
  LaunchConfig config = stages_internal::TransformGrid(
      launch.geometry.in_channels(), tiles, kInputThreads, &params.pairs, &params.channel_blocks);
  // The filter's transform stages float32 in shared memory; beside it, the L1 would stay small.
  const bool staged = params.behind_filter && launch.filter.col == 1;
  config.overlaps = kOverlaps && !(staged && launch.dtype == DType::kF32);
  return stages_internal::ForTileAndType<kOverlaps>(launch, [&](auto m, auto element) {
    return Launch<InputTransformKernel<m, decltype(element), kOverlaps>>("winograd input transform",
                                                                         config, stream, params);
  });
}

template <bool kOverlaps>
Status LaunchOutputStage(const LaunchParams& launch, const StagePointers& at, int32_t first_tile,
                         int32_t tiles, void* stream) {
  OutputTransformParams params;
  params.geometry = launch.geometry;
  params.input_scale = at.input_scale;
  params.filter_scale = at.filter_scale;
  params.m = at.m;
  params.m_scale = std::ldexp(1.0f, ProductExponent(launch.geometry.red));
  params.y = at.output;
  params.m_point = int64_t{launch.chunk_tiles} * launch.geometry.out_channels();
  params.first_tile = first_tile;
  params.tiles = tiles;
  LaunchConfig config = stages_internal::TransformGrid(
      launch.geometry.out_channels(), tiles, kOutputThreads, &params.pairs, &params.channel_blocks);
  config.overlaps = kOverlaps;
  if (launch.out_is_f32) {
    return stages_internal::ForTile(launch, [&](auto m) {
      return stages_internal::LaunchOutputTransform<m, float, kOverlaps>(launch, config, params,
                                                                         stream);
    });
  }
  return stages_internal::ForTileAndType<kOverlaps>(launch, [&](auto m, auto element) {
    return stages_internal::LaunchOutputTransform<m, decltype(element), kOverlaps>(launch, config,
                                                                                   params, stream);
  });
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_LAUNCH_STAGES_CUH_
