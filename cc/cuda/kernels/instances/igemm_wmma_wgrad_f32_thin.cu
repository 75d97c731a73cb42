#include "cuda/kernels/igemm_wmma.cuh"

namespace jaxconv {
template Status LaunchIgemmWmma<Op::kWgrad, DType::kF32, WmmaTileId::k256x16>(
    const IgemmWmmaParams&, int64_t, void*);
}  // namespace jaxconv
