// ldmatrix and mma.sync (sm_80).
//
// Fragments of one warp, lane = 4 g + t:
//     A 16 x 32 bytes   a[0] row g, a[1] row g + 8, bytes 4t..; a[2], a[3] 16 bytes further
//     B 32 bytes x 8    b[0] column g, bytes 4t..; b[1] 16 bytes later
//     D 16 x 8 words    d[0], d[1] row g, columns 2t, 2t + 1; d[2], d[3] row g + 8
// where bytes run along the reduction: 32 elements of 8 bits, 16 of 16 or 8 of 32. The words of D
// are float32, or int32 for 8-bit operands.
#ifndef JAXCONV_CUDA_PTX_MMA_CUH_
#define JAXCONV_CUDA_PTX_MMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jaxconv {

// Loads four 8x8 matrices of 16-bit elements; lane l provides the address of row l % 8 of matrix l
// / 8.
__device__ __forceinline__ void LoadMatrices(uint32_t address, uint32_t (&matrix)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(address));
}
// The same for two matrices or one; the addresses of the other lanes are not used.
__device__ __forceinline__ void LoadMatrices(uint32_t address, uint32_t (&matrix)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(matrix[0]), "=r"(matrix[1])
               : "r"(address));
}
__device__ __forceinline__ void LoadMatrices(uint32_t address, uint32_t (&matrix)[1]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(matrix[0])
               : "r"(address));
}
// The same for four or two matrices, each transposed.
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t address, uint32_t (&matrix)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(address));
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t address, uint32_t (&matrix)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(matrix[0]), "=r"(matrix[1])
               : "r"(address));
}
__device__ __forceinline__ uint32_t LoadWord(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}

// Rounds float32 to TF32. The tensor core reads the upper 19 bits and truncates the rest, which
// would bias every product in the same direction (0.7 * 2^-10 a product). Adding x 2^-11 / 1.4427,
// half an ulp for the mean of a log-uniform mantissa 1 <= m < 2, removes the bias; the error is 6 %
// above that of rounding to nearest (variance 0.373 instead of 0.333 half ulp squared). The single
// FFMA preserves NaN and Inf. cvt.rna.tf32 takes three instructions on sm_90, and an integer
// addition turns 0x7fffffff, the NaN that GPUs generate, into zero.
__device__ __forceinline__ void RoundToTf32(uint32_t& word) {
  const float x = __uint_as_float(word);
  word = __float_as_uint(fmaf(x, 0.00033844f, x));
}

// d += a b.
template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1);
template <>
__device__ __forceinline__ void MultiplyAdd<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                           uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void MultiplyAdd<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                    uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void MultiplyAdd<float>(float (&d)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a b.
template <typename T>
__device__ __forceinline__ void Multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1);
template <>
__device__ __forceinline__ void Multiply<float>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// d += a b over half the reduction: a[0] and a[1], b[0].
template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&d)[4], const uint32_t (&a)[2], uint32_t b);
template <>
__device__ __forceinline__ void MultiplyAdd<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[2],
                                                           uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}
template <>
__device__ __forceinline__ void MultiplyAdd<__half>(float (&d)[4], const uint32_t (&a)[2],
                                                    uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// The same for integers: A of T, B of int8_t; sums wrap around.
template <typename T>
__device__ __forceinline__ void MultiplyAdd(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1);
template <>
__device__ __forceinline__ void MultiplyAdd<int8_t>(int32_t (&d)[4], const uint32_t (&a)[4],
                                                    uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void MultiplyAdd<uint8_t>(int32_t (&d)[4], const uint32_t (&a)[4],
                                                     uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_MMA_CUH_
