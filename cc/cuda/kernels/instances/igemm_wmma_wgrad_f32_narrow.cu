#include "cuda/kernels/igemm_wmma.cuh"

namespace jaxconv {
template Status LaunchIgemmWmma<Op::kWgrad, DType::kF32, WmmaTileId::k128x64Narrow>(
    const IgemmWmmaParams&, int64_t, void*);
template Status LaunchIgemmWmma<Op::kWgrad, DType::kF32, WmmaTileId::k128x16Narrow>(
    const IgemmWmmaParams&, int64_t, void*);
}  // namespace jaxconv
