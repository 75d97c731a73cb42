#include "cuda/common/tensor_map.h"
#include "cuda/igemm_wgmma/geometry.h"
#include "cuda/igemm_wgmma/tensor_maps.h"

namespace jaxconv::igemm_wgmma {

Status EncodeActivations(const LaunchParams& launch, DType dtype, const void* a, int32_t pixels,
                         Maps* maps, bool whole_f32) {
  const Params& params = launch.kernel;
  DenseTensor tensor;
  tensor.dtype = dtype;
  tensor.whole_f32 = whole_f32;
  tensor.address = a;
  tensor.extent[0] = launch.a_channels;
  if (params.rank == 0) {
    tensor.rank = 2;
    tensor.extent[1] =
        launch.a_images * launch.a_extent[0] * launch.a_extent[1] * launch.a_extent[2];
    const int32_t box[2] = {static_cast<int32_t>(KBlockElements(dtype)), pixels};
    return EncodeTiledMap(tensor, box, &maps->a[0]);
  }
  tensor.rank = params.rank + 2;
  for (int axis = 0; axis < params.rank; ++axis) tensor.extent[axis + 1] = launch.a_extent[axis];
  tensor.extent[params.rank + 1] = launch.a_images;
  for (int i = 0; i < params.residue_classes; ++i) {
    JAXCONV_RETURN_IF_ERROR(EncodeIm2colMap(tensor, params.residue_class[i].lower,
                                            launch.a_upper[i], params.src_step, pixels,
                                            &maps->a[i]));
  }
  return {};
}

Status EncodeFilter(const LaunchParams& launch, DType dtype, const void* b, Maps* maps,
                    bool whole_f32) {
  DenseTensor tensor;
  tensor.dtype = dtype;
  tensor.whole_f32 = whole_f32;
  tensor.rank = 3;
  tensor.address = b;
  tensor.extent[0] = launch.b_columns;
  tensor.extent[1] = launch.b_rows;
  tensor.extent[2] = launch.b_taps;
  tensor.stride[1] = launch.b_row_stride;
  tensor.stride[2] = launch.b_tap_stride;
  const int32_t box[3] = {static_cast<int32_t>(KBlockElements(dtype)), 64, 1};
  return EncodeTiledMap(tensor, box, &maps->b);
}

}  // namespace jaxconv::igemm_wgmma
