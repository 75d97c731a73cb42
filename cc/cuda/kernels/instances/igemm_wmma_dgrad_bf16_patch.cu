#include "cuda/kernels/igemm_wmma_patch.cuh"

namespace jaxconv {
template Status LaunchPatch<DType::kBF16, PatchTileId::kDgrad16>(const PatchParams&, int64_t,
                                                                 int64_t, int64_t, void*);
template Status LaunchPatch<DType::kBF16, PatchTileId::kDgrad24>(const PatchParams&, int64_t,
                                                                 int64_t, int64_t, void*);
template Status LaunchPatch<DType::kBF16, PatchTileId::kDgrad48>(const PatchParams&, int64_t,
                                                                 int64_t, int64_t, void*);
}  // namespace jaxconv
