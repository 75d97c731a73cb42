// Shared by the epilogues: loops over blocks of elements that fit in L1, and code for several
// instruction sets.
#ifndef JAXCONV_CPU_BLOCK_LOOPS_H_
#define JAXCONV_CPU_BLOCK_LOOPS_H_

#include <algorithm>
#include <cstdint>

// Marks functions with a version for each instruction set: they are inlined into the function
// compiled for it, and vectorized there.
#define JAXCONV_INLINE inline __attribute__((always_inline))
#define JAXCONV_LOOP JAXCONV_INLINE void
#define JAXCONV_ALWAYS __attribute__((always_inline))  // of a lambda

// Defines Name##ForThisProcessor(), which returns the version of `void Body(Argument)` for this
// processor. Two of the instruction sets have a fused multiply-add; the third version calls the C
// library's exact fmaf.
#define JAXCONV_FOR_PROCESSORS(Name, Body, Argument)                                         \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))) void Name##Avx512(       \
      Argument argument) {                                                                   \
    Body(argument);                                                                          \
  }                                                                                          \
  __attribute__((target("avx2,fma"))) void Name##Avx2(Argument argument) { Body(argument); } \
  void Name##Baseline(Argument argument) { Body(argument); }                                 \
  void (*Name##ForThisProcessor())(Argument) {                                               \
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&          \
        __builtin_cpu_supports("avx512vl")) {                                                \
      return Name##Avx512;                                                                   \
    }                                                                                        \
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Name##Avx2;  \
    return Name##Baseline;                                                                   \
  }

namespace jaxconv::cpu {

constexpr int64_t kBlock = 512;

// Calls compute(element, count) for blocks of up to kBlock elements of pixels [begin, end) of a
// channels-last array. A block is several pixels with all channels, or several channels of one
// pixel. repeat(channel, channels, pixels) precedes the blocks with the same channels; it repeats
// their terms for every pixel, so that each pass is one loop over the block.
template <typename Repeat, typename Compute>
void EachBlock(int64_t k, int64_t begin, int64_t end, const Repeat& repeat,
               const Compute& compute) {
  for (int64_t channel = 0; channel < k; channel += kBlock) {
    const int64_t channels = std::min(kBlock, k - channel);
    const int64_t pixels = channels == k ? std::max<int64_t>(1, kBlock / k) : 1;
    repeat(channel, channels, std::min(pixels, end - begin));
    for (int64_t pixel = begin; pixel < end; pixel += pixels) {
      compute(pixel * k + channel, std::min(pixels, end - pixel) * channels);
    }
  }
}

// Copies channels [channel, channel + channels) of a term once for every pixel of a block.
template <typename T>
void RepeatTerm(const T* term, int64_t channel, int64_t channels, int64_t pixels, T* to) {
  for (int64_t i = 0; i < pixels * channels; i += channels) {
    std::copy_n(term + channel, channels, to + i);
  }
}

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_BLOCK_LOOPS_H_
