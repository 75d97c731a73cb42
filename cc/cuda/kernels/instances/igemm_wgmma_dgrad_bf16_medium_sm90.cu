#include "cuda/kernels/igemm_wgmma_sm90.cuh"

namespace jaxconv {
template Status LaunchIgemmWgmma<Op::kDgrad, DType::kBF16, WgmmaTileId::k128x192>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kDgrad, DType::kBF16, WgmmaTileId::k128x128>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
}  // namespace jaxconv
