#include "cuda/kernels/igemm_wgmma_sm90.cuh"

namespace jaxconv {
template Status LaunchIgemmWgmma<Op::kDgrad, DType::kBF16, WgmmaTileId::k64x256PingpongOneTap>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kDgrad, DType::kBF16, WgmmaTileId::k256x64ColumnsOneTap>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kDgrad, DType::kBF16, WgmmaTileId::k64x256PingpongOneTapC128>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kDgrad, DType::kBF16, WgmmaTileId::k128x128PingpongOneTap>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
}  // namespace jaxconv
