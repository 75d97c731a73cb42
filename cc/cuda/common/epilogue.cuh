// Epilogues: what happens to an accumulator on its way to the output.
//
// Every kernel's store and the split-K reduction take an epilogue type, a member of the instance's
// tag (Tag::Epilogue; PlainEpilogue unless it says otherwise). They call it with each finished sum
// and where the sum lies, and once for every tile when the tile's outputs are stored. All arguments
// are values that a plain epilogue ignores, so the compiler removes their computation: an instance
// with PlainEpilogue costs what it would cost without the interface.
#ifndef JAXCONV_CUDA_COMMON_EPILOGUE_CUH_
#define JAXCONV_CUDA_COMMON_EPILOGUE_CUH_

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue_params.h"
#include "cuda/common/kernel.h"

namespace jaxconv {

// Where one element of the result lies.
struct OutputPlace {
  int64_t offset;   // in the output, in elements
  int32_t row;      // output pixel, counted over the images of a batch (wgrad: row of the filter)
  int32_t channel;  // of all output channels
  bool inside;      // false: a lane without an element; nothing may be read for it
};

// Comparisons are written so that NaN stays NaN: fmaxf would drop it.
__device__ __forceinline__ float Activate(Activation activation, float negative_slope, float v) {
  switch (activation) {
    case Activation::kNone:
      return v;
    case Activation::kRelu:
      return v < 0 ? 0 : v;
    case Activation::kRelu6:
      return v < 0 ? 0 : v > 6 ? 6 : v;
    case Activation::kLeakyRelu:
      return v < 0 ? v * negative_slope : v;
    case Activation::kGelu:  // exact, not the tanh form; 1 + erf would cancel below 0
      return 0.5f * v * erfcf(v * -0.70710678f);
    case Activation::kSilu:
      return v / (1 + expf(-v));
  }
  return v;
}

// The identity: what the convolution primitives use. Acc is float or int32_t.
struct PlainEpilogue {
  static constexpr bool kPlain = true;
  __device__ explicit PlainEpilogue(const EpilogueParams&) {}
  template <typename Out, typename Acc>
  __device__ __forceinline__ Acc operator()(Acc sum, const OutputPlace&) const {
    return sum;
  }
  // A tile's rows [m_first, m_end) and channels [channel_first, channel_end) are stored; every
  // thread that stored some of them calls it.
  __device__ __forceinline__ void FinishTile(int32_t, int32_t, int32_t, int32_t) const {}
};

// Scale, bias, residual and activation.
struct FusedEpilogue {
  static constexpr bool kPlain = false;
  const EpilogueParams& params;
  __device__ explicit FusedEpilogue(const EpilogueParams& p) : params(p) {}
  template <typename Out, typename Acc>
  __device__ __forceinline__ float operator()(Acc sum, const OutputPlace& at) const {
    if (!at.inside) return 0;
    auto value = static_cast<float>(sum);
    if (params.scale != nullptr) value *= __ldg(params.scale + at.channel);
    if (params.bias != nullptr) value += __ldg(params.bias + at.channel);
    if (params.residual != nullptr) {
      value += ToFloat(static_cast<const Out*>(params.residual)[at.offset]);
    }
    return Activate(params.activation, params.negative_slope, value);
  }
  __device__ __forceinline__ void FinishTile(int32_t, int32_t, int32_t, int32_t) const {}
};

// An epilogue that leaves the partial sums of split-K slices alone: the reduction finishes their
// sum.
template <class Epilogue>
struct WholeSumsOnly {
  static constexpr bool kPlain = false;
  const Epilogue epilogue;
  const bool partial;
  template <typename Out, typename Acc>
  __device__ __forceinline__ float operator()(Acc sum, const OutputPlace& at) const {
    return partial ? static_cast<float>(sum) : epilogue.template operator()<Out>(sum, at);
  }
  __device__ __forceinline__ void FinishTile(int32_t m_first, int32_t m_end, int32_t channel_first,
                                             int32_t channel_end) const {
    if (!partial) epilogue.FinishTile(m_first, m_end, channel_first, channel_end);
  }
};

// The epilogue of a kernel whose slices, if it has several, store partial sums.
template <class Epilogue>
__device__ __forceinline__ auto MakeEpilogue(const EpilogueParams& params, bool partial) {
  if constexpr (Epilogue::kPlain) {
    return Epilogue(params);
  } else {
    return WholeSumsOnly<Epilogue>{Epilogue(params), partial};
  }
}

// The pointers of a launch.
inline void BindEpilogue(const Operands& operands, EpilogueParams* params) {
  params->scale = operands.scale;
  params->bias = operands.bias;
  params->residual = operands.residual;
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_EPILOGUE_CUH_
