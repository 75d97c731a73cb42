// The launch operands of an epilogue's terms (core/epilogue.h).
#ifndef JAXCONV_CPU_EPILOGUE_TERMS_H_
#define JAXCONV_CPU_EPILOGUE_TERMS_H_

#include <cstdint>

namespace jaxconv::cpu {

// The operands and additional results that Epilogue declares; null if absent.
struct EpilogueTerms {
  const float* scale = nullptr;     // one for each output channel, or for each image and channel
  const int32_t* offset = nullptr;  // one for each output channel
  const float* bias = nullptr;      // one for each output channel
  const void* residual = nullptr;   // of the output's shape and type
  const float* residual_scale = nullptr;  // one
  void* pre = nullptr;                    // of the output's shape and type
  float* statistics = nullptr;            // (2, K)
};

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_EPILOGUE_TERMS_H_
