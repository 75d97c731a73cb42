#include "cuda/common/tensor_map.h"
#include "cuda/imma_wgmma/tensor_maps.h"

namespace jaxconv::imma_wgmma {
namespace {

Status EncodeActivations(const LaunchParams& launch, const void* x, int32_t pixels,
                         CUtensorMap* map) {
  const Params& params = launch.kernel;
  DenseTensor tensor;
  tensor.dtype = DType::kS8;
  tensor.address = x;
  if (params.nchw32) {
    tensor.rank = 4;
    tensor.extent[0] = launch.extent[0];
    tensor.extent[1] = launch.extent[1];
    tensor.extent[2] = launch.channels / 32;
    tensor.extent[3] = launch.images;
    return EncodeNchw32Map(tensor, params.lower, launch.upper, params.step, pixels, map);
  }
  tensor.extent[0] = launch.channels;
  if (params.rank == 0) {
    tensor.rank = 2;
    tensor.extent[1] = launch.images * launch.extent[0] * launch.extent[1] * launch.extent[2];
    const int32_t box[2] = {params.unit_bytes, pixels};
    return EncodeTiledMap(tensor, box, map);
  }
  tensor.rank = params.rank + 2;
  for (int axis = 0; axis < params.rank; ++axis) tensor.extent[axis + 1] = launch.extent[axis];
  tensor.extent[params.rank + 1] = launch.images;
  return EncodeIm2colMap(tensor, params.lower, launch.upper, params.step, pixels, map,
                         params.unit_bytes);
}

// Rows 32 b + 8 t + 2 j + e of the filter as a tensor (bytes, e, t, j, b), so that a box has the
// order (j, t, e); the header of int8_sm90.cuh explains why. With swapped operands, rows 32 b + 16
// h + 2 g + e as (bytes, g, e, h, b): swap_ab_sm90.cuh.
Status EncodeFilter(const LaunchParams& launch, const void* w, int32_t rows, CUtensorMap* map) {
  DenseTensor tensor;
  tensor.dtype = DType::kS8;
  tensor.address = w;
  tensor.rank = 5;
  constexpr int kPlain[3] = {2, 4, 4}, kSwapped[3] = {8, 2, 2};
  constexpr int kPlainApart[3] = {1, 8, 2}, kSwappedApart[3] = {2, 1, 16};
  int32_t box[5] = {kKBlockBytes, 1, 1, 1, rows / 32};
  tensor.extent[0] = launch.filter_row;
  for (int i = 0; i < 3; ++i) {
    box[i + 1] = (launch.swap_ab ? kSwapped : kPlain)[i];
    tensor.extent[i + 1] = box[i + 1];
    tensor.stride[i + 1] = (launch.swap_ab ? kSwappedApart : kPlainApart)[i] * launch.filter_row;
  }
  tensor.extent[4] = launch.filters / 32;
  tensor.stride[4] = 32 * launch.filter_row;
  return EncodeTiledMap(tensor, box, map);
}

}  // namespace

Status EncodeMaps(const LaunchParams& launch, const Operands& operands, int32_t tile_m,
                  int32_t tile_n, Maps* maps) {
  JAXCONV_RETURN_IF_ERROR(EncodeActivations(launch, operands.lhs, tile_m, &maps->x));
  return EncodeFilter(launch, operands.rhs, tile_n, &maps->filter);
}

}  // namespace jaxconv::imma_wgmma
