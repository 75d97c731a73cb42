#include "cuda/kernels/igemm_simt.cuh"

namespace jaxconv {
template Status LaunchIgemmSimt<Op::kDgrad, DType::kBF16>(SimtTileId, const IgemmParams&, int64_t,
                                                          void*);
}  // namespace jaxconv
