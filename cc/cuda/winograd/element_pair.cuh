// Two neighbouring channels: what a lane of the transforms loads and stores.
#ifndef JAXCONV_CUDA_WINOGRAD_ELEMENT_PAIR_CUH_
#define JAXCONV_CUDA_WINOGRAD_ELEMENT_PAIR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace jaxconv::winograd {

// Two neighbouring elements, packed as in memory. T: __half, __nv_bfloat16 or float.
template <typename T>
using PairOf = std::conditional_t<std::is_same_v<T, float>, float2, uint32_t>;

// Loads the pair; zeros if not `inside`.
template <typename T>
__device__ __forceinline__ PairOf<T> LoadPair(const T* from, bool inside) {
  return inside ? __ldg(reinterpret_cast<const PairOf<T>*>(from)) : PairOf<T>();
}

// The lower or the upper element.
template <typename T, int kHalf>
__device__ __forceinline__ float ElementOfPair(float2 pair) {
  static_assert(std::is_same_v<T, float>);
  return kHalf == 0 ? pair.x : pair.y;
}
// The same for a word. T: __half or __nv_bfloat16.
template <typename T, int kHalf>
__device__ __forceinline__ float ElementOfPair(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __uint_as_float(kHalf == 0 ? word << 16 : word & 0xffff0000u);
  } else {
    __half2 pair;
    memcpy(&pair, &word, sizeof(pair));
    const float2 both = __half22float2(pair);
    return kHalf == 0 ? both.x : both.y;
  }
}

// Rounded once. Out: __half, __nv_bfloat16 or float.
template <typename Out>
__device__ __forceinline__ void StorePairTo(Out* to, float low, float high) {
  if constexpr (std::is_same_v<Out, float>) {
    *reinterpret_cast<float2*>(to) = make_float2(low, high);
  } else if constexpr (std::is_same_v<Out, __half>) {
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(low, high);
  } else {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(low, high);
  }
}

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_ELEMENT_PAIR_CUH_
