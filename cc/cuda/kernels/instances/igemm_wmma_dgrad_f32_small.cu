#include "cuda/kernels/igemm_wmma.cuh"

namespace jaxconv {
template Status LaunchIgemmWmma<Op::kDgrad, DType::kF32, WmmaTileId::k256x64>(
    const IgemmWmmaParams&, int64_t, void*);
template Status LaunchIgemmWmma<Op::kDgrad, DType::kF32, WmmaTileId::k128x64>(
    const IgemmWmmaParams&, int64_t, void*);
template Status LaunchIgemmWmma<Op::kDgrad, DType::kF32, WmmaTileId::k64x64>(const IgemmWmmaParams&,
                                                                             int64_t, void*);
}  // namespace jaxconv
