#include "cuda/kernels/igemm_wmma_patch.cuh"

namespace jaxconv {
template Status LaunchPatch<DType::kBF16, PatchTileId::kWgrad32>(const PatchParams&, int64_t,
                                                                 int64_t, int64_t, void*);
template Status LaunchPatch<DType::kBF16, PatchTileId::kWgrad64>(const PatchParams&, int64_t,
                                                                 int64_t, int64_t, void*);
template Status LaunchPatch<DType::kBF16, PatchTileId::kWgrad192>(const PatchParams&, int64_t,
                                                                  int64_t, int64_t, void*);
}  // namespace jaxconv
