#include "cuda/kernels/igemm_wgmma_sm90.cuh"

namespace jaxconv {
template Status LaunchIgemmWgmma<Op::kFprop, DType::kF16, WgmmaTileId::k128x128Pingpong>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kFprop, DType::kF16, WgmmaTileId::k192x128Pingpong>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kFprop, DType::kF16, WgmmaTileId::k128x64Pingpong>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
}  // namespace jaxconv
