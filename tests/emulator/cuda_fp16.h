#ifndef JAXCONV_TESTS_EMULATOR_CUDA_FP16_H_
#define JAXCONV_TESTS_EMULATOR_CUDA_FP16_H_

#include "narrow_types.h"

JAXCONV_NARROW_TYPE(__half, __half2, Float16)
using half = __half;
using half2 = __half2;

inline float __half2float(__half a) { return a; }
inline __half __float2half(float a) { return a; }
inline __half __float2half_rn(float a) { return a; }
inline __half __ushort_as_half(unsigned short bits) { return emulator::BitCast<__half>(bits); }
inline unsigned short __half_as_ushort(__half a) { return a.bits; }
inline __half2 __float2half2_rn(float a) { return {a, a}; }
inline __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
inline __half2 __float22half2_rn(float2 a) { return {a.x, a.y}; }
inline float2 __half22float2(__half2 a) { return {a.x, a.y}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half2 make_half2(__half a, __half b) { return {a, b}; }
inline __half __low2half(__half2 a) { return a.x; }
inline __half __high2half(__half2 a) { return a.y; }
inline __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
inline __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }
inline __half2 __low2half2(__half2 a) { return {a.x, a.x}; }
inline __half2 __high2half2(__half2 a) { return {a.y, a.y}; }
inline __half2 __lowhigh2highlow(__half2 a) { return {a.y, a.x}; }
inline unsigned __hge2_mask(__half2 a, __half2 b) {
  return (a.x >= b.x ? 0xffffu : 0) | (a.y >= b.y ? 0xffff0000u : 0);
}
inline unsigned __hgt2_mask(__half2 a, __half2 b) {
  return (a.x > b.x ? 0xffffu : 0) | (a.y > b.y ? 0xffff0000u : 0);
}

#endif  // JAXCONV_TESTS_EMULATOR_CUDA_FP16_H_
