#include "cuda/kernels/igemm_wmma.cuh"

namespace jaxconv {
template Status LaunchIgemmWmma<Op::kWgrad, DType::kBF16, WmmaTileId::k128x256>(
    const IgemmWmmaParams&, int64_t, void*);
template Status LaunchIgemmWmma<Op::kWgrad, DType::kBF16, WmmaTileId::k256x128>(
    const IgemmWmmaParams&, int64_t, void*);
template Status LaunchIgemmWmma<Op::kWgrad, DType::kBF16, WmmaTileId::k128x128>(
    const IgemmWmmaParams&, int64_t, void*);
}  // namespace jaxconv
