#include "cuda/kernels/igemm_wgmma_sm90.cuh"

namespace jaxconv {
template Status LaunchIgemmWgmma<Op::kFprop, DType::kF16, WgmmaTileId::k128x256Rows>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kFprop, DType::kF16, WgmmaTileId::k256x128Rows>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kFprop, DType::kF16, WgmmaTileId::k128x320Rows>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
}  // namespace jaxconv
