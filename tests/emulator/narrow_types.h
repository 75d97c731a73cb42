// The 16-bit element types of cuda_fp16.h and cuda_bf16.h, and their pairs.
#ifndef JAXCONV_TESTS_EMULATOR_NARROW_TYPES_H_
#define JAXCONV_TESTS_EMULATOR_NARROW_TYPES_H_

#include "cuda_runtime.h"
#include "round.h"

namespace emulator {

template <class Format>
const float* ValueTable() {
  static const float* const table = [] {
    auto* values = new float[65536];
    for (int i = 0; i < 65536; ++i) values[i] = static_cast<float>(Format::Value(i));
    return values;
  }();
  return table;
}
template <class Format>
float ToFloat(uint16_t bits) {
  static const float* const table = ValueTable<Format>();
  return table[bits];
}

}  // namespace emulator

// Every operation rounds once, as in hardware.
#define JAXCONV_NARROW_TYPE(Type, Pair, Format)                                                    \
  struct Type {                                                                                    \
    uint16_t bits;                                                                                 \
    Type() = default;                                                                              \
    Type(float value) : bits(emulator::Format::Round(value)) {}                                    \
    Type(double value) : bits(emulator::Format::Round(value)) {}                                   \
    Type(int value) : bits(emulator::Format::Round(value)) {}                                      \
    operator float() const { return emulator::ToFloat<emulator::Format>(bits); }                   \
  };                                                                                               \
  struct alignas(4) Pair {                                                                         \
    Type x, y;                                                                                     \
    Pair() = default;                                                                              \
    Pair(Type low, Type high) : x(low), y(high) {}                                                 \
  };                                                                                               \
  inline Type __hadd(Type a, Type b) {                                                             \
    return emulator::AddToOdd(static_cast<float>(a), static_cast<float>(b));                       \
  }                                                                                                \
  inline Type __hsub(Type a, Type b) {                                                             \
    return emulator::AddToOdd(static_cast<float>(a), -static_cast<float>(b));                      \
  }                                                                                                \
  inline Type __hmul(Type a, Type b) {                                                             \
    return static_cast<double>(static_cast<float>(a)) * static_cast<float>(b);                     \
  }                                                                                                \
  inline Type __hfma(Type a, Type b, Type c) {                                                     \
    return emulator::AddToOdd(static_cast<double>(static_cast<float>(a)) * static_cast<float>(b),  \
                              static_cast<float>(c));                                              \
  }                                                                                                \
  inline Type __hneg(Type a) {                                                                     \
    a.bits ^= 0x8000;                                                                              \
    return a;                                                                                      \
  }                                                                                                \
  inline Type __habs(Type a) {                                                                     \
    a.bits &= 0x7fff;                                                                              \
    return a;                                                                                      \
  }                                                                                                \
  inline Pair __hadd2(Pair a, Pair b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }             \
  inline Pair __hsub2(Pair a, Pair b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }             \
  inline Pair __hmul2(Pair a, Pair b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }             \
  inline Pair __hfma2(Pair a, Pair b, Pair c) {                                                    \
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};                                         \
  }                                                                                                \
  inline Pair __hneg2(Pair a) { return {__hneg(a.x), __hneg(a.y)}; }                               \
  inline Pair __habs2(Pair a) { return {__habs(a.x), __habs(a.y)}; }                               \
  inline Type __hmax(Type a, Type b) { return fmaxf(a, b); }                                       \
  inline Type __hmin(Type a, Type b) { return fminf(a, b); }                                       \
  inline Pair __hmax2(Pair a, Pair b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }             \
  inline Pair __hmin2(Pair a, Pair b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }             \
  inline Type __hmax_nan(Type a, Type b) {                                                         \
    const float x = a, y = b;                                                                      \
    return x != x || y != y ? NAN : fmaxf(x, y);                                                   \
  }                                                                                                \
  inline Type __hmin_nan(Type a, Type b) {                                                         \
    const float x = a, y = b;                                                                      \
    return x != x || y != y ? NAN : fminf(x, y);                                                   \
  }                                                                                                \
  inline Pair __hmax2_nan(Pair a, Pair b) { return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)}; } \
  inline Pair __hmin2_nan(Pair a, Pair b) { return {__hmin_nan(a.x, b.x), __hmin_nan(a.y, b.y)}; } \
  /* Exact matches: otherwise the built-in operators on floats are as good a match. */             \
  inline Type operator+(Type a, Type b) { return __hadd(a, b); }                                   \
  inline Type operator-(Type a, Type b) { return __hsub(a, b); }                                   \
  inline Type operator*(Type a, Type b) { return __hmul(a, b); }                                   \
  inline Pair operator+(Pair a, Pair b) { return __hadd2(a, b); }                                  \
  inline Pair operator-(Pair a, Pair b) { return __hsub2(a, b); }                                  \
  inline Pair operator*(Pair a, Pair b) { return __hmul2(a, b); }                                  \
  inline Pair operator-(Pair a) { return __hneg2(a); }                                             \
  inline float __low2float(Pair a) { return a.x; }                                                 \
  inline float __high2float(Pair a) { return a.y; }

#endif  // JAXCONV_TESTS_EMULATOR_NARROW_TYPES_H_
