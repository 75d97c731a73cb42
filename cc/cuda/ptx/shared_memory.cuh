// Shared memory by 32-bit address. The compiler keeps an address that is the result of inline
// assembly; otherwise it recomputes addresses from threadIdx at every use, which costs a hot loop
// dozens of instructions.
#ifndef JAXCONV_CUDA_PTX_SHARED_MEMORY_CUH_
#define JAXCONV_CUDA_PTX_SHARED_MEMORY_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  uint32_t address;
  asm volatile("mov.u32 %0, %1;"
               : "=r"(address)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(pointer))));
  return address;
}

// Returns the value as one unknown to the compiler. Expressions that depend on it are then computed
// at their use, not hoisted out of the enclosing loop, where they would occupy registers
// throughout.
__device__ __forceinline__ int ComputedHere(int value) {
  int same;
  asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(value));
  return same;
}

// kOffset: bytes, part of the instruction.
template <int kOffset>
__device__ __forceinline__ void LoadShared(uint32_t address, float* quad) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=f"(quad[0]), "=f"(quad[1]), "=f"(quad[2]), "=f"(quad[3])
               : "r"(address), "n"(kOffset));
}

__device__ __forceinline__ void LoadPair(uint32_t address, uint32_t* first, uint32_t* second) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(*first), "=r"(*second) : "r"(address));
}

__device__ __forceinline__ void StoreShared(uint32_t address, const float (&quad)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(quad[0]),
               "f"(quad[1]), "f"(quad[2]), "f"(quad[3])
               : "memory");
}
__device__ __forceinline__ void StoreShared(uint32_t address, const float (&value)[1]) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value[0]) : "memory");
}

__device__ __forceinline__ void StoreChunk(uint32_t address, const uint32_t (&word)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
               "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}
__device__ __forceinline__ uint4 LoadChunk(uint32_t address) {
  uint4 chunk;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "r"(address));
  return chunk;
}
__device__ __forceinline__ void LoadPair(uint32_t address, float* first, float* second) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(*first), "=f"(*second) : "r"(address));
}
__device__ __forceinline__ void StoreWord(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ void StorePair(uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
               : "memory");
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_SHARED_MEMORY_CUH_
