#include "cuda/pooling/max_pool.cuh"

namespace jaxconv {
namespace {

using max_pool_internal::PoolForm;

template <class Tag>
Status LaunchOf(const MaxPool& pool, void* stream) {
  return max_pool_internal::LaunchPool<Tag, false>(pool, stream);
}

#define JAXCONV_OF_max_pool_gradient(...)
#define PASS_SM90(...)
#define PASS(pass, types, variant, form) JAXCONV_OF_##pass(types, variant, JAXCONV_PASS_UNPACK form)
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

Status LaunchMaxPool(DType dtype, const MaxPool& pool, bool sm90, void* stream) {
  JAXCONV_RETURN_IF_ERROR(CheckPoolWindows(pool.windows, pool.places != nullptr));
  if (pool.operands != nullptr && pool.places == nullptr) {
    return Status::Unimplemented("max_pool: operands come with places");
  }
  JAXCONV_RETURN_IF_ERROR(CheckAligned(
      {pool.x, pool.mean, pool.scale, pool.offset, pool.maxima, pool.places, pool.operands}));
  const PassForm form = pooling::FormOfPool(pool.windows, dtype, pool.mean != nullptr,
                                            pool.places != nullptr, pool.walk);
  const PassKernel* const kernel = FindForm(pooling::Kernels(), "max_pool", dtype, form, sm90);
  return kernel != nullptr && kernel->sm90 ? LaunchMaxPoolSm90(dtype, form, pool, stream)
                                           : LaunchOfForm(kLaunches, dtype, form, pool, stream);
}

}  // namespace jaxconv
