// Launches a form: pointers, tensor maps, the kernels before and after it.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_LAUNCH_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_LAUNCH_SM90_CUH_

#include <cstdint>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/merge_moments.h"
#include "cuda/common/splitk_reduce.cuh"
#include "cuda/igemm_wgmma/filter_split.h"
#include "cuda/igemm_wgmma/filter_transpose.h"
#include "cuda/igemm_wgmma/params.h"
#include "cuda/igemm_wgmma/tensor_maps.h"
#include "cuda/igemm_wgmma/tile_counter_reset.h"

namespace jaxconv::igemm_wgmma {

// encode(launch, params, a, b, &maps) fills the kernel's tensor maps. Tag has kThreads and
// kSharedBytes. `overlaps`: the kernel itself waits for the previous kernel.
template <auto kKernel, class Tag, class FormMaps, typename Encode>
Status LaunchWithMaps(const Plan& plan, const Operands& operands, void* stream, bool overlaps,
                      Encode encode) {
  const auto& launch = plan.As<LaunchParams>();
  char* const workspace = static_cast<char*>(operands.workspace);
  const auto partial = reinterpret_cast<float*>(workspace + launch.partial_offset);
  Params params = launch.kernel;
  const bool split = params.slice_elements > 0;
  params.out = split ? partial : operands.out;
  BindEpilogue(operands, &params.epilogue);
  if (launch.moments.slots > 0) {
    launch.moments.Bind(workspace + launch.moments_offset, &params.epilogue);
  }
  if (launch.resets_counters) {
    params.counters = reinterpret_cast<int32_t*>(workspace);
    JAXCONV_RETURN_IF_ERROR(LaunchTileCounterReset(params.counters, stream));
  }
  const void* b = operands.rhs;
  if (launch.transposes_filter) {
    JAXCONV_RETURN_IF_ERROR(LaunchFilterTranspose(b, launch.b_taps, launch.b_columns, launch.b_rows,
                                                  workspace, stream));
    b = workspace;
  }
  if (launch.filter_split.matrices > 0) {
    JAXCONV_RETURN_IF_ERROR(LaunchFilterSplit(b, launch.filter_split, workspace, stream));
    b = workspace;
  }
  FormMaps maps{};
  JAXCONV_RETURN_IF_ERROR(encode(launch, params, operands.lhs, b, &maps));
  LaunchConfig config;
  config.grid = launch.ctas;
  config.threads = Tag::kThreads;
  config.shared_bytes = Tag::kSharedBytes;
  config.cluster = params.cluster.divisor;
  config.overlaps = overlaps;
  JAXCONV_RETURN_IF_ERROR(Launch<kKernel>(plan.kernel->name, config, stream, params, maps));
  if (launch.moments.slots > 0) {
    return LaunchMergeMoments(launch.moments, launch.rows, workspace + launch.moments_offset,
                              operands.statistics, stream);
  }
  if (!split) return {};
  return ReduceSlices<typename Tag::Epilogue>(
      partial, launch.output_elements, launch.reduced_slices, params.out_channels, params.epilogue,
      operands.out, launch.output_is_f32 ? DType::kF32 : Tag::kType, stream);
}

// Launches a form whose operands are im2col boxes of Tag::kPixels and boxes of the filter.
// kWholeF32: TMA does not round float32 to TF32.
template <auto kKernel, class Tag, bool kWholeF32 = false>
Status LaunchForm(const Plan& plan, const Operands& operands, void* stream) {
  return LaunchWithMaps<kKernel, Tag, Maps>(
      plan, operands, stream, /*overlaps=*/true,
      [](const LaunchParams& launch, const Params&, const void* a, const void* b, Maps* maps) {
        JAXCONV_RETURN_IF_ERROR(
            EncodeActivations(launch, Tag::kType, a, Tag::kPixels, maps, kWholeF32));
        return EncodeFilter(launch, Tag::kType, b, maps);
      });
}

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_LAUNCH_SM90_CUH_
