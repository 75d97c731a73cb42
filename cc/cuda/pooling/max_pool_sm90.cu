#include "cuda/pooling/max_pool.cuh"

namespace jaxconv {

template Status LaunchMaxPoolOn<true>(DType, const MaxPool&, void*);

}  // namespace jaxconv
