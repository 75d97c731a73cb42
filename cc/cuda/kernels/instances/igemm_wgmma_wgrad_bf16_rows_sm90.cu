#include "cuda/kernels/igemm_wgmma_wgrad_sm90.cuh"

namespace jaxconv {
template Status LaunchWgmmaWgradRows<DType::kBF16>(const IgemmWgmmaParams&, const WgmmaOperands&,
                                                   void*);
}  // namespace jaxconv
