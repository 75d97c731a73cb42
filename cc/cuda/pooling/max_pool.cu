#include <string>

#include "cuda/pooling/max_pool.cuh"

namespace jaxconv {

extern template Status LaunchMaxPoolOn<true>(DType, const MaxPool&, void*);

Status LaunchMaxPool(DType dtype, const MaxPool& pool, bool sm90, void* stream) {
  if (dtype != DType::kBF16 && dtype != DType::kF16 && dtype != DType::kF32) {
    return Status::Unimplemented("max_pool: expected float32, float16 or bfloat16, got " +
                                 std::string(Name(dtype)));
  }
  JAXCONV_RETURN_IF_ERROR(CheckPoolWindows(pool.windows, pool.places != nullptr));
  if (pool.operands != nullptr && pool.places == nullptr) {
    return Status::Unimplemented("max_pool: operands come with places");
  }
  for (const void* array :
       {pool.x, static_cast<const void*>(pool.mean), static_cast<const void*>(pool.scale),
        static_cast<const void*>(pool.offset), static_cast<const void*>(pool.maxima),
        static_cast<const void*>(pool.places), static_cast<const void*>(pool.operands)}) {
    if (reinterpret_cast<uintptr_t>(array) % 16 != 0) {
      return Status::Unimplemented("max_pool: an array does not lie on a multiple of 16 bytes");
    }
  }
  return sm90 ? LaunchMaxPoolOn<true>(dtype, pool, stream)
              : LaunchMaxPoolOn<false>(dtype, pool, stream);
}

}  // namespace jaxconv
