#include "cuda/kernels/igemm_wmma_patch.cuh"

namespace jaxconv {
template Status LaunchPatch<DType::kBF16, PatchTileId::kFprop>(const PatchParams&, int64_t, int64_t,
                                                               int64_t, void*);
}  // namespace jaxconv
