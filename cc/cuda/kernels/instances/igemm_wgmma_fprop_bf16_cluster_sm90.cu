#include "cuda/kernels/igemm_wgmma_cluster_sm90.cuh"

namespace jaxconv {
template Status LaunchIgemmWgmmaCluster<Op::kFprop, DType::kBF16, WgmmaTileId::k64x64Cluster>(
    const IgemmWgmmaParams&, const WgmmaOperands&, void*);
}  // namespace jaxconv
