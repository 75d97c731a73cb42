#include "cuda/kernels/igemm_wmma.cuh"

namespace jaxconv {
template Status LaunchIgemmWmma<Op::kWgrad, DType::kBF16, WmmaTileId::k256x16>(
    const IgemmWmmaParams&, int64_t, void*);
template Status LaunchIgemmWmma<Op::kWgrad, DType::kBF16, WmmaTileId::k128x64Half>(
    const IgemmWmmaParams&, int64_t, void*);
template Status LaunchIgemmWmma<Op::kWgrad, DType::kBF16, WmmaTileId::k256x16ThinB>(
    const IgemmWmmaParams&, int64_t, void*);
}  // namespace jaxconv
