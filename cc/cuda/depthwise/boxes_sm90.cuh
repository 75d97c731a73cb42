// The boxes of direct_tma_sm90.cuh and wgrad_tma_sm90.cuh: tensor maps, copies and barriers. Also
// the launches of these kernels and of pairs_sm90.cuh.
#ifndef JAXCONV_CUDA_DEPTHWISE_BOXES_SM90_CUH_
#define JAXCONV_CUDA_DEPTHWISE_BOXES_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/common/halo_box.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/depthwise/params.h"
#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/tma_sm90.cuh"

namespace jaxconv::depthwise {

// The tensor map of boxes of `channels` channels: boxes of the gathered tensor or tiles of the
// walked one. `images`: the images of all filters.
inline Status EncodeBoxes(const Params& params, DType dtype, const void* address, int32_t channels,
                          int64_t images, bool walked, CUtensorMap* map) {
  DenseTensor tensor;
  tensor.dtype = dtype;
  tensor.rank = 5;
  tensor.address = address;
  tensor.extent[0] = walked ? params.channels : params.gathered_channels;
  int32_t box[5] = {channels, 1, 1, 1, params.tile_images};
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = params.axis[a];
    tensor.extent[3 - a] = walked ? axis.out : axis.in;
    box[3 - a] = walked ? axis.tile : axis.box;
  }
  tensor.extent[4] = images;
  return EncodeTiledMap(tensor, box, map, /*swizzled=*/false);
}

// Called by one thread before a CTA barrier. A stage is full when its bytes have arrived, and empty
// when every warp has read it.
__device__ __forceinline__ void InitStages(uint32_t full, uint32_t empty, int32_t stages,
                                           int warps) {
  for (int32_t s = 0; s < stages; ++s) {
    BarrierInit(full + s * 8, 1);
    BarrierInit(empty + s * 8, warps);
  }
  BarrierInitFence();
}

// Copies the boxes of a tile's images; called by one thread.
__device__ __forceinline__ void CopyBoxes(const Params& params, const CUtensorMap* map,
                                          const TilePlace& tile, uint32_t shared,
                                          uint32_t barrier) {
  const Axis &depths = params.axis[0], &rows = params.axis[1], &columns = params.axis[2];
  CopyTile5d(shared, map, barrier, tile.first_channel,
             (tile.column * columns.stride - columns.pad) >> columns.halved,
             (tile.row * rows.stride - rows.pad) >> rows.halved,
             tile.depth * depths.stride - depths.pad, tile.image);
}

// The parameters of an fprop or dgrad.
inline Params GatherParams(const Plan& plan, const Operands& operands) {
  Params params = plan.As<LaunchParams>().kernel;
  params.filter = operands.rhs;
  params.out = operands.out;
  BindEpilogue(operands, &params.epilogue);
  return params;
}

// Enqueues a kernel that overlaps the end of the previous one.
template <auto kKernel, class... Maps>
Status LaunchWithMaps(const Plan& plan, const Params& params, unsigned threads, void* stream,
                      const Maps&... maps) {
  const auto& launch = plan.As<LaunchParams>();
  LaunchConfig config;
  config.grid = static_cast<unsigned>(launch.ctas);
  config.threads = threads;
  config.shared_bytes = launch.shared_bytes;
  config.overlaps = true;
  return Launch<kKernel>(plan.kernel->name, config, stream, params, maps...);
}

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_BOXES_SM90_CUH_
