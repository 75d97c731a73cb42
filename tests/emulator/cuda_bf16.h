#ifndef JAXCONV_TESTS_EMULATOR_CUDA_BF16_H_
#define JAXCONV_TESTS_EMULATOR_CUDA_BF16_H_

#include "narrow_types.h"

JAXCONV_NARROW_TYPE(__nv_bfloat16, __nv_bfloat162, Bfloat16)

inline float __bfloat162float(__nv_bfloat16 a) { return a; }
inline __nv_bfloat16 __float2bfloat16(float a) { return a; }
inline __nv_bfloat16 __float2bfloat16_rn(float a) { return a; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  return emulator::BitCast<__nv_bfloat16>(bits);
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }
inline __nv_bfloat162 __float2bfloat162_rn(float a) { return {a, a}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 a) { return {a.x, a.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {a.x, a.y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 a) { return a.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 a) { return a.y; }
inline unsigned __hge2_mask(__nv_bfloat162 a, __nv_bfloat162 b) {
  return (a.x >= b.x ? 0xffffu : 0) | (a.y >= b.y ? 0xffff0000u : 0);
}
inline unsigned __hgt2_mask(__nv_bfloat162 a, __nv_bfloat162 b) {
  return (a.x > b.x ? 0xffffu : 0) | (a.y > b.y ? 0xffff0000u : 0);
}

#endif  // JAXCONV_TESTS_EMULATOR_CUDA_BF16_H_
