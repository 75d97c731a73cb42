#include "cuda/kernels/igemm_wmma.cuh"

namespace jaxconv {
template Status LaunchIgemmWmma<Op::kFprop, DType::kF16, WmmaTileId::k128x64Narrow>(
    const IgemmWmmaParams&, int64_t, void*);
template Status LaunchIgemmWmma<Op::kFprop, DType::kF16, WmmaTileId::k128x16Narrow>(
    const IgemmWmmaParams&, int64_t, void*);
}  // namespace jaxconv
