#include "cuda/pooling/max_pool.cuh"

namespace jaxconv {
namespace {

using max_pool_internal::PoolForm;

template <class Tag>
Status LaunchOf(const MaxPool& pool, void* stream) {
  return max_pool_internal::LaunchPool<Tag, true>(pool, stream);
}

#define JAXCONV_OF_max_pool_gradient(...)
#define PASS(...)
#define PASS_SM90(pass, types, variant, form) \
  JAXCONV_OF_##pass(types, variant, JAXCONV_PASS_UNPACK form)
#define JAXCONV_OF_max_pool(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_TAG, max_pool, variant, PoolForm, __VA_ARGS__)
#include "cuda/pooling/kernels.def"
#undef JAXCONV_OF_max_pool

constexpr PassLaunch<MaxPool> kLaunches[] = {
#define JAXCONV_OF_max_pool(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_ROW, max_pool, variant, LaunchOf, __VA_ARGS__)
#include "cuda/pooling/kernels.def"
};

}  // namespace

Status LaunchMaxPoolSm90(DType dtype, const PassForm& form, const MaxPool& pool, void* stream) {
  return LaunchOfForm(kLaunches, dtype, form, pool, stream);
}

}  // namespace jaxconv
