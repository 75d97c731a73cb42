#include "cuda/kernels/igemm_wgmma_sm90.cuh"

namespace jaxconv {
template Status LaunchIgemmWgmma<Op::kWgrad, DType::kF32, WgmmaTileId::k128x256Mma>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kWgrad, DType::kF32, WgmmaTileId::k128x64Mma>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kWgrad, DType::kF32, WgmmaTileId::k256x128Mma>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
}  // namespace jaxconv
