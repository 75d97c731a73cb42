#include "cuda/kernels/igemm_simt.cuh"

namespace jaxconv {
template Status LaunchIgemmSimt<Op::kFprop, DType::kF32>(SimtTileId, const IgemmParams&, int64_t,
                                                         void*);
}  // namespace jaxconv
