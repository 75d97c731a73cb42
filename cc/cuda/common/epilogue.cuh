// Epilogues: operations on an accumulator before it is stored.
//
// Every kernel's store and the split-K reduction take an epilogue type, a member of the instance's
// tag (Tag::Epilogue; PlainEpilogue unless it says otherwise). They call it with each finished sum
// and its position, and once for every tile after the tile is stored. PlainEpilogue ignores these
// arguments, so the compiler removes their computation, and the interface costs nothing.
#ifndef JAXCONV_CUDA_COMMON_EPILOGUE_CUH_
#define JAXCONV_CUDA_COMMON_EPILOGUE_CUH_

#include <cstdint>

#include "cuda/common/activation.cuh"
#include "cuda/common/element.cuh"
#include "cuda/common/epilogue_params.h"
#include "cuda/common/kernel.h"

namespace jaxconv {

// The position of one element of the result.
struct OutputPlace {
  int64_t offset;   // in the output, in elements
  int32_t row;      // output pixel, counted over the images of a batch (wgrad: row of the filter)
  int32_t channel;  // counted over all groups
  bool inside;      // false: a lane without an element; nothing may be read for it
};

// The identity, which the convolution primitives use. Acc is float or int32_t.
struct PlainEpilogue {
  static constexpr bool kPlain = true;
  __device__ explicit PlainEpilogue(const EpilogueParams&) {}
  template <typename Out, typename Acc>
  __device__ __forceinline__ Acc operator()(Acc sum, const OutputPlace&) const {
    return sum;
  }
  // Called after rows [m_first, m_end) and channels [channel_first, channel_end) of a tile are
  // stored, by every thread that stored some of them.
  __device__ __forceinline__ void FinishTile(int32_t, int32_t, int32_t, int32_t) const {}
};

// Scale and bias of kWidth neighbouring output channels.
template <int kWidth>
struct ChannelTerms {
  float scale[kWidth], bias[kWidth];
};

// Whether an epilogue is short enough to be inlined for every sum: no second result, and the
// activation is a clamp.
__device__ __forceinline__ bool Clamps(const EpilogueParams& params) {
  return params.pre == nullptr && params.activation <= Activation::kRelu6;
}

// Scale, bias, residual and activation. Stores that hold several neighbouring channels of a pixel
// process them together (Terms, Scale, Add): scale and bias are loaded once for all of a thread's
// pixels, the residual as vectors. Other stores call it for each element. No load is ld.global.nc,
// because a kernel that overlaps the previous kernel is launched before its operands are written.
struct FusedEpilogue {
  static constexpr bool kPlain = false;
  static constexpr bool partial = false;
  const EpilogueParams& params;
  __device__ __forceinline__ const FusedEpilogue& Whole() const { return *this; }
  __device__ explicit FusedEpilogue(const EpilogueParams& p) : params(p) {}

  template <typename Out, typename Acc>
  __device__ __forceinline__ float operator()(Acc sum, const OutputPlace& at) const {
    if (!at.inside) return 0;
    float value[1] = {static_cast<float>(sum)};
    Neighbours<Out, 1> residual{};
    if (params.residual != nullptr) residual = Residual<Out, 1>(at.offset);
    Scale(Terms<1>(at.channel), value);
    Add<Out>(value, residual, at.offset);
    Activate<Out>(params.activation, params.negative_slope, value);
    return value[0];
  }
  __device__ __forceinline__ void FinishTile(int32_t, int32_t, int32_t, int32_t) const {}

  // Loads channels [channel, channel + kWidth); if kWidth is a multiple of 2 or 4, so is `channel`.
  template <int kWidth>
  __device__ __forceinline__ ChannelTerms<kWidth> Terms(int32_t channel) const {
    ChannelTerms<kWidth> terms;
    LoadTerm(params.scale, channel, 1, terms.scale);
    LoadTerm(params.bias, channel, 0, terms.bias);
    return terms;
  }

  // Loads kWidth channels from an output offset on, a multiple of kWidth. Only if there is a
  // residual.
  template <typename Out, int kWidth>
  __device__ __forceinline__ Neighbours<Out, kWidth> Residual(int64_t offset) const {
    return Neighbours<Out, kWidth>::Load(static_cast<const Out*>(params.residual) + offset);
  }

  // Applies scale and bias to the sums of their channels.
  template <int kWidth>
  static __device__ __forceinline__ void Scale(const ChannelTerms<kWidth>& terms, float* values) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) values[e] = fmaf(values[e], terms.scale[e], terms.bias[e]);
  }

  // Completes scaled sums to t, which is stored if a second result is requested. `residual` is read
  // if there is one.
  template <typename Out, int kWidth>
  __device__ __forceinline__ void Add(float (&values)[kWidth],
                                      const Neighbours<Out, kWidth>& residual,
                                      int64_t offset) const {
    if (params.residual != nullptr) residual.AddTo(values);
    if (params.pre != nullptr) {
      Neighbours<Out, kWidth>::Rounded(values).Store(static_cast<Out*>(params.pre) + offset);
    }
  }

 private:
  template <int kWidth>
  static __device__ __forceinline__ void LoadTerm(const float* from, int32_t channel, float absent,
                                                  float (&to)[kWidth]) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) to[e] = absent;
    if (from == nullptr) return;
    constexpr int kVector = kWidth % 4 == 0 ? 4 : kWidth % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int e = 0; e < kWidth; e += kVector) {
      float values[kVector];
      Neighbours<float, kVector>::Load(from + channel + e).Unpack(values);
#pragma unroll
      for (int v = 0; v < kVector; ++v) to[e + v] = values[v];
    }
  }
};

// Stores the partial sums of split-K slices unchanged; the reduction applies the epilogue to their
// sum.
template <class Epilogue>
struct WholeSumsOnly {
  static constexpr bool kPlain = false;
  const Epilogue epilogue;
  const bool partial;
  __device__ __forceinline__ const Epilogue& Whole() const { return epilogue; }
  template <typename Out, typename Acc>
  __device__ __forceinline__ float operator()(Acc sum, const OutputPlace& at) const {
    if (partial) return static_cast<float>(sum);
    return epilogue.template operator()<Out>(sum, at);
  }
  __device__ __forceinline__ void FinishTile(int32_t m_first, int32_t m_end, int32_t channel_first,
                                             int32_t channel_end) const {
    if (!partial) epilogue.FinishTile(m_first, m_end, channel_first, channel_end);
  }
};

// The epilogue of a kernel that may have several slices, which then store partial sums.
template <class Epilogue>
__device__ __forceinline__ auto MakeEpilogue(const EpilogueParams& params, bool partial) {
  if constexpr (Epilogue::kPlain) {
    return Epilogue(params);
  } else {
    return WholeSumsOnly<Epilogue>{Epilogue(params), partial};
  }
}

// Sets the pointers of a launch.
inline void BindEpilogue(const Operands& operands, EpilogueParams* params) {
  params->scale = operands.scale;
  params->bias = operands.bias;
  params->residual = operands.residual;
  params->pre = operands.pre;
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_EPILOGUE_CUH_
