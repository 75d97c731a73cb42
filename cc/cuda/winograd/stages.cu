#include <algorithm>
#include <cmath>

#include "cuda/common/launch.cuh"
#include "cuda/winograd/amax.cuh"
#include "cuda/winograd/filter_transform.cuh"
#include "cuda/winograd/input_transform.cuh"
#include "cuda/winograd/output_transform.cuh"
#include "cuda/winograd/stages.h"

namespace jaxconv::winograd {
namespace {

int64_t Blocks(int64_t extent, int64_t block) { return (extent + block - 1) / block; }

// body(m, element of the operands): both as compile-time constants. No form of F(6x6) takes float32.
template <int m>
using Size = std::integral_constant<int, m>;
template <typename Body>
Status ForTile(const LaunchParams& launch, Body body) {
  return launch.m == 2 ? body(Size<2>()) : launch.m == 4 ? body(Size<4>()) : body(Size<6>());
}
template <typename Body>
Status ForTileAndType(const LaunchParams& launch, Body body) {
  return ForTile(launch, [&](auto m) {
    if constexpr (m() < 6) {
      if (launch.dtype == DType::kF32) return body(m, float());
    }
    return launch.dtype == DType::kF16 ? body(m, __half()) : body(m, __nv_bfloat16());
  });
}

// Pairs of channels of a block: 32, a line of float16, or the fewer and wider blocks, of whole
// 16 bytes, that leave the fewest lanes without channels.
int32_t PairsOfBlock(int32_t channels) {
  const int32_t all = channels / 2;
  int32_t best = std::min(all, 32);
  for (int32_t pairs = best; pairs >= 16; pairs -= 4) {
    if (Blocks(all, pairs) * pairs < Blocks(all, best) * best) best = pairs;
  }
  return best;
}

LaunchConfig TransformGrid(int32_t channels, int32_t tiles, int threads, FastDivmod* pairs) {
  const int32_t of_block = PairsOfBlock(channels);
  *pairs = FastDivmod(of_block);
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(Blocks(int64_t{tiles} * of_block, threads)),
                     static_cast<unsigned>(Blocks(channels / 2, of_block)));
  config.threads = threads;
  return config;
}

AmaxTensor DescribeAmax(const void* tensor, int64_t bytes, const ScaleSource& scale) {
  return {static_cast<const uint4*>(tensor), bytes / 16, const_cast<uint32_t*>(scale.partials)};
}

// Of the input, and of the filter unless it is prepared.
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
  const char* name = "winograd amax";
  if (launch.dtype == DType::kF32) return Launch<AmaxKernel<float>>(name, config, stream, params);
  if (launch.dtype == DType::kF16) return Launch<AmaxKernel<__half>>(name, config, stream, params);
  return Launch<AmaxKernel<__nv_bfloat16>>(name, config, stream, params);
}

// Of the input, and of the filter behind it unless that is prepared.
Status ClearMaxima(const LaunchParams& launch, const StagePointers& at, void* stream) {
  ClearMaximaParams params;
  params.maxima = const_cast<uint32_t*>(at.input_scale.partials);
  params.count = launch.prepared ? kMaxPartials : 2 * kMaxPartials;
  LaunchConfig config;
  config.grid = 1;
  config.threads = kClearThreads;
  return Launch<ClearMaximaKernel<kClearThreads>>("winograd clear maxima", config, stream, params);
}

template <int m, bool kOneDimensional, typename T>
Status LaunchFilterTransform(const LaunchParams& launch, const StagePointers& at, void* stream) {
  const Geometry& g = launch.geometry;
  FilterTransformParams params;
  params.filter = launch.filter;
  if (launch.measured()) {
    params.maxima = const_cast<uint32_t*>(at.filter_scale.partials);
  } else {
    params.scale = at.filter_scale;
  }
  params.w = at.filter;
  params.u = static_cast<__half*>(const_cast<void*>(at.u));
  params.red = g.red;
  params.cols = g.cols;
  params.u_point = int64_t{g.out_channels()} * g.red;
  params.row_filter = RowFilter(launch.points(), g.cols, g.red);
  params.u_group = params.row_filter.elements();
  const int64_t red_blocks = Blocks(g.red, kFilterReds), col_blocks = Blocks(g.cols, kFilterCols);
  params.red_blocks = FastDivmod(red_blocks);
  params.col_blocks = FastDivmod(col_blocks);
  LaunchConfig config;
  config.grid = static_cast<unsigned>(red_blocks * col_blocks * g.groups);
  config.threads = kFilterThreads;
  if (launch.filter.col == 1) {
    return Launch<FilterTransformKernel<m, kOneDimensional, T, true>>("winograd filter transform",
                                                                      config, stream, params);
  }
  return Launch<FilterTransformKernel<m, kOneDimensional, T, false>>("winograd filter transform",
                                                                     config, stream, params);
}

template <int m, typename Out>
Status LaunchOutputTransform(const LaunchParams& launch, const LaunchConfig& config,
                             const OutputTransformParams& params, void* stream) {
  const char* name = "winograd output transform";
  if (!launch.half_products) {
    return Launch<OutputTransformKernel<m, Out, float>>(name, config, stream, params);
  }
  if constexpr (m == 2) {
    return Status::Internal("no form of F(2x2) has float16 products");
  } else {
    return Launch<OutputTransformKernel<m, Out, __half>>(name, config, stream, params);
  }
}

}  // namespace

StagePointers Locate(const LaunchParams& launch, const Operands& operands) {
  char* const workspace = static_cast<char*>(operands.workspace);
  const Workspace& parts = launch.workspace;
  StagePointers at;
  at.input = operands.lhs;
  at.filter = operands.rhs;
  at.output = operands.out;
  at.u = launch.prepared ? static_cast<const char*>(operands.rhs) + kWinogradRecordBytes
                         : workspace + parts.u;
  at.v = workspace + parts.v;
  at.m = workspace + parts.m;
  if (launch.scaled()) {
    at.input_scale.partials = reinterpret_cast<const uint32_t*>(workspace + parts.input_partials);
  }
  if (launch.prepared) {
    at.filter_scale.value = static_cast<const float*>(operands.rhs) + (launch.measured() ? 1 : 0);
  } else if (launch.scaled()) {
    at.filter_scale.partials = reinterpret_cast<const uint32_t*>(workspace + parts.filter_partials);
  }
  return at;
}

Products ProductsOf(const LaunchParams& launch, const StagePointers& at, int32_t tiles) {
  const Geometry& g = launch.geometry;
  return {g,
          at.v,
          at.u,
          launch.half_products ? nullptr : static_cast<float*>(at.m),
          launch.half_products ? at.m : nullptr,
          std::ldexp(1.0f, -ProductExponent(g.red)),
          launch.measured() ? at.input_scale : ScaleSource(),
          launch.measured() ? at.filter_scale : ScaleSource(),
          launch.points(),
          tiles,
          int64_t{launch.chunk_tiles} * g.in_channels(),
          int64_t{g.out_channels()} * g.red,
          int64_t{launch.chunk_tiles} * g.out_channels()};
}

Status LaunchFilterStage(const LaunchParams& launch, const StagePointers& at, void* stream) {
  if (launch.measured()) {
    JAXCONV_RETURN_IF_ERROR(ClearMaxima(launch, at, stream));
  } else if (launch.scaled()) {
    JAXCONV_RETURN_IF_ERROR(LaunchAmax(launch, at, stream));
  }
  if (launch.prepared) return {};
  return ForTileAndType(launch, [&](auto m, auto element) {
    using Element = decltype(element);
    if constexpr (!std::is_same_v<Element, float>) {
      if (launch.one_dimensional) {
        return LaunchFilterTransform<m, true, Element>(launch, at, stream);
      }
    }
    return LaunchFilterTransform<m, false, Element>(launch, at, stream);
  });
}

Status LaunchInputStage(const LaunchParams& launch, const StagePointers& at, int32_t first_tile,
                        int32_t tiles, void* stream) {
  InputTransformParams params;
  params.geometry = launch.geometry;
  if (launch.measured()) {
    params.maxima = const_cast<uint32_t*>(at.input_scale.partials);
  } else {
    params.scale = at.input_scale;
  }
  params.x = at.input;
  params.v = static_cast<__half*>(at.v);
  params.v_point = int64_t{launch.chunk_tiles} * launch.geometry.in_channels();
  params.first_tile = first_tile;
  params.tiles = tiles;
  const LaunchConfig config =
      TransformGrid(launch.geometry.in_channels(), tiles, kInputThreads, &params.pairs);
  return ForTileAndType(launch, [&](auto m, auto element) {
    return Launch<InputTransformKernel<m, decltype(element)>>("winograd input transform", config,
                                                              stream, params);
  });
}

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
  const LaunchConfig config =
      TransformGrid(launch.geometry.out_channels(), tiles, kOutputThreads, &params.pairs);
  if (launch.out_is_f32) {
    return ForTile(launch, [&](auto m) {
      return LaunchOutputTransform<m, float>(launch, config, params, stream);
    });
  }
  return ForTileAndType(launch, [&](auto m, auto element) {
    return LaunchOutputTransform<m, decltype(element)>(launch, config, params, stream);
  });
}

}  // namespace jaxconv::winograd
