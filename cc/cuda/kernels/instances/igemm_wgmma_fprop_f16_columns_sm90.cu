#include "cuda/kernels/igemm_wgmma_sm90.cuh"

namespace jaxconv {
template Status LaunchIgemmWgmma<Op::kFprop, DType::kF16, WgmmaTileId::k256x64Columns>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kFprop, DType::kF16, WgmmaTileId::k256x64ColumnsRows>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kFprop, DType::kF16, WgmmaTileId::k224x64ColumnsRows>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kFprop, DType::kF16, WgmmaTileId::k192x64ColumnsResident>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
template Status LaunchIgemmWgmma<Op::kFprop, DType::kF16, WgmmaTileId::k128x64ColumnsResident>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
}  // namespace jaxconv
