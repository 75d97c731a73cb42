// wgmma: a warpgroup multiplies 64 x 32 bytes by 32 bytes x N from shared memory (sm_90a). 32 bytes
// of the reduction are 16 elements of 16 bits, 8 of float32 (read as TF32's 19 bits) or 32 bytes.
//
// Both operands lie in rows of 128 bytes, 64 elements of 16 bits or 32 of 32 bits, as TMA's
// 128-byte swizzle stores them. Rows of 32-bit elements must run along the reduction (K-major).
// Bytes, K-major too, may lie in rows of 64 or 32 bytes with the swizzle of that width.
// Alternatively, operands consist of core matrices: 8 rows by 16 bytes in 128 contiguous bytes,
// without a swizzle; of MN-major operands 8 columns in each of 8 rows of the reduction. Descriptor: address / 16 in bits 0-13, leading offset / 16 in 16-29,
// stride offset / 16 in 32-45, layout 1, 2 or 3 (swizzle of 128, 64, 32 bytes) or 0 (core matrices)
// in 62-63; swizzled buffers start at multiples of eight rows.
//     K-major     a row is 128 bytes of the reduction; 8 rows are 1024 bytes (the stride
//                 offset); the next instruction's 32 bytes are 32 bytes on
//     MN-major    a row is 64 columns; 8 rows (8 of the reduction) are 1024 bytes (the stride
//                 offset), the next 64 columns lie a leading offset on, the next 16 of the
//                 reduction 2048 bytes on. With the swizzle of 64 (32) bytes a row is 32 (16) columns
//     core        the next 16 bytes of the reduction lie a leading offset on, the next 8 rows a
//                 stride offset; MN-major: the next 8 of the reduction, the next 8 columns
// Accumulators: warp w of the warpgroup has rows 16 w..; with lane = 4 g + t, d[4 j] and d[4 j + 1]
// are row g, columns 8 j + 2 t and the next; d[4 j + 2] and d[4 j + 3] the same of row g + 8.
#ifndef JAXCONV_CUDA_PTX_WGMMA_SM90_CUH_
#define JAXCONV_CUDA_PTX_WGMMA_SM90_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace jaxconv {

// A descriptor from its words. Adding to the low word advances along an operand.
__device__ __forceinline__ uint64_t DescriptorOf(uint32_t low, uint32_t high) {
  return uint64_t{high} << 32 | low;
}
// kRowBytes: 128, 64 or 32.
template <int kRowBytes = 128>
__host__ __device__ constexpr uint32_t KMajorDescriptorHigh() {
  return (8 * kRowBytes >> 4) | (kRowBytes == 128 ? 1u : kRowBytes == 64 ? 2u : 3u) << 30;
}
__device__ __forceinline__ uint32_t KMajorDescriptorLow(uint32_t shared) {
  return (shared & 0x3ffff) >> 4 | 1u << 16;
}
template <int kRowBytes = 128>
__device__ __forceinline__ uint64_t KMajorDescriptor(uint32_t shared) {
  return DescriptorOf(KMajorDescriptorLow(shared), KMajorDescriptorHigh<kRowBytes>());
}
__device__ __forceinline__ uint64_t MnMajorDescriptor(uint32_t shared, uint32_t leading_bytes) {
  return uint64_t{(shared & 0x3ffff) >> 4} | uint64_t{leading_bytes >> 4} << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}
template <int kLeadingBytes>
__device__ __forceinline__ uint64_t MnMajorDescriptor(uint32_t shared) {
  return MnMajorDescriptor(shared, kLeadingBytes);
}
// Core matrices of an MN-major operand.
template <int kLeadingBytes>
__device__ __forceinline__ uint64_t MnMajorCoreDescriptor(uint32_t shared, uint32_t stride_bytes) {
  return DescriptorOf((shared & 0x3ffff) >> 4 | uint32_t{kLeadingBytes >> 4} << 16,
                      stride_bytes >> 4);
}
template <int kLeadingBytes, int kStrideBytes>
__device__ __forceinline__ uint64_t CoreMatrixDescriptor(uint32_t shared) {
  return uint64_t{(shared & 0x3ffff) >> 4} | uint64_t{kLeadingBytes >> 4} << 16 |
         uint64_t{kStrideBytes >> 4} << 32;
}

// Orders register and shared-memory accesses of the warpgroup before the wgmmas that follow.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d = (accumulate ? d : 0) + a b. kMnMajorA, kMnMajorB: the operand is contiguous along d's rows
// (A) or columns (B).
template <int kN, typename T, bool kMnMajorA, bool kMnMajorB>
__device__ __forceinline__ void Wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate);

#define JAXCONV_R4(i) "%" #i "0, %" #i "1, %" #i "2, %" #i "3"
#define JAXCONV_R10(i) JAXCONV_R4(i) ", %" #i "4, %" #i "5, %" #i "6, %" #i "7, %" #i "8, %" #i "9"
#define JAXCONV_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define JAXCONV_D16(i) JAXCONV_D4(i), JAXCONV_D4(i + 4), JAXCONV_D4(i + 8), JAXCONV_D4(i + 12)
#define JAXCONV_D32(i) JAXCONV_D16(i), JAXCONV_D16(i + 16)
#define JAXCONV_R30 JAXCONV_R10() ", " JAXCONV_R10(1) ", " JAXCONV_R10(2)
#define JAXCONV_R60 JAXCONV_R30 ", " JAXCONV_R10(3) ", " JAXCONV_R10(4) ", " JAXCONV_R10(5)
#define JAXCONV_R90 JAXCONV_R60 ", " JAXCONV_R10(6) ", " JAXCONV_R10(7) ", " JAXCONV_R10(8)
#define JAXCONV_R120 JAXCONV_R90 ", " JAXCONV_R10(9) ", " JAXCONV_R10(10) ", " JAXCONV_R10(11)
#define JAXCONV_R32 JAXCONV_R30 ", %30, %31"
#define JAXCONV_R24 JAXCONV_R10() ", " JAXCONV_R10(1) ", " JAXCONV_R4(2)
#define JAXCONV_R28 JAXCONV_R24 ", %24, %25, %26, %27"
#define JAXCONV_R48 JAXCONV_R30 ", " JAXCONV_R10(3) ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JAXCONV_R56 JAXCONV_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define JAXCONV_R64 JAXCONV_R60 ", " JAXCONV_R4(6)
#define JAXCONV_R80 JAXCONV_R60 ", " JAXCONV_R10(6) ", " JAXCONV_R10(7)
#define JAXCONV_R84 JAXCONV_R80 ", " JAXCONV_R4(8)
#define JAXCONV_R96 JAXCONV_R90 ", %90, %91, %92, %93, %94, %95"
#define JAXCONV_R104 JAXCONV_R90 ", " JAXCONV_R10(9) ", %100, %101, %102, %103"
#define JAXCONV_R112 JAXCONV_R90 ", " JAXCONV_R10(9) ", " JAXCONV_R10(10) ", %110, %111"
#define JAXCONV_R128 JAXCONV_R120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// A, B, accumulate and the transposition (16-bit types only) follow the n / 2 accumulators.
#define JAXCONV_WGMMA(n, type, shape, registers, a_at, b_at, p_at, transposition, ...)      \
  template <bool kMnMajorA, bool kMnMajorB>                                                 \
  __device__ __forceinline__ void Wgmma##n(type, float (&d)[n / 2], uint64_t a, uint64_t b, \
                                           int accumulate) {                                \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #p_at                             \
                 ", 0;\n\t"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n shape " {" registers "}, %" #a_at   \
                 ", %" #b_at ", p, 1, 1" transposition ";\n\t}"                             \
                 : __VA_ARGS__                                                              \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(kMnMajorA ? 1 : 0),                 \
                   "n"(kMnMajorB ? 1 : 0));                                                 \
  }
#define JAXCONV_WGMMA_TYPES(n, registers, a_at, b_at, p_at, s_at, t_at, ...)        \
  JAXCONV_WGMMA(n, __nv_bfloat16, "k16.f32.bf16.bf16", registers, a_at, b_at, p_at, \
                ", %" #s_at ", %" #t_at, __VA_ARGS__)                               \
  JAXCONV_WGMMA(n, __half, "k16.f32.f16.f16", registers, a_at, b_at, p_at,          \
                ", %" #s_at ", %" #t_at, __VA_ARGS__)                               \
  JAXCONV_WGMMA(n, float, "k8.f32.tf32.tf32", registers, a_at, b_at, p_at, "", __VA_ARGS__)
JAXCONV_WGMMA_TYPES(48, JAXCONV_R24, 24, 25, 26, 27, 28, JAXCONV_D16(0), JAXCONV_D4(16),
                    JAXCONV_D4(20))
JAXCONV_WGMMA_TYPES(64, JAXCONV_R32, 32, 33, 34, 35, 36, JAXCONV_D32(0))
JAXCONV_WGMMA_TYPES(96, JAXCONV_R48, 48, 49, 50, 51, 52, JAXCONV_D32(0), JAXCONV_D16(32))
JAXCONV_WGMMA_TYPES(128, JAXCONV_R64, 64, 65, 66, 67, 68, JAXCONV_D32(0), JAXCONV_D32(32))
JAXCONV_WGMMA_TYPES(160, JAXCONV_R80, 80, 81, 82, 83, 84, JAXCONV_D32(0), JAXCONV_D32(32),
                    JAXCONV_D16(64))
JAXCONV_WGMMA_TYPES(168, JAXCONV_R84, 84, 85, 86, 87, 88, JAXCONV_D32(0), JAXCONV_D32(32),
                    JAXCONV_D16(64), JAXCONV_D4(80))
JAXCONV_WGMMA_TYPES(192, JAXCONV_R96, 96, 97, 98, 99, 100, JAXCONV_D32(0), JAXCONV_D32(32),
                    JAXCONV_D32(64))
JAXCONV_WGMMA_TYPES(224, JAXCONV_R112, 112, 113, 114, 115, 116, JAXCONV_D32(0), JAXCONV_D32(32),
                    JAXCONV_D32(64), JAXCONV_D16(96))
JAXCONV_WGMMA_TYPES(256, JAXCONV_R128, 128, 129, 130, 131, 132, JAXCONV_D32(0), JAXCONV_D32(32),
                    JAXCONV_D32(64), JAXCONV_D32(96))
#undef JAXCONV_WGMMA_TYPES
#undef JAXCONV_WGMMA

// d = (accumulate ? d : 0) + a b for float16 and 128 columns. a: a thread's fragments of A in
// mma.sync order (ptx/mma.cuh), rows g and g + 8 of the warp's 16; B is K-major. The registers of a
// and d must not be touched until WgmmaWait.
__device__ __forceinline__ void WgmmaFromRegisters(float (&d)[64], const uint32_t (&a)[4],
                                                   uint64_t b, int accumulate) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" JAXCONV_R64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n\t}"
      : JAXCONV_D32(0), JAXCONV_D32(32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// The same for 16-bit types, 112 or 56 columns.
#define JAXCONV_WGMMA_FROM_REGISTERS(n, type, names, registers, a0, a1, a2, a3, b_at, p_at, ...) \
  __device__ __forceinline__ void WgmmaFromRegisters(                                            \
      type, float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {             \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #p_at                                  \
                 ", 0;\n\t"                                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." names " {" registers          \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_at ", p, 1, 1, 0;\n\t}"     \
                 : __VA_ARGS__                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));         \
  }
#define JAXCONV_WGMMA_FROM_REGISTERS_TYPES(...)                                                 \
  JAXCONV_WGMMA_FROM_REGISTERS(112, __VA_ARGS__, JAXCONV_R56, 56, 57, 58, 59, 60, 61,           \
                               JAXCONV_D32(0), JAXCONV_D16(32), JAXCONV_D4(48), JAXCONV_D4(52)) \
  JAXCONV_WGMMA_FROM_REGISTERS(56, __VA_ARGS__, JAXCONV_R28, 28, 29, 30, 31, 32, 33,            \
                               JAXCONV_D16(0), JAXCONV_D4(16), JAXCONV_D4(20), JAXCONV_D4(24))
JAXCONV_WGMMA_FROM_REGISTERS_TYPES(__nv_bfloat16, "bf16.bf16")
JAXCONV_WGMMA_FROM_REGISTERS_TYPES(__half, "f16.f16")
#undef JAXCONV_WGMMA_FROM_REGISTERS_TYPES
#undef JAXCONV_WGMMA_FROM_REGISTERS

// The same for 256 columns.
#define JAXCONV_WGMMA_FROM_REGISTERS_256(type, names)                              \
  __device__ __forceinline__ void WgmmaFromRegisters(                              \
      type, float (&d)[128], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
    asm volatile(                                                                  \
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %133, 0;\n\t"                        \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." names " {" JAXCONV_R128     \
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0;\n\t}"                      \
        : JAXCONV_D32(0), JAXCONV_D32(32), JAXCONV_D32(64), JAXCONV_D32(96)        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));    \
  }
JAXCONV_WGMMA_FROM_REGISTERS_256(__nv_bfloat16, "bf16.bf16")
JAXCONV_WGMMA_FROM_REGISTERS_256(__half, "f16.f16")
#undef JAXCONV_WGMMA_FROM_REGISTERS_256

// The same for TF32, kN (64 or 128) columns: rows g and g + 8, columns t and t + 4 of the
// reduction.
template <int kN>
__device__ __forceinline__ void WgmmaFromRegisters(float (&d)[kN / 2], const uint32_t (&a)[4],
                                                   uint64_t b, int accumulate) {
  static_assert(kN == 64 || kN == 128);
  if constexpr (kN == 64) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {" JAXCONV_R32
        "}, {%32, %33, %34, %35}, %36, p, 1, 1;\n\t}"
        : JAXCONV_D32(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
  } else {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {" JAXCONV_R64
        "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n\t}"
        : JAXCONV_D32(0), JAXCONV_D32(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
  }
}
// An accumulator after WgmmaWait: keeps the compiler from reading it earlier.
__device__ __forceinline__ float WgmmaResult(float accumulator) {
  asm volatile("" : "+f"(accumulator));
  return accumulator;
}

// Bytes of types A and B, one of them signed; int32 sums wrap around.
#define JAXCONV_I4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define JAXCONV_I16(i) JAXCONV_I4(i), JAXCONV_I4(i + 4), JAXCONV_I4(i + 8), JAXCONV_I4(i + 12)
#define JAXCONV_I32(i) JAXCONV_I16(i), JAXCONV_I16(i + 16)
#define JAXCONV_WGMMA_INT8(n, type_a, type_b, names, registers, a_at, b_at, p_at, ...)       \
  __device__ __forceinline__ void WgmmaInt8(type_a, type_b, int32_t (&d)[n / 2], uint64_t a, \
                                            uint64_t b, int accumulate) {                    \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #p_at                              \
                 ", 0;\n\t"                                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32." names " {" registers      \
                 "}, %" #a_at ", %" #b_at ", p;\n\t}"                                        \
                 : __VA_ARGS__                                                               \
                 : "l"(a), "l"(b), "r"(accumulate));                                         \
  }
#define JAXCONV_WGMMA_INT8_TYPES(n, registers, a_at, b_at, p_at, ...)                       \
  JAXCONV_WGMMA_INT8(n, int8_t, int8_t, "s8.s8", registers, a_at, b_at, p_at, __VA_ARGS__)  \
  JAXCONV_WGMMA_INT8(n, uint8_t, int8_t, "u8.s8", registers, a_at, b_at, p_at, __VA_ARGS__) \
  JAXCONV_WGMMA_INT8(n, int8_t, uint8_t, "s8.u8", registers, a_at, b_at, p_at, __VA_ARGS__)
JAXCONV_WGMMA_INT8_TYPES(64, JAXCONV_R32, 32, 33, 34, JAXCONV_I32(0))
JAXCONV_WGMMA_INT8_TYPES(96, JAXCONV_R48, 48, 49, 50, JAXCONV_I32(0), JAXCONV_I16(32))
JAXCONV_WGMMA_INT8_TYPES(112, JAXCONV_R56, 56, 57, 58, JAXCONV_I32(0), JAXCONV_I16(32),
                         JAXCONV_I4(48), JAXCONV_I4(52))
JAXCONV_WGMMA_INT8_TYPES(128, JAXCONV_R64, 64, 65, 66, JAXCONV_I32(0), JAXCONV_I32(32))
JAXCONV_WGMMA_INT8_TYPES(192, JAXCONV_R96, 96, 97, 98, JAXCONV_I32(0), JAXCONV_I32(32),
                         JAXCONV_I32(64))
JAXCONV_WGMMA_INT8_TYPES(208, JAXCONV_R104, 104, 105, 106, JAXCONV_I32(0), JAXCONV_I32(32),
                         JAXCONV_I32(64), JAXCONV_I4(96), JAXCONV_I4(100))
JAXCONV_WGMMA_INT8_TYPES(224, JAXCONV_R112, 112, 113, 114, JAXCONV_I32(0), JAXCONV_I32(32),
                         JAXCONV_I32(64), JAXCONV_I16(96))
JAXCONV_WGMMA_INT8_TYPES(256, JAXCONV_R128, 128, 129, 130, JAXCONV_I32(0), JAXCONV_I32(32),
                         JAXCONV_I32(64), JAXCONV_I32(96))
#undef JAXCONV_WGMMA_INT8_TYPES
#undef JAXCONV_WGMMA_INT8
#undef JAXCONV_I32
#undef JAXCONV_I16
#undef JAXCONV_I4
#undef JAXCONV_R128
#undef JAXCONV_R112
#undef JAXCONV_R104
#undef JAXCONV_R96
#undef JAXCONV_R84
#undef JAXCONV_R80
#undef JAXCONV_R64
#undef JAXCONV_R56
#undef JAXCONV_R48
#undef JAXCONV_R32
#undef JAXCONV_R28
#undef JAXCONV_R24
#undef JAXCONV_R120
#undef JAXCONV_R90
#undef JAXCONV_R60
#undef JAXCONV_R30
#undef JAXCONV_D32
#undef JAXCONV_D16
#undef JAXCONV_D4
#undef JAXCONV_R10
#undef JAXCONV_R4

template <int kN, typename T, bool kMnMajorA, bool kMnMajorB>
__device__ __forceinline__ void Wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
  static_assert(kN == 48 || kN == 64 || kN == 96 || kN == 128 || kN == 160 || kN == 168 ||
                kN == 192 || kN == 224 || kN == 256);
  static_assert(sizeof(T) == 2 || (!kMnMajorA && !kMnMajorB), "TF32 operands are K-major");
  if constexpr (kN == 48) Wgmma48<kMnMajorA, kMnMajorB>(T{}, d, a, b, accumulate);
  if constexpr (kN == 64) Wgmma64<kMnMajorA, kMnMajorB>(T{}, d, a, b, accumulate);
  if constexpr (kN == 96) Wgmma96<kMnMajorA, kMnMajorB>(T{}, d, a, b, accumulate);
  if constexpr (kN == 128) Wgmma128<kMnMajorA, kMnMajorB>(T{}, d, a, b, accumulate);
  if constexpr (kN == 160) Wgmma160<kMnMajorA, kMnMajorB>(T{}, d, a, b, accumulate);
  if constexpr (kN == 168) Wgmma168<kMnMajorA, kMnMajorB>(T{}, d, a, b, accumulate);
  if constexpr (kN == 192) Wgmma192<kMnMajorA, kMnMajorB>(T{}, d, a, b, accumulate);
  if constexpr (kN == 224) Wgmma224<kMnMajorA, kMnMajorB>(T{}, d, a, b, accumulate);
  if constexpr (kN == 256) Wgmma256<kMnMajorA, kMnMajorB>(T{}, d, a, b, accumulate);
}

// Stores four 8x8 matrices of 16-bit elements from fragments; lane l provides the address of row l
// % 8 of matrix l / 8.
__device__ __forceinline__ void StoreMatrices(uint32_t address, uint32_t m0, uint32_t m1,
                                              uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

// The same, each matrix transposed: its columns become the rows in memory.
__device__ __forceinline__ void StoreMatricesTransposed(uint32_t address, uint32_t m0, uint32_t m1,
                                                        uint32_t m2, uint32_t m3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(m0), "r"(m1), "r"(m2), "r"(m3)
      : "memory");
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PTX_WGMMA_SM90_CUH_
